// Memory: bounds, initialisation and races of shared and global memory.
//
// Every access of a kernel outside its own stack comes to touch(), by way of hooks.cpp.  A shadow cell per byte remembers the last writer and two readers with their vector-clock times;
// an access that no barrier, fence or wait orders after them is a race.  Blocks run in turn, so
// order between blocks is what atomics behind a __threadfence make of it.
#include "machine.hpp"

#include <algorithm>
#include <elf.h>
#include <link.h>
#include <map>
#include <set>

namespace emu {
enum { DYNAMIC, STATIC_BELOW, STATIC_ABOVE, REGIONS_OF_A_BLOCK };

static int shared_regions() { return M.blocks * REGIONS_OF_A_BLOCK; }

// ---- order between blocks ----------------------------------------------------------------------
static std::map<const void *, std::set<unsigned>> released;  // blocks published at an address
static std::set<unsigned> seen;                              // blocks this one is ordered after

void threadfence() { M.cur->dirty = false; }

void atomic_enter(void *p, unsigned size, const char *file, int line) {
  if (!M.checks) return;
  touch(p, size, Atomic, {file, line});
  auto &r = released[p];
  seen.insert(r.begin(), r.end());
  if (M.cur->dirty) return;  // without a fence the atomic publishes nothing
  r.insert(seen.begin(), seen.end());
  r.insert(M.block_serial);
}

// ---- what an address belongs to ----------------------------------------------------------------
static Region *find_region(const char *p) {
  Region *r = &M.regions[M.last_region];
  if (p >= r->base && p < r->base + r->size) return r;
  for (int i = DYNAMIC; i < shared_regions(); i += REGIONS_OF_A_BLOCK) {
    r = &M.regions[i];
    if (size_t(p - r->base) < M.dynamic_capacity) {  // only the bytes that the launch asked for
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

static const char *name_of(Access a) { return a == Read ? "read" : a == Write ? "write" : "atomic"; }

static std::string owner(int id) {
  if (id == kPending) return "an unfinished cp.async";
  if (id >= M.fibers + M.wgmma_agents) return "a TMA copy";
  if (id >= M.fibers) return "wgmma of warpgroup " + std::to_string(id - M.fibers);
  auto t = M.fiber[id].tid;
  return "thread (" + std::to_string(t.x) + "," + std::to_string(t.y) + "," + std::to_string(t.z) +
         ")" + (M.blocks > 1 ? " of block rank " + std::to_string(M.fiber[id].rank) : "");
}

// Source places are interned, so that a shadow cell names one in two bytes.
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

// The shared window as a GPU numbers it: static variables, then dynamic from the next KiB.
static uint32_t window(int region) {
  uint32_t below = M.regions[STATIC_BELOW].size, above = M.regions[STATIC_ABOVE].size;
  return region == STATIC_BELOW ? 0 : region == STATIC_ABOVE ? below : (below + above + 1023) & ~1023u;
}

// g++ asks a byte whether a __shared__ variable of a class, such as __half, was constructed.  That
// byte lies in the image too; its poison says yes.
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
  if (M.counting && agent < 0)  // a bank is known from the address in the block's window
    count_access(shared ? window(region % REGIONS_OF_A_BLOCK) + (p - r->base) : (uint64_t)p, n,
                 shared, a, at, f);
  if (shared && region / REGIONS_OF_A_BLOCK != f->rank)
    check_neighbour(region / REGIONS_OF_A_BLOCK, f, at);
  if (a == Write && !shared) M.cur->dirty = true;
  int me = agent < 0 ? f->index : M.fibers + agent;
  const Clock *clock = agent < 0 ? f->clock : agent_clock(agent);
  Shadow *cells = &r->shadow[p - r->base];
  uint16_t here = site(at);
  auto byte = [&](size_t i) {
    return std::string(r->name) + " byte " + std::to_string(long(p + i - r->base));
  };
  auto race = [&](const char *their, int id, int where, size_t i) {
    fail("race on " + byte(i) + ": " + name_of(a) + " here, unordered with " + their + " by " +
             owner(id) + " at " + place(sites[where]), at);
  };
  for (size_t i = 0; i < n; i++) {
    Shadow &c = cells[i];
    if (c.wrote || c.read[0]) {
      if (c.block != M.block_serial) {
        bool ordered = seen.count(c.block), plain_write = c.wrote && !c.atomic;
        if (!ordered && (a == Write || plain_write))
          fail("race on " + byte(i) + ": " + name_of(a) + " here, also touched by block #" +
                   std::to_string(c.block - 1) + " with no ordering", at);
        if (ordered || a != Read) {
          c = Shadow{};
          c.block = M.block_serial;
        }
      } else {
        if (c.wrote && c.writer == kPending) race("write", kPending, c.wrote_at, i);
        if (c.wrote && c.writer != me && c.wrote > clock[c.writer] && !(a == Atomic && c.atomic))
          race("write", c.writer, c.wrote_at, i);
        for (int k = 0; a != Read && k < 2; k++)
          if (c.read[k] && c.reader[k] != me && c.read[k] > clock[c.reader[k]])
            race("read", c.reader[k], c.read_at[k], i);
      }
    }
    if (a != Read) {
      c.writer = me;
      c.wrote = clock[me];
      c.wrote_at = here;
      c.atomic = a == Atomic;
      c.read[0] = c.read[1] = 0;
      c.block = M.block_serial;
      continue;
    }
    if (shared && !c.wrote && is_guard(p)) return;
    if (shared && !c.wrote) fail("read of uninitialised " + byte(i), at);
    if (agent >= 0 && shared && c.writer < M.fibers && c.wrote > M.fiber[c.writer].fence)
      fail("async proxy reads " + std::string(r->name) + " written by " + owner(c.writer) +
               " with no fence.proxy.async after the write", at);
    auto mine = [&](int k) { return c.read[k] && c.reader[k] == me; };
    auto past = [&](int k) { return !c.read[k] || c.read[k] <= clock[c.reader[k]]; };
    int k = mine(0) ? 0 : mine(1) ? 1 : past(0) ? 0 : past(1) ? 1 : (c.turn ^= 1);
    c.reader[k] = me;
    c.read[k] = clock[me];
    c.read_at[k] = here;
    if (c.block != M.block_serial && !c.wrote) c.block = M.block_serial;
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
    c.wrote = M.cur->clock[M.cur->index];
  }
}

// Whether somebody outside a block touches its shared memory at a time that nothing orders before
// `end`.
bool touched_after(int rank, const Clock *end, std::string &what, Where &at) {
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

// ---- the shared window -------------------------------------------------------------------------
uint32_t shared_address(const void *p) {
  for (int i = 0; i < REGIONS_OF_A_BLOCK; i++) {
    auto &r = M.regions[M.cur->rank * REGIONS_OF_A_BLOCK + i];
    size_t offset = (const char *)p - r.base;
    if (r.size && offset <= r.size) return window(i) + uint32_t(offset);
  }
  fail("not a pointer to the block's own shared memory", {"shared_address", 0});
}

char *from_shared(uint32_t a, size_t n, Where at, int rank) {
  for (int i : {STATIC_BELOW, STATIC_ABOVE, DYNAMIC}) {
    auto &r = M.regions[rank * REGIONS_OF_A_BLOCK + i];
    if (a >= window(i) && a - window(i) + n <= r.size) return r.base + (a - window(i));
  }
  fail("shared-memory address " + std::to_string(a) + " is outside the block's " +
           std::to_string(window(DYNAMIC) + M.regions[DYNAMIC].size) + " bytes", at);
}

// ---- a launch, a block -------------------------------------------------------------------------
// __shared__ is thread_local in the module: its thread-local image is the static shared memory,
// with the dynamic buffer somewhere inside.
void start_memory(size_t size, size_t capacity) {
  M.regions.assign(shared_regions(), {nullptr, 0, "static shared memory", true, {}});
  for (int r = 0; r < M.blocks; r++)
    M.regions[r * REGIONS_OF_A_BLOCK] = {nullptr, size, "dynamic shared memory", true, {}};
  M.last_region = 0;
  M.dynamic_capacity = capacity;
  released.clear();
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
  seen = {M.block_serial};
  for (int i = 0; i < shared_regions(); i++) {
    Region &r = M.regions[i];
    if (r.size) memset(r.base, 0xff, r.size);  // NaN: what a kernel finds before it writes
    if (M.checks) r.shadow.assign(r.size, Shadow{});
  }
}
}  // namespace emu
