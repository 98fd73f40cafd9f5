// Collectives: barriers, shuffles, votes, and the rendezvous that tensor-core products also use.
//
// Lanes with the same operation and mask meet; the last one to arrive does the work for all.  Lanes
// of one mask that meet with different operations, or at different lines, diverge: this is
// undefined on a GPU and an error here.  A barrier merges the vector clocks of its threads.
#include "machine.hpp"

#include <algorithm>

namespace emu {
// ---- rendezvous --------------------------------------------------------------------------------
struct Meeting {
  int kind;
  const char *what;
  uint32_t mask;
  int group, size, arrived;
  Where at;
  Op op;
  void *lane[128];
};
static std::vector<Meeting *> open_meetings;

void collective(int kind, int group, int size, uint32_t mask, const char *what, void *mine, Op op,
                Where at) {
  Fiber *me = M.cur;
  int lane = me->index - group * size;
  int want = size == 32 ? __builtin_popcount(mask) : size;
  if (size == 32 && !(mask >> lane & 1))
    fail(std::string(what) + ": the calling lane is not in the mask", at);
  Meeting *m = nullptr;
  for (auto *o : open_meetings)
    if (o->group == group && o->size == size && o->mask == mask) m = o;
  if (!m) {
    m = new Meeting{kind, what, mask, group, size, 0, at, op, {}};
    open_meetings.push_back(m);
  }
  if (m->kind != kind || !same(m->at, at))
    fail(std::string("divergent warp: this lane is at ") + what +
             ", others of the same mask wait at " + m->what + " " + place(m->at), at);
  if (uint32_t gone = size == 32 ? mask & ~M.lanes[group] : 0)
    fail(std::string(what) + ": the mask names lane " + std::to_string(__builtin_ctz(gone)) +
             ", which has exited or never existed", at);
  m->lane[lane] = mine;
  if (++m->arrived < want) return suspend(what, at);
  open_meetings.erase(std::find(open_meetings.begin(), open_meetings.end(), m));
  m->op(m->lane, size);
  for (int i = 0; i < size; i++)
    if (m->lane[i] && i != lane) make_ready(&M.fiber[group * size + i]);
  delete m;
}

// ---- barriers of a block -----------------------------------------------------------------------
struct Barrier {
  int arrived = 0, count = 0, votes = 0;
  Where at{};
  std::vector<Fiber *> waiting;
  std::vector<VectorClock> passed;  // clocks at bar.arrive
};
static Barrier barriers[kMaxCluster][16];

static Barrier &barrier_of(int id, Where at) {
  if (id < 0 || id > 15) fail("no barrier " + std::to_string(id) + ": a block has 16", at);
  return barriers[M.cur->rank][id];
}

static void release(Barrier &b) {
  if (M.checks) {
    static Together all;
    all.clear(M.ids);
    for (auto *f : b.waiting) all.add(f->clock);
    for (auto &clock : b.passed) all.add(clock);
    Known table = all.table();
    for (auto *f : b.waiting) {
      f->clock.replace(table);
      f->clock.own++;
    }
  }
  for (auto *f : b.waiting) {
    f->votes = b.votes;
    if (f != M.cur) make_ready(f);
  }
  b = Barrier();
}

// id 0 with count 0 is __syncthreads; wait = false is bar.arrive
void barrier(int id, int count, bool wait, const char *file, int line) {
  Where at{file, line};
  Barrier &b = barrier_of(id, at);
  if (b.arrived && b.count != count)
    fail("barrier " + std::to_string(id) + " used with two thread counts", at);
  if (count % 32) fail("barrier thread count must be a multiple of 32", at);
  if (b.arrived && !count && !same(b.at, at))
    fail("divergent __syncthreads: " + std::to_string(b.arrived) +
             " thread(s) of this block wait at " + place(b.at), at);
  b.count = count;
  b.at = at;
  b.arrived++;
  if (wait)
    b.waiting.push_back(M.cur);
  else
    b.passed.push_back(M.cur->clock);
  bool full = b.arrived == (count ? count : M.threads);
  if (full) {
    Fiber *me = M.cur;
    release(b);
    if (!wait && M.checks) me->clock.own++;
    return;
  }
  if (wait) return suspend(count ? "named barrier" : "__syncthreads", at);
  if (M.checks) M.cur->clock.own++;
}

int barrier_count(int id, int count, bool pred, const char *file, int line) {
  barrier_of(id, {file, line}).votes += pred;
  barrier(id, count, true, file, line);
  return M.cur->votes;
}

int barrier_count(bool pred, const char *file, int line) {
  return barrier_count(0, 0, pred, file, line);
}

// ---- a warp ------------------------------------------------------------------------------------
void syncwarp(unsigned mask, const char *file, int line) {
  auto op = [](void **lane, int n) {
    if (!M.checks) return;
    static Together all;
    all.clear(M.ids);
    for (int i = 0; i < n; i++)
      if (lane[i]) all.add(((Fiber *)lane[i])->clock);
    Known table = all.table();
    for (int i = 0; i < n; i++)
      if (auto *f = (Fiber *)lane[i]) {
        f->clock.replace(table);
        f->clock.own++;
      }
  };
  collective(SYNCWARP, M.cur->index / 32, 32, mask, "__syncwarp", M.cur, op, {file, line});
}

// Shuffles and votes order no memory accesses: they do not change the clocks.
uint64_t shfl(unsigned mask, uint64_t v, int src, const char *file, int line) {
  struct Lane {
    uint64_t in, out;
    int src;
    Where at;
  } mine{v, 0, src, {file, line}};
  auto op = [](void **lane, int) {
    for (int i = 0; i < 32; i++)
      if (auto *l = (Lane *)lane[i]) {
        if (!lane[l->src])
          fail("shuffle reads lane " + std::to_string(l->src) + ", which is not in the mask",
               l->at);
        l->out = ((Lane *)lane[l->src])->in;
      }
  };
  collective(SHFL, M.cur->index / 32, 32, mask, "__shfl_sync", &mine, op, mine.at);
  return mine.out;
}

unsigned ballot(unsigned mask, bool pred, const char *file, int line) {
  struct Lane {
    bool in;
    unsigned out;
  } mine{pred, 0};
  auto op = [](void **lane, int) {
    unsigned votes = 0;
    for (int i = 0; i < 32; i++)
      if (lane[i] && ((Lane *)lane[i])->in) votes |= 1u << i;
    for (int i = 0; i < 32; i++)
      if (lane[i]) ((Lane *)lane[i])->out = votes;
  };
  collective(BALLOT, M.cur->index / 32, 32, mask, "__ballot_sync", &mine, op, {file, line});
  return mine.out;
}

unsigned active_lanes() { return M.lanes[M.cur->index / 32]; }

[[noreturn]] void trap(const char *what, const char *file, int line) { fail(what, {file, line}); }

void check_barriers(int rank) {
  for (int id = 1; id < 16; id++)
    if (const Barrier &b = barriers[rank][id]; b.arrived)
      fail("block exits, and nobody has waited for the " + std::to_string(b.arrived) +
               " arrivals at named barrier " + std::to_string(id), b.at);
}

void reset_collectives() {
  for (auto *m : open_meetings) delete m;
  open_meetings.clear();
  for (auto &block : barriers)
    for (auto &b : block) b = Barrier();
}
}  // namespace emu
