// Scheduler: every CUDA thread of a block is a fiber; clusters of blocks (usually of one block) run
// one after the other.
//
// A fiber runs until a collective, a barrier or an mbarrier makes it wait; then the next ready
// fiber continues: round robin for seed 0, otherwise in a random order, with TMA copies that
// complete at random moments.  If no fiber is ready and no copy is pending, the block is deadlocked.
// A failed check switches back to the launch, which returns the error text.
#include "machine.hpp"

#include <algorithm>
#include <csignal>
#include <map>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>
#include <xmmintrin.h>

uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace emu {
Machine M;

// Saves the callee-saved registers on this stack and switches to the other stack.
asm(R"(
.text
.globl emu_switch
.type emu_switch,@function
emu_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");

uint64_t random_bits() {
  uint64_t &x = M.rng;
  x ^= x << 13;
  x ^= x >> 7;
  return x ^= x << 17;
}

// ---- errors ------------------------------------------------------------------------------------
std::string text(uint3 v) {
  return "(" + std::to_string(v.x) + "," + std::to_string(v.y) + "," + std::to_string(v.z) + ")";
}

std::string place(Where at) {
  if (at.line == kInstructionPointer) {  // Python converts it to file:line
    char pc[32];
    snprintf(pc, sizeof pc, "<pc %p>", (const void *)at.file);
    return pc;
  }
  const char *slash = strrchr(at.file, '/');
  return std::string(slash ? slash + 1 : at.file) + ":" + std::to_string(at.line);
}

bool same(Where a, Where b) {
  return a.line == b.line && (a.file == b.file || !strcmp(a.file, b.file));
}

[[noreturn]] void fail(const std::string &what, Where at) {
  M.error = place(at) + ": " + what;
  if (M.cur) M.error += " [block " + text(blockIdx) + " thread " + text(M.cur->tid) + "]";
  leave_fiber();
}

static void deadlock() {
  std::map<std::pair<std::string, std::string>, std::vector<int>> by;
  Fiber *first = nullptr;
  for (auto &f : M.fiber)
    if (f.state == Fiber::Waiting) {
      by[{f.doing, place(f.at)}].push_back(f.index);
      if (!first) first = &f;
    }
  std::string s = "deadlock:";
  for (auto &[what, threads] : by) {
    s += " " + std::to_string(threads.size()) + " thread(s) [";
    for (size_t i = 0; i < threads.size();) {  // consecutive numbers as first-last
      size_t j = i;
      while (j + 1 < threads.size() && threads[j + 1] == threads[j] + 1) j++;
      s += (i ? "," : "") + std::to_string(threads[i]);
      if (j > i) s += "-" + std::to_string(threads[j]);
      i = j + 1;
    }
    s += "] wait at " + what.first + " " + what.second + ";";
  }
  s += " " + std::to_string(M.threads * M.blocks - M.live) + " exited";
  M.cur = first;
  fail(s, first->at);
}

// ---- the ready queue ---------------------------------------------------------------------------
void make_ready(Fiber *f) {
  M.idle = 0;
  f->state = Fiber::Ready;
  M.ready.push_back(f->index);
}

static Fiber *next_ready() {
  auto &q = M.ready;
  if (M.ready_head == q.size()) return nullptr;
  if (M.rng) std::swap(q[M.ready_head], q[M.ready_head + random_bits() % (q.size() - M.ready_head)]);
  Fiber *f = &M.fiber[q[M.ready_head++]];
  if (M.ready_head > 4096) {
    q.erase(q.begin(), q.begin() + M.ready_head);
    M.ready_head = 0;
  }
  return f;
}

static void run_next() {
  Fiber *me = M.cur, *f;
  if (M.rng && random_bits() % 8 == 0) land_oldest_copy();
  while (!(f = next_ready())) {
    if (!copies_outstanding()) deadlock();
    land_oldest_copy();
  }
  if (f != me) switch_to(f);
}

void enter_fiber(Fiber *f) {
  M.cur = f;
  threadIdx = f->tid;
  blockIdx = M.block[f->rank];
}

void suspend(const char *doing, Where at) {
  M.accesses = 0;
  M.cur->state = Fiber::Waiting;
  M.cur->doing = doing;
  M.cur->at = at;
  run_next();
}

void yield(Where at) {
  M.ready.push_back(M.cur->index);
  M.cur->at = at;
  land_oldest_copy();
  run_next();
}

// A thread polls a value that another one may store: all others run first.
void polled(const char *file, int line) {
  if (++M.idle > kIdle) fail("deadlock: nobody stores what is polled for", {file, line});
  yield({file, line});
}

// ---- watchdog: memory.cpp counts accesses; a loop without any is detected by its CPU time ------
static void out_of_time(int number, siginfo_t *, void *context) {
  if (pass_signal(number)) return;
  auto pc = (char *)((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
  for (auto &r : M.regions)  // only in the kernel's own code, so as not to interrupt the runtime
    if (M.cur && !r.writable && pc >= r.base && pc < r.base + r.size)
      fail("watchdog: seconds without an end", {pc + 1, kInstructionPointer});
}

static void watch(unsigned seconds) {
  struct sigaction action {};
  action.sa_sigaction = out_of_time;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;  // as fail() never returns from the handler
  sigaction(SIGVTALRM, &action, nullptr);
  itimerval timer{{0, seconds ? 100000 : 0}, {seconds, 0}};
  setitimer(ITIMER_VIRTUAL, &timer, nullptr);
}

// ---- blocks ------------------------------------------------------------------------------------
static char *stacks;

static void enter() {
  M.thunk(M.args);
  M.cur->state = Fiber::Done;
  M.lanes[M.cur->index / 32] &= ~(1u << M.cur->index % 32);
  M.live--;
  M.accesses = 0;
  check_exit(M.cur);
  release_cluster();
  if (M.live) run_next();
  leave_fiber();
}

static void start(Fiber &f, int index) {
  unsigned i = index % M.stride;
  f.index = index;
  f.rank = index / M.stride;
  f.state = Fiber::Done;
  if (i >= unsigned(M.threads)) return;  // a gap: warps and warpgroups belong to one block
  M.lanes[index / 32] |= 1u << index % 32;
  f.tid = {i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y)};
  f.stack = stacks + size_t(index) * kStack;
  f.clock.start(index, 1, M.nothing);
  f.fence = f.phase = 0;
  f.arrived = f.met = f.acquired = false;
  f.accumulating = 0;
  f.groups.assign(1, {});
  f.stores.assign(1, {});
  // staggered, as equal offsets in all stacks would map to the same cache sets
  void **sp = (void **)(f.stack + kStack - 64 - index * 448 % 32768);
  *--sp = nullptr;  // keeps the entry frame 16-byte aligned
  *--sp = (void *)enter;
  for (int k = 0; k < 6; k++) *--sp = nullptr;
  f.sp = sp;
  make_ready(&f);
}

static void run_blocks() {
  M.ready.clear();
  M.ready_head = 0;
  M.idle = 0;
  M.live = M.threads * M.blocks;
  M.stride = (M.threads + 127) / 128 * 128;
  M.fibers = M.stride * (M.blocks - 1) + M.threads;
  M.wgmma_agents = kWarpgroups * M.blocks;
  M.agents = M.wgmma_agents + kCopyAgents;
  M.ids = M.fibers + M.agents;
  M.fiber.resize(M.fibers);
  M.lanes.assign((M.fibers + 31) / 32, 0);
  std::fill(M.alive, M.alive + M.blocks, M.threads);
  if (M.checks) {
    M.nothing = std::make_shared<const Times>(M.ids);
    M.agent_clocks.resize(M.agents);
    for (int a = 0; a < M.agents; a++) agent_clock(a).start(M.fibers + a, 0, M.nothing);
  }
  reset_collectives();
  reset_memory();
  reset_tensor_core();
  reset_async_copy();
  reset_cluster();
  for (int i = 0; i < M.fibers; i++) start(M.fiber[i], i);
  enter_fiber(next_ready());
  run_cluster();
  if (M.counting) close_traffic();
  M.cur = nullptr;
}

static uint3 clusters;  // the size of the grid in clusters

uint3 block_of(unsigned serial, int rank) {
  unsigned b = serial - 1, r = rank;
  uint3 c = M.cluster;
  return {b % clusters.x * c.x + r % c.x, b / clusters.x % clusters.y * c.y + r / c.x % c.y,
          b / (clusters.x * clusters.y) * c.z + r / (c.x * c.y)};
}

struct Buffer {
  char *base;
  size_t size;
  const char *name;
  int writable;
};

struct Launch {
  void (*thunk)(void **);
  void (*image)();  // returns the module's dynamic shared memory on this CPU thread, or null
  size_t dynamic_size, dynamic_capacity;
  unsigned grid[3], block[3], cluster[3];
  void **args;
  const Buffer *buffers;
  int buffer_count, checks;
  uint64_t seed, patience;  // patience: accesses without a collective
  unsigned seconds;         // of CPU time for the launch; 0: no watchdog
  unsigned last;            // number of clusters to run, at the end of the grid; 0: all
};

// Returns nullptr, or the error text.
extern "C" const char *emu_launch(const Launch *l) {
  if (!stacks)
    stacks = (char *)mmap(nullptr, size_t(kMaxCluster) * kMaxThreads * kStack, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  M.thunk = l->thunk;
  M.args = l->args;
  M.checks = l->checks;
  M.rng = l->seed;
  M.patience = l->patience;
  M.accesses = 0;
  M.error.clear();
  gridDim = {l->grid[0], l->grid[1], l->grid[2]};
  blockDim = {l->block[0], l->block[1], l->block[2]};
  M.threads = blockDim.x * blockDim.y * blockDim.z;
  M.cluster = {l->cluster[0], l->cluster[1], l->cluster[2]};
  M.blocks = M.cluster.x * M.cluster.y * M.cluster.z;
  M.cur = nullptr;
  clusters = {gridDim.x / M.cluster.x, gridDim.y / M.cluster.y, gridDim.z / M.cluster.z};
  if (M.blocks > kMaxCluster || gridDim.x % M.cluster.x || gridDim.y % M.cluster.y ||
      gridDim.z % M.cluster.z) {
    M.error = "a grid of " + text(gridDim) + " blocks in clusters of " + text(M.cluster);
    return M.error.c_str();
  }
  start_memory(l->dynamic_size, l->dynamic_capacity);
  start_blocks(l->image, (void *)l->thunk);
  for (int i = 0; i < l->buffer_count; i++) {
    auto &b = l->buffers[i];
    M.regions.push_back({b.base, b.size, b.name, bool(b.writable), {}});
  }
  const size_t all = size_t(clusters.x) * clusters.y * clusters.z;
  std::vector<unsigned> order(l->last && l->last < all ? l->last : all);
  for (size_t i = 0; i < order.size(); i++) order[i] = unsigned(all - order.size() + i);
  if (M.rng)
    for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[random_bits() % i]);

  unsigned control = _mm_getcsr();
  _mm_setcsr(control | 0x8040);  // flush denormals, as with the -ftz=true that CuPy appends
  watch(l->seconds);
  for (unsigned b : order) {
    if (!M.error.empty()) break;
    M.serial = b + 1;
    for (int r = 0; r < M.blocks; r++) M.block[r] = block_of(M.serial, r);
    run_blocks();
  }
  watch(0);
  stop_blocks();
  _mm_setcsr(control);
  M.cur = nullptr;
  return M.error.empty() ? nullptr : M.error.c_str();
}
}  // namespace emu
