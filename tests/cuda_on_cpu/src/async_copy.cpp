// Asynchronous copies: cp.async, mbarrier and the tensor memory accelerator (TMA).
//
// Every copy lands as late as the rules allow: cp.async at its wait, TMA when nobody else can run
// (or, with a seed, at a random moment before).  Until then the bytes are poison, so a missing
// wait shows.
#include "machine.hpp"

#include <algorithm>
#include <deque>
#include <map>

namespace emu {
// ---- cp.async ----------------------------------------------------------------------------------
void cp_async(void *dst, const void *src, int bytes, int src_bytes, const char *file, int line) {
  Where at{file, line};
  if (((uintptr_t)dst | (src_bytes ? (uintptr_t)src : 0)) % bytes)
    fail("cp.async operand is not aligned to its size", at);
  touch(dst, bytes, Write, at);
  mark_pending(dst, bytes);
  if (src_bytes) touch(src, src_bytes, Read, at);
  memset(dst, 0xff, bytes);
  M.cur->groups.back().push_back({(char *)dst, (const char *)src, bytes, src_bytes});
}

void cp_async_commit() { M.cur->groups.emplace_back(); }

void cp_async_wait(int pending, const char *, int) {
  auto &g = M.cur->groups;
  int done = std::max(0, int(g.size()) - 1 - pending);
  for (int i = 0; i < done; i++)
    for (auto &c : g[i]) {
      memcpy(c.dst, c.src, c.src_bytes);
      memset(c.dst + c.src_bytes, 0, c.bytes - c.src_bytes);
      settle(c.dst, c.bytes);
    }
  g.erase(g.begin(), g.begin() + done);
}

// ---- mbarrier ----------------------------------------------------------------------------------
struct MBarrier {
  int owner = 0;
  bool fenced = false;
  int count = 0, pending = 0, phase = 0;
  long bytes = 0;  // expected and not yet landed
  std::vector<Clock> arriving, passed;
  std::vector<Fiber *> waiting;
};
static std::map<const void *, MBarrier> mbarriers;

static MBarrier &mbar(const void *p, Where at) {
  auto i = mbarriers.find(p);
  if (i == mbarriers.end()) fail("mbarrier used before mbarrier.init", at);
  return i->second;
}

static void end_phase(MBarrier &b) {
  if (b.pending || b.bytes) return;
  b.phase ^= 1;
  b.pending = b.count;
  b.passed = b.arriving;
  for (auto *f : b.waiting) make_ready(f);
  b.waiting.clear();
}

void mbarrier_init(void *p, int count, const char *file, int line) {
  Where at{file, line};
  if ((uintptr_t)p & 7) fail("mbarrier is not 8-byte aligned", at);
  touch(p, 8, Write, at);
  memset(p, 0, 8);
  MBarrier b;
  b.owner = M.cur->index;
  b.count = b.pending = count;
  b.arriving.assign(M.ids, 0);
  b.passed = b.arriving;
  mbarriers[p] = b;
}

void mbarrier_init_fence() {
  for (auto &[p, b] : mbarriers)
    if (b.owner == M.cur->index) b.fenced = true;
}

void mbarrier_arrive(void *p, int expect_tx, const char *file, int line) {
  Where at{file, line};
  touch(p, 8, Read, at);  // the initialisation must be ordered before us
  MBarrier &b = mbar(p, at);
  if (b.pending == 0)
    fail("mbarrier: more arrivals than its count of " + std::to_string(b.count), at);
  if (M.checks) {
    join(b.arriving.data(), M.cur->clock);
    M.cur->clock[M.cur->index]++;
  }
  b.pending--;
  b.bytes += expect_tx;
  end_phase(b);
}

void mbarrier_wait(void *p, int parity, const char *file, int line) {
  Where at{file, line};
  touch(p, 8, Read, at);
  MBarrier &b = mbar(p, at);
  while (b.phase == parity) {
    b.waiting.push_back(M.cur);
    suspend("mbarrier", at);
  }
  if (M.checks) join(M.cur->clock, b.passed.data());
}

// ---- TMA ---------------------------------------------------------------------------------------
struct Map {  // what tensor_map() in __init__.py packs
  uint32_t magic;
  uint8_t rank, elem, swizzle, pad;
  char *base;
  uint32_t dim[5];
  uint16_t box[6];
  uint64_t stride[4];
};
static_assert(sizeof(Map) <= 128);
constexpr uint32_t kMagic = 0x544d4150;

struct Copy {
  Map map;
  uint32_t dst;
  int coord[5];
  MBarrier *bar;
  int agent;
  Where at;
};
static std::deque<Copy> copies;
static int turn, store_agent;

static int next_agent() { return kWgmmaAgents + turn++ % (kAgents - kWgmmaAgents); }

uint32_t swizzled(int mode, uint32_t a) {
  static const uint32_t mask[] = {0, 0x10, 0x30, 0x70};
  return a ^ (a >> 3 & mask[mode]);
}

static size_t box_bytes(const Map &m) {
  size_t n = m.elem;
  for (int i = 0; i < m.rank; i++) n *= m.box[i];
  return n;
}

// Visit the box one inner row at a time: f(shared offset, global row or null, first, last valid).
template <class F> static void each_row(const Map &m, const int *c, F f) {
  int index[5] = {}, rows = 1;
  for (int i = 1; i < m.rank; i++) rows *= m.box[i];
  for (int r = 0; r < rows; r++) {
    char *g = m.base;
    bool in = true;
    for (int i = 1; i < m.rank; i++) {
      long x = long(c[i]) + index[i];
      in &= x >= 0 && x < (long)m.dim[i];
      g += x * (long)m.stride[i - 1];
    }
    int lo = std::max(0, -c[0]), hi = std::min<long>(m.box[0], (long)m.dim[0] - c[0]);
    f(uint32_t(r) * m.box[0] * m.elem, in && lo < hi ? g + long(c[0]) * m.elem : nullptr, lo, hi);
    for (int i = 1; i < m.rank && ++index[i] == m.box[i]; i++) index[i] = 0;
  }
}

static Map check_map(int rank, const void *tensor_map, uint32_t shared, Where at) {
  Map m;
  memcpy(&m, tensor_map, sizeof m);
  if (m.magic != kMagic) fail("TMA: not a tensor map", at);
  if (m.rank != rank)
    fail("TMA: tensor map of rank " + std::to_string(m.rank) + " used with a " +
             std::to_string(rank) + "d copy", at);
  static const uint32_t align[] = {128, 256, 512, 1024};
  if (shared % align[m.swizzle])
    fail("TMA: shared address not aligned to " + std::to_string(align[m.swizzle]) + " bytes", at);
  if (m.swizzle && m.box[0] * m.elem > 16 << m.swizzle)
    fail("TMA: inner box wider than the swizzle span", at);
  return m;
}

void tma_load(int rank, void *dst, const void *map, void *bar, const int *coord, const char *file,
              int line) {
  Where at{file, line};
  uint32_t shared = shared_address(dst);
  Copy t{check_map(rank, map, shared, at), shared, {}, &mbar(bar, at), next_agent(), at};
  if (!t.bar->fenced)
    fail("TMA uses an mbarrier whose initialisation no fence.mbarrier_init (or fence.proxy.async)"
         " published", at);
  for (int i = 0; i < rank; i++) t.coord[i] = coord[i];
  size_t n = box_bytes(t.map);
  char *p = from_shared(t.dst, n, at);
  if (M.checks) {
    Clock *c = agent_clock(t.agent);
    join(c, M.cur->clock);
    c[M.threads + t.agent]++;
    touch(bar, 8, Read, at);
    touch(p, n, Write, at, t.agent);
  }
  memset(p, 0xff, n);
  copies.push_back(t);
}

void land_oldest_copy() {
  if (copies.empty()) return;
  Copy t = copies.front();
  copies.pop_front();
  const Map &m = t.map;
  each_row(m, t.coord, [&](uint32_t offset, char *g, int lo, int hi) {
    if (g) touch(g + lo * m.elem, size_t(hi - lo) * m.elem, Read, t.at, t.agent);
    for (int i = 0; i < m.box[0]; i++) {
      char *d = from_shared(swizzled(m.swizzle, t.dst + offset + i * m.elem), m.elem, t.at);
      if (g && i >= lo && i < hi)
        memcpy(d, g + i * m.elem, m.elem);
      else
        memset(d, 0, m.elem);
    }
  });
  if (M.checks) join(t.bar->arriving.data(), agent_clock(t.agent));
  t.bar->bytes -= (long)box_bytes(m);
  end_phase(*t.bar);
}

void tma_store(int rank, const void *map, const void *src, const int *coord, const char *file,
               int line) {
  Where at{file, line};
  uint32_t s = shared_address(src);
  Map m = check_map(rank, map, s, at);
  M.cur->stores++;
  store_agent = next_agent();
  if (M.checks) {
    Clock *c = agent_clock(store_agent);
    join(c, M.cur->clock);
    c[M.threads + store_agent]++;
    touch(src, box_bytes(m), Read, at, store_agent);
  }
  each_row(m, coord, [&](uint32_t offset, char *g, int lo, int hi) {
    if (!g) return;
    touch(g + lo * m.elem, size_t(hi - lo) * m.elem, Write, at, store_agent);
    for (int i = lo; i < hi; i++)
      memcpy(g + i * m.elem, from_shared(swizzled(m.swizzle, s + offset + i * m.elem), m.elem, at),
             m.elem);
  });
}

void tma_store_commit() {}

void tma_store_wait(int pending) {
  if (!pending) M.cur->stores = 0;
  if (M.checks && store_agent) join(M.cur->clock, agent_clock(store_agent));
}

void fence_proxy_async() {
  mbarrier_init_fence();
  if (M.checks) {
    Fiber *f = M.cur;
    f->fence = f->clock[f->index]++;
  }
}

bool copies_outstanding() { return !copies.empty(); }

void reset_async_copy() {
  mbarriers.clear();
  copies.clear();
  turn = store_agent = 0;
}
}  // namespace emu
