// Memory: bounds, initialisation and races of shared and global memory.
//
// Every access of a kernel outside of its stack calls touch(), through hooks.cpp.  A shadow cell
// for each byte stores the last writer and two readers with their vector-clock times; an access
// that no barrier, fence or wait orders after them is a race.
#include "machine.hpp"

#include <algorithm>
#include <elf.h>
#include <link.h>
#include <map>
#include <memory>
#include <set>

namespace emu {
enum { DYNAMIC, STATIC_BELOW, STATIC_ABOVE, REGIONS_OF_A_BLOCK };

static int shared_regions() { return M.blocks * REGIONS_OF_A_BLOCK; }

static Region *find_region(const char *p);

// ---- order between blocks ----------------------------------------------------------------------
// As in PTX: a thread's __threadfence followed by its atomic publishes, at the atomic's address,
// all that happened before the fence.  A thread with an atomic at that address followed by a
// __threadfence is ordered after it.  Clusters run one after the other, so what other clusters have
// published does not change while one runs.
using Clusters = std::map<unsigned, Known>;  // the times that each cluster has published

struct Order {  // of a thread
  VectorClock fence[2];  // its clock at its last fence: [0] of the block, [1] of the device
  std::set<const void *> heard[2];  // addresses of its atomics since then
};
struct Acquired {  // from its time `since` on, a thread is ordered after what others published
  int thread;
  Clock since;
  Clusters known;
};
static std::vector<Order> orders;
static std::vector<Acquired> acquired;  // by threads of the running cluster
static std::map<const void *, Clusters> published;
static std::map<const void *, Together> published_here;  // within the cluster, by either fence

static void merge(Clusters &into, unsigned cluster, const Known &times) {
  auto &mine = into[cluster];
  if (!mine) {
    mine = times;
  } else if (mine != times) {
    auto both = std::make_shared<Times>(*mine);
    for (size_t i = 0; i < both->size(); i++) (*both)[i] = std::max((*both)[i], (*times)[i]);
    mine = both;
  }
}

void threadfence(bool device) {
  if (!M.checks) return;
  Fiber *f = M.cur;
  Order &order = orders[f->index];
  for (auto *p : order.heard[device])
    if (auto i = published_here.find(p); i != published_here.end()) {
      f->clock.learn(i->second.table());
      f->acquired = true;
    }
  if (device) {
    Clusters known;
    for (auto *p : order.heard[1])
      for (auto &[cluster, times] : published[p])
        if (cluster != M.serial) merge(known, cluster, times);
    if (!known.empty()) {
      acquired.push_back({f->index, ++f->clock.own, std::move(known)});
      f->acquired = true;
    }
    order.heard[1].clear();
  }
  order.heard[0].clear();
  for (int scope = 0; scope <= device; scope++)
    order.fence[scope] = f->clock;
  f->clock.own++;
}

void heard(const void *p) {
  for (auto &addresses : orders[M.cur->index].heard) addresses.insert(p);
}

void publish(const void *p, bool replace) {
  Order &order = orders[M.cur->index];
  if (replace) {  // a plain store ends the release sequence of earlier atomics
    published.erase(p);
    published_here.erase(p);
  }
  if (!order.fence[0]) return;
  Together &here = published_here[p];
  if (here.empty()) here.clear(M.ids);
  here.add(order.fence[0]);
  const VectorClock &fence = order.fence[1];
  if (!fence || find_region((const char *)p) < &M.regions[shared_regions()]) return;
  Clusters &known = published[p];
  for (auto &a : acquired)
    if (fence[a.thread] >= a.since)
      for (auto &[cluster, times] : a.known) merge(known, cluster, times);
  Together all;
  all.clear(M.ids);
  all.add(fence);
  merge(known, M.serial, all.table());
}

// Returns whether an access of a thread or agent at a time happened before a clock of this cluster.
static bool ordered(unsigned cluster, int id, Clock time, const VectorClock &clock) {
  if (cluster == M.serial) return time <= clock[id];
  for (auto &a : acquired)
    if (clock[a.thread] >= a.since)
      if (auto i = a.known.find(cluster); i != a.known.end() && (*i->second)[id] >= time)
        return true;
  return false;
}

void atomic_enter(void *p, unsigned size, const char *file, int line) {
  check_alignment(p, size, {file, line});
  if (!M.checks) return;
  touch(p, size, Atomic, {file, line});
  heard(p);
  publish(p, false);
}

// ---- the region of an address ------------------------------------------------------------------
static Region *find_region(const char *p) {
  Region *r = &M.regions[M.last_region];
  if (p >= r->base && p < r->base + r->size) return r;
  for (int i = DYNAMIC; i < shared_regions(); i += REGIONS_OF_A_BLOCK) {
    r = &M.regions[i];
    if (size_t(p - r->base) < M.dynamic_capacity) {  // only the bytes that the launch requested
      M.last_region = i;
      return size_t(p - r->base) < r->size ? r : nullptr;
    }
  }
  for (size_t i = 0; i < M.regions.size(); i++) {
    r = &M.regions[i];
    if (p >= r->base && p < r->base + r->size) {
      M.last_region = int(i);
      return r;
    }
  }
  return nullptr;
}

std::string describe(const char *p) {
  const Region *best = nullptr;
  long nearest = 1 << 20;
  for (auto &r : M.regions) {
    long d = p < r.base ? r.base - p : p - (r.base + r.size);
    if (d < nearest) {
      nearest = d;
      best = &r;
    }
  }
  if (!best) return "an address in no device buffer";
  return std::string(best->name) + " at byte " + std::to_string(long(p - best->base)) + " of " +
         std::to_string(best->size);
}

static const char *name_of(Access a) { return a == Atomic ? "atomic" : a == Write ? "write" : "read"; }

static std::string owner(int id, unsigned cluster = M.serial) {
  bool here = cluster == M.serial;
  std::string of = here ? "" : " of block " + text(block_of(cluster, 0));
  if (id == kPending) return "an unfinished cp.async";
  if (id >= M.fibers + M.wgmma_agents) return "a TMA copy" + of;
  if (id >= M.fibers) return "wgmma of warpgroup " + std::to_string(id - M.fibers) + of;
  auto &f = M.fiber[id];
  if (!here) of = " of block " + text(block_of(cluster, f.rank));
  if (here && M.blocks > 1) of = " of block rank " + std::to_string(f.rank);
  return "thread " + text(f.tid) + of;
}

// Source locations are numbered, so that a shadow cell stores one in two bytes.
static std::vector<Where> sites;
static std::map<std::pair<const void *, int>, uint16_t> site_ids;

static uint16_t site(Where at) {
  static Where last;
  static uint16_t last_id;
  if (sites.size() && at.file == last.file && at.line == last.line) return last_id;
  auto [i, fresh] = site_ids.try_emplace({at.file, at.line}, uint16_t(sites.size()));
  if (fresh) sites.push_back(at);
  last = at;
  return last_id = i->second;
}

// Addresses of shared memory as on a GPU: static variables, then dynamic memory from the next KiB.
static uint32_t window(int region) {
  uint32_t below = M.regions[STATIC_BELOW].size, above = M.regions[STATIC_ABOVE].size;
  return region == STATIC_BELOW ? 0 : region == STATIC_ABOVE ? below : (below + above + 1023) & ~1023u;
}

// g++ reads a guard byte to see if a __shared__ variable of a class, such as __half, is
// constructed.  That byte is in the image too; its poison means yes.
static bool is_guard(const char *p) {
  size_t offset = p - M.regions[M.cur->rank * REGIONS_OF_A_BLOCK + STATIC_BELOW].base;
  return std::find(M.guards.begin(), M.guards.end(), offset) != M.guards.end();
}

extern "C" void emu_guards(const size_t *offsets, int count) {
  M.guards.assign(offsets, offsets + count);
}

// ---- one access --------------------------------------------------------------------------------
void touch(const void *ptr, size_t n, Access a, Where at, int agent, const Fiber *as) {
  if (!M.checks) return;
  const char *p = (const char *)ptr;
  const Fiber *f = as ? as : M.cur;
  if (size_t(p - f->stack) < kStack) return;
  Region *r = find_region(p);
  if (!r || p + n > r->base + r->size)
    fail("out-of-bounds " + std::string(name_of(a)) + " of " + std::to_string(n) + " bytes: " +
             describe(p), at);
  if (a != Read && !r->writable) fail("write to read-only " + std::string(r->name), at);
  if (!r->writable) return;
  if (r->shadow.empty()) r->shadow.resize(r->size);
  int region = int(r - &M.regions[0]);
  bool shared = region < shared_regions();
  if (M.counting && (agent < 0 || !shared))  // the bank follows from the address in shared memory
    count_access(shared ? window(region % REGIONS_OF_A_BLOCK) + (p - r->base) : (uint64_t)p, n,
                 shared, a == Peek ? Read : a, at, agent < 0 ? f : &M.fiber[0]);
  if (shared && region / REGIONS_OF_A_BLOCK != f->rank)
    check_neighbour(region / REGIONS_OF_A_BLOCK, f, at);
  int me = agent < 0 ? f->index : M.fibers + agent;
  const VectorClock &clock = agent < 0 ? f->clock : agent_clock(agent);
  Shadow *cells = &r->shadow[p - r->base];
  uint16_t here = site(at);
  auto byte = [&](size_t i) {
    return std::string(r->name) + " byte " + std::to_string(long(p + i - r->base));
  };
  auto race = [&](const char *their, int id, unsigned cluster, int where, size_t i) {
    fail("race on " + byte(i) + ": " + name_of(a) + " here, unordered with " + their + " by " +
             owner(id, cluster) + " at " + place(sites[where]) +
             (cluster == M.serial ? "" : "; blocks are ordered by __threadfence, an atomic, then "
                                         "an atomic and __threadfence of the other"), at);
  };
  for (size_t i = 0; i < n; i++) {
    Shadow &c = cells[i];
    bool foreign_write = c.wrote && c.wrote_in != M.serial;
    if (c.wrote) {
      if (c.writer == kPending) race("write", kPending, M.serial, c.wrote_at, i);
      bool mine = c.writer == me && !foreign_write, both = c.atomic && (a == Atomic || a == Peek);
      if (!mine && !both && !ordered(c.wrote_in, c.writer, c.wrote, clock))
        race(c.atomic ? "atomic" : "write", c.writer, c.wrote_in, c.wrote_at, i);
      // no fence of hopper.cuh orders a thread's write to global memory before an async read of it
      if (agent >= 0 && c.writer < M.fibers && a != Atomic &&
          (shared ? c.wrote > M.fiber[c.writer].fence : a == Read))
        fail("async proxy " + std::string(name_of(a)) + "s " + r->name + " written by " +
                 owner(c.writer, c.wrote_in) + " with no fence.proxy.async after the write", at);
    }
    if (a == Write || a == Atomic) {
      for (int k = 0; k < 2; k++) {
        bool mine = c.reader[k] == me && c.read_in == M.serial;
        if (c.read[k] && !mine && !ordered(c.read_in, c.reader[k], c.read[k], clock))
          race("read", c.reader[k], c.read_in, c.read_at[k], i);
      }
      if (c.foreign_read && c.foreign_in != M.serial &&
          !ordered(c.foreign_in, c.foreign, c.foreign_read, clock))
        race("read", c.foreign, c.foreign_in, c.foreign_at, i);
      c.writer = me;
      c.wrote = clock[me];
      c.wrote_at = here;
      c.wrote_in = M.serial;
      c.atomic = a == Atomic;
      c.read[0] = c.read[1] = c.foreign_read = 0;
      continue;
    }
    if (shared && !c.wrote && is_guard(p)) return;
    if (shared && !c.wrote) fail("read of uninitialised " + byte(i), at);
    if (a == Peek) continue;
    if (c.read_in != M.serial) {
      if (c.read[0]) {  // kept, as a later write of this cluster may race with that read
        c.foreign = c.reader[0];
        c.foreign_read = c.read[0];
        c.foreign_in = c.read_in;
        c.foreign_at = c.read_at[0];
      }
      c.read[0] = c.read[1] = 0;
      c.read_in = M.serial;
    }
    auto mine = [&](int k) { return c.read[k] && c.reader[k] == me; };
    auto past = [&](int k) { return !c.read[k] || c.read[k] <= clock[c.reader[k]]; };
    int k = mine(0) ? 0 : mine(1) ? 1 : past(0) ? 0 : past(1) ? 1 : (c.turn ^= 1);
    c.reader[k] = me;
    c.read[k] = clock[me];
    c.read_at[k] = here;
  }
}

void mark_pending(const void *p, size_t n) {
  if (!M.checks) return;
  Region *r = find_region((const char *)p);
  for (size_t i = 0; i < n; i++) r->shadow[(const char *)p - r->base + i].writer = kPending;
}

void settle(const void *p, size_t n) {
  if (!M.checks) return;
  Region *r = find_region((const char *)p);
  for (size_t i = 0; i < n; i++) {
    Shadow &c = r->shadow[(const char *)p - r->base + i];
    c.writer = M.cur->index;
    c.wrote = M.cur->clock.own;
  }
}

// Returns whether a thread or agent outside of a block accesses its shared memory unordered with
// `end`.
bool touched_after(int rank, const Times &end, std::string &what, Where &at) {
  auto late = [&](int id, Clock time) {
    bool foreign = id < M.fibers ? M.fiber[id].rank != rank : id >= M.fibers + M.wgmma_agents;
    return foreign && time > end[id];
  };
  for (int i = rank * REGIONS_OF_A_BLOCK; i < (rank + 1) * REGIONS_OF_A_BLOCK; i++)
    for (auto &c : M.regions[i].shadow) {
      int k = late(c.reader[0], c.read[0]) ? 0 : late(c.reader[1], c.read[1]) ? 1 : -1;
      bool wrote = c.writer != kPending && late(c.writer, c.wrote);
      if (!wrote && k < 0) continue;
      what = wrote ? "write by " + owner(c.writer) : "read by " + owner(c.reader[k]);
      at = sites[wrote ? c.wrote_at : c.read_at[k]];
      return true;
    }
  return false;
}

// ---- addresses of shared memory ----------------------------------------------------------------
uint32_t shared_address(const void *p, Where at) {
  for (int i = 0; i < REGIONS_OF_A_BLOCK; i++) {
    auto &r = M.regions[M.cur->rank * REGIONS_OF_A_BLOCK + i];
    size_t offset = (const char *)p - r.base;
    bool begins = i == DYNAMIC && r.base;  // a kernel may use its address even if its size is 0
    if ((r.size || begins) && offset <= r.size) return window(i) + uint32_t(offset);
  }
  fail("not a pointer to the block's own shared memory", at);
}

uint32_t shared_address(const void *p, const char *file, int line) {
  return shared_address(p, {file, line});
}

char *from_shared(uint32_t a, size_t n, Where at, int rank) {
  for (int i : {STATIC_BELOW, STATIC_ABOVE, DYNAMIC}) {
    auto &r = M.regions[rank * REGIONS_OF_A_BLOCK + i];
    // an address at the end of one region, without bytes, is the one at the start of the next
    size_t least = i == DYNAMIC ? n : std::max<size_t>(n, 1);
    if (a >= window(i) && a - window(i) + least <= r.size) return r.base + (a - window(i));
  }
  fail("shared-memory address " + std::to_string(a) + " is outside the block's " +
           std::to_string(window(DYNAMIC) + M.regions[DYNAMIC].size) + " bytes", at);
}

// ---- a launch, a block -------------------------------------------------------------------------
// __shared__ is thread_local in the module: the thread-local image is the static shared memory,
// with the dynamic buffer somewhere inside it.
void start_memory(size_t size, size_t capacity) {
  M.regions.assign(shared_regions(), {nullptr, 0, "static shared memory", true, {}});
  for (int r = 0; r < M.blocks; r++)
    M.regions[r * REGIONS_OF_A_BLOCK] = {nullptr, size, "dynamic shared memory", true, {}};
  M.last_region = 0;
  M.dynamic_capacity = capacity;
  published.clear();
  sites.clear();
  site_ids.clear();
}

void add_image(int rank, char *dynamic, const void *symbol) {
  Region *own = &M.regions[rank * REGIONS_OF_A_BLOCK];
  own[DYNAMIC].base = own[STATIC_BELOW].base = own[STATIC_ABOVE].base = dynamic;
  struct Wanted {
    int rank;
    uintptr_t symbol;
  } wanted{rank, (uintptr_t)symbol};
  auto visit = [](dl_phdr_info *info, size_t, void *pointer) -> int {
    auto [rank, symbol] = *(Wanted *)pointer;
    bool mine = false;
    for (int k = 0; k < info->dlpi_phnum; k++) {
      auto &h = info->dlpi_phdr[k];
      auto start = info->dlpi_addr + h.p_vaddr;
      mine |= h.p_type == PT_LOAD && symbol >= start && symbol < start + h.p_memsz;
    }
    if (!mine) return 0;
    for (int k = 0; k < info->dlpi_phnum; k++) {
      auto &h = info->dlpi_phdr[k];
      if (h.p_type == PT_LOAD && rank == 0)
        M.regions.push_back(
            {(char *)info->dlpi_addr + h.p_vaddr, h.p_memsz, "module constants", false, {}});
      if (h.p_type == PT_TLS && info->dlpi_tls_data) {
        Region *own = &M.regions[rank * REGIONS_OF_A_BLOCK];
        char *low = (char *)info->dlpi_tls_data, *high = low + h.p_memsz;
        char *buffer = own[DYNAMIC].base;
        bool inside = buffer >= low && buffer < high;
        own[STATIC_BELOW].base = low;
        own[STATIC_BELOW].size = (inside ? buffer : high) - low;
        own[STATIC_ABOVE].base = buffer + M.dynamic_capacity;
        own[STATIC_ABOVE].size = inside ? high - own[STATIC_ABOVE].base : 0;
      }
    }
    return 1;
  };
  dl_iterate_phdr(visit, &wanted);
}

void reset_memory() {
  orders.assign(M.checks ? M.fibers : 0, {});
  acquired.clear();
  published_here.clear();
  for (int i = 0; i < shared_regions(); i++) {
    Region &r = M.regions[i];
    if (r.size) memset(r.base, 0xff, r.size);  // NaN: the values before a kernel's first write
    if (M.checks) r.shadow.assign(r.size, Shadow{});
  }
}
}  // namespace emu
