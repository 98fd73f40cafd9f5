// Asynchronous copies: cp.async, mbarrier and the tensor memory accelerator (TMA).
//
// Every copy completes as late as the rules allow: cp.async at its wait, TMA when no thread can run
// (or, with a seed, at a random earlier moment).  Until then the destination is poison, so that a
// missing wait is detected.
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
  M.cur->groups.back().push_back({(char *)dst, (const char *)src, bytes, src_bytes, at});
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
  long bytes = 0;  // expected bytes that have not arrived yet
  Together arriving;
  Known passed;
  std::vector<Fiber *> waiting;
};
static std::map<const void *, MBarrier> mbarriers;

static MBarrier &mbar(const void *p, Where at) {
  auto i = mbarriers.find(p);
  if (i == mbarriers.end()) fail("mbarrier used before mbarrier.init", at);
  return i->second;
}

// The initialisation of an mbarrier must be ordered before its use: by clocks or, once a fence has
// published it, by the cluster's barrier, even a relaxed one.
static MBarrier &initialised(const void *p, Where at) {
  auto i = mbarriers.find(p);
  if (i == mbarriers.end() || !i->second.fenced || !M.cur->met) touch(p, 8, Read, at);
  return mbar(p, at);
}

static void end_phase(MBarrier &b) {
  if (b.pending || b.bytes) return;
  b.phase ^= 1;
  b.pending = b.count;
  if (M.checks) b.passed = b.arriving.table();
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
  b.arriving.clear(M.ids);
  b.passed = M.nothing;
  mbarriers[p] = b;
}

void mbarrier_init_fence() {
  for (auto &[p, b] : mbarriers)
    if (b.owner == M.cur->index) b.fenced = true;
}

void mbarrier_arrive(void *p, int expect_tx, const char *file, int line) {
  Where at{file, line};
  MBarrier &b = initialised(p, at);
  if (b.pending == 0)
    fail("mbarrier: more arrivals than its count of " + std::to_string(b.count), at);
  if (M.checks) {
    b.arriving.add(M.cur->clock);
    M.cur->clock.own++;
  }
  b.pending--;
  b.bytes += expect_tx;
  end_phase(b);
}

// Signals the arrival of bytes that a thread wrote itself, before a fence.
void mbarrier_complete(void *p, int bytes, const char *file, int line) {
  MBarrier &b = initialised(p, {file, line});
  if (M.checks) {
    b.arriving.add(M.cur->clock);
    M.cur->clock.own++;
  }
  b.bytes -= bytes;
  end_phase(b);
}

void mbarrier_wait(void *p, int parity, const char *file, int line) {
  Where at{file, line};
  MBarrier &b = initialised(p, at);
  while (b.phase == parity) {
    b.waiting.push_back(M.cur);
    suspend("mbarrier", at);
  }
  if (M.checks) M.cur->clock.learn(b.passed);
}

// ---- TMA ---------------------------------------------------------------------------------------
struct Map {  // the format of TensorMap.packed() in __init__.py
  uint32_t magic;
  uint8_t rank, elem, swizzle;
  Number type;
  char *base;
  uint32_t dim[5];
  uint16_t box[6];
  uint64_t stride[4];
};
static_assert(sizeof(Map) <= 128);
constexpr uint32_t kMagic = 0x544d4150, kValue = 1;  // kValue: st.async, whose source is not memory

struct Copy {
  Map map;
  uint32_t dst;
  int rank;  // of the block whose shared memory is the destination
  int coord[5];
  MBarrier *bar;
  int agent;
  Where at;
};
static std::deque<Copy> copies;
static std::deque<uint32_t> values;  // of st.async; a deque keeps their addresses
static int turn;

static int next_agent() { return M.wgmma_agents + turn++ % kCopyAgents; }

uint32_t swizzled(int mode, uint32_t a) {
  static const uint32_t mask[] = {0, 0x10, 0x30, 0x70};
  return a ^ (a >> 3 & mask[mode]);
}

static size_t box_bytes(const Map &m) {
  size_t n = m.elem;
  for (int i = 0; i < m.rank; i++) n *= m.box[i];
  return n;
}

// Call f for each inner row of the box: f(shared offset, global row or null, first, end of valid).
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

// Issues one copy to the block of a rank, which also has its mbarrier.
static void issue(const Map &map, uint32_t dst, int rank, uint32_t bar, const int *coord,
                  Where at) {
  char *barrier = from_shared(bar, 8, at, rank);
  Copy t{map, dst, rank, {}, &initialised(barrier, at), next_agent(), at};
  if (!t.bar->fenced)
    fail("TMA uses an mbarrier whose initialisation no fence.mbarrier_init (or fence.proxy.async)"
         " published", at);
  for (int i = 0; i < map.rank; i++) t.coord[i] = coord[i];
  size_t n = box_bytes(map);
  char *p = from_shared(dst, n, at, rank);
  if (M.checks) {
    VectorClock &c = agent_clock(t.agent);
    c.learn(M.cur->clock);
    c.own++;
    touch(p, n, Write, at, t.agent);
  }
  memset(p, 0xff, n);
  copies.push_back(t);
}

void tma_load_multicast(int rank, void *dst, const void *map, void *bar, const int *coord,
                        unsigned ranks, const char *file, int line) {
  Where at{file, line};
  uint32_t shared = shared_address(dst, at);
  Map m = check_map(rank, map, shared, at);
  if (!ranks || ranks >> M.blocks)
    fail("TMA: multicast to ranks beyond the cluster of " + std::to_string(M.blocks), at);
  for (int r = 0; r < M.blocks; r++)
    if (ranks >> r & 1) issue(m, shared, r, shared_address(bar, at), coord, at);
}

void tma_load(int rank, void *dst, const void *map, void *bar, const int *coord, const char *file,
              int line) {
  tma_load_multicast(rank, dst, map, bar, coord, 1u << M.cur->rank, file, line);
}

void land_oldest_copy() {
  if (copies.empty()) return;
  Copy t = copies.front();
  copies.pop_front();
  const Map &m = t.map;
  each_row(m, t.coord, [&](uint32_t offset, char *g, int lo, int hi) {
    if (g && m.magic != kValue) touch(g + lo * m.elem, size_t(hi - lo) * m.elem, Read, t.at, t.agent);
    for (int i = 0; i < m.box[0]; i++) {
      uint32_t to = swizzled(m.swizzle, t.dst + offset + i * m.elem);
      char *d = from_shared(to, m.elem, t.at, t.rank);
      if (g && i >= lo && i < hi)
        memcpy(d, g + i * m.elem, m.elem);
      else
        memset(d, 0, m.elem);
    }
  });
  if (M.checks) t.bar->arriving.add(agent_clock(t.agent));
  t.bar->bytes -= (long)box_bytes(m);
  end_phase(*t.bar);
}

// `ordered`: the kernel keeps additions to the same memory in order, so that they are not a race.
static void store(const Map &m, uint32_t s, const int *coord, bool add, Where at,
                  bool ordered = false) {
  int agent = next_agent();
  Clock time = 0;
  if (M.checks) {
    if (M.cur->acquired)
      fail("a copy to global memory behind an acquire with no fence.proxy.async between", at);
    VectorClock &c = agent_clock(agent);
    c.learn(M.cur->clock);
    time = ++c.own;
    touch(from_shared(s, box_bytes(m), at), box_bytes(m), Read, at, agent);
    c.own++;
  }
  M.cur->stores.back().push_back({agent, time, at});
  each_row(m, coord, [&](uint32_t offset, char *g, int lo, int hi) {
    if (!g) return;
    Access access = add && !ordered ? Atomic : Write;
    for (int i = lo; i < hi; i++) {
      touch(g + i * m.elem, m.elem, access, at, agent);
      char *from = from_shared(swizzled(m.swizzle, s + offset + i * m.elem), m.elem, at);
      add ? add_in_place(m.type, g + i * m.elem, from)
          : (void)memcpy(g + i * m.elem, from, m.elem);
    }
  });
}

void tma_store(int rank, const void *map, const void *src, const int *coord, bool add,
               const char *file, int line) {
  Where at{file, line};
  Map m = check_map(rank, map, shared_address(src, at), at);
  if (add && m.type == Bits) fail("TMA: no sums of this dtype", at);
  store(m, shared_address(src, at), coord, add, at);
}

// ---- cp.async.bulk: a tensor of one axis, in units of 16 bytes ----------------------------------
static Map line_of(const void *base, const void *shared, int bytes, Where at) {
  if (((uintptr_t)base | shared_address(shared, at) | bytes) % 16 || bytes <= 0)
    fail("cp.async.bulk: addresses and size must be multiples of 16 bytes", at);
  if (bytes >= 1 << 20) fail("cp.async.bulk: size of 1 MiB or more", at);
  Map m{};
  m.rank = 1;
  m.elem = 16;
  m.base = (char *)base;
  m.dim[0] = m.box[0] = bytes / 16;
  return m;
}

void bulk_load(void *dst, const void *src, int bytes, void *bar, const char *file, int line) {
  Where at{file, line};
  int zero = 0;
  issue(line_of(src, dst, bytes, at), shared_address(dst, at), M.cur->rank, shared_address(bar, at), &zero,
        at);
}

void bulk_store(void *dst, const void *src, int bytes, const char *file, int line) {
  Where at{file, line};
  int zero = 0;
  store(line_of(dst, src, bytes, at), shared_address(src, at), &zero, false, at);
}

// Additions of floats in no fixed order are a race: the last bits of sums would differ.
void bulk_add(float *dst, const void *src, int bytes, const char *file, int line) {
  Where at{file, line};
  int zero = 0;
  Map m = line_of(dst, src, bytes, at);
  m.elem = 4;
  m.type = Float32;
  m.dim[0] = m.box[0] = bytes / 4;
  store(m, shared_address(src, at), &zero, true, at, true);
}

// ---- st.async: the value is stored in `values` until it lands -----------------------------------
void store_async(void *dst, uint32_t value, void *bar, int rank, const char *file, int line) {
  Where at{file, line};
  cluster_map(dst, rank, file, line);  // checks the rank
  uint32_t to = shared_address(dst, at);
  if (to % 4) fail("st.async operand is not aligned to its size", at);
  values.push_back(value);
  Map m{};
  m.magic = kValue;
  m.rank = 1;
  m.elem = 4;
  m.base = (char *)&values.back();
  m.dim[0] = m.box[0] = 1;
  int zero = 0;
  issue(m, to, rank, shared_address(bar, at), &zero, at);
}

void tma_store_commit() { M.cur->stores.emplace_back(); }

void tma_store_wait(int pending, bool read) {
  auto &g = M.cur->stores;
  int done = std::max(0, int(g.size()) - 1 - pending);
  for (int i = 0; i < done; i++)
    for (auto &s : g[i])
      if (M.checks) M.cur->clock.learn(M.fibers + s.agent, s.time + !read);
  if (!read) g.erase(g.begin(), g.begin() + done);
}

void fence_proxy_async() {
  mbarrier_init_fence();
  if (M.checks) {
    Fiber *f = M.cur;
    f->fence = f->clock.own++;
    f->acquired = false;
  }
}

bool copies_outstanding() { return !copies.empty(); }

bool copies_into(int rank, Where &at) {
  for (auto &c : copies)
    if (c.rank == rank) {
      at = c.at;
      return true;
    }
  return false;
}

void reset_async_copy() {
  mbarriers.clear();
  copies.clear();
  values.clear();
  turn = 0;
}
}  // namespace emu
