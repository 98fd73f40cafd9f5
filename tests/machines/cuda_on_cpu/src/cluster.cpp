// Clusters: blocks that run concurrently and access each other's shared memory.
//
// __shared__ is thread_local, so every block of a cluster has a CPU thread, whose thread-local
// variables are the block's shared memory.  These threads only wait for the end of the launch: the
// launch's own thread runs all fibers, and takes another thread's variables for its own when the
// next fiber belongs to another block.  To wake that thread instead takes tens of times as long.
#include "machine.hpp"

#include <algorithm>
#include <asm/prctl.h>
#include <csignal>
#include <pthread.h>
#include <semaphore.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace emu {
static pthread_t threads[kMaxCluster];
static unsigned long variables[kMaxCluster];  // of the thread of a block: its thread pointer
static sem_t known, over;
static void *home;  // the launch's stack, to which the last fiber of a cluster switches
static pid_t launching;
static void (*image)();
static const void *symbol;

static pid_t this_thread() { return pid_t(syscall(SYS_gettid)); }

static void use_variables_of(int rank) { syscall(SYS_arch_prctl, ARCH_SET_FS, variables[rank]); }

void switch_to(Fiber *f) {
  Fiber *me = M.cur;
  enter_fiber(f);
  if (f->rank != me->rank) use_variables_of(f->rank);
  emu_switch(&me->sp, f->sp);
}

[[noreturn]] void leave_fiber() {
  if (M.blocks > 1) use_variables_of(0);
  void *dead;
  emu_switch(&dead, home);
  __builtin_unreachable();
}

void run_cluster() {
  if (M.cur->rank) use_variables_of(M.cur->rank);
  emu_switch(&home, M.cur->sp);
}

static void add_block(int rank) {
  syscall(SYS_arch_prctl, ARCH_GET_FS, &variables[rank]);
  add_image(rank, ((char *(*)())image)(), symbol);
}

static void wait_for(sem_t *semaphore) {
  while (sem_wait(semaphore)) {}  // again if a signal interrupts it
}

static void *serve(void *argument) {
  add_block(int((intptr_t)argument));
  sem_post(&known);
  wait_for(&over);
  return nullptr;
}

void start_blocks(void (*touch_image)(), const void *module_symbol) {
  image = touch_image;
  symbol = module_symbol;
  launching = this_thread();
  add_block(0);
  if (M.blocks == 1) return;
  sem_init(&known, 0, 0);
  sem_init(&over, 0, 0);
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // the new threads inherit it: none gets a signal
  for (int r = 1; r < M.blocks; r++) {
    pthread_create(&threads[r], nullptr, serve, (void *)(intptr_t)r);
    wait_for(&known);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void stop_blocks() {
  for (int r = 1; r < M.blocks; r++) sem_post(&over);
  for (int r = 1; r < M.blocks; r++) pthread_join(threads[r], nullptr);
}

// A signal to the process may reach any of its threads: pass it to the one that runs fibers.
bool pass_signal(int number) {
  if (!M.cur || this_thread() == launching) return false;
  syscall(SYS_tgkill, getpid(), launching, number);
  return true;
}

// ---- barrier.cluster ---------------------------------------------------------------------------
static int arrived;
static unsigned phase;
static Together arriving;
static Known passed;
static std::vector<Fiber *> waiting;

void release_cluster() {
  if (!arrived || arrived < M.live) return;
  phase++;
  arrived = 0;
  if (M.checks) passed = arriving.table();
  arriving.clear(M.checks ? M.ids : 0);
  for (auto *f : waiting) make_ready(f);
  waiting.clear();
}

void cluster_arrive(bool relaxed, const char *file, int line) {
  Fiber *f = M.cur;
  if (f->arrived) fail("barrier.cluster.arrive twice without a wait between", {file, line});
  f->arrived = true;
  f->arrived_at = {file, line};
  f->phase = phase;
  if (M.checks && !relaxed) {  // relaxed orders no memory
    arriving.add(f->clock);
    f->clock.own++;
  }
  arrived++;
  release_cluster();
}

void cluster_wait(const char *file, int line) {
  Fiber *f = M.cur;
  Where at{file, line};
  if (!f->arrived) fail("barrier.cluster.wait without an arrive before", at);
  if (f->phase == phase) {
    waiting.push_back(f);
    suspend("barrier.cluster", at);
  }
  f->arrived = false;
  f->met = true;
  if (M.checks) f->clock.learn(passed);
}

// ---- shared memory of the neighbours -----------------------------------------------------------
int cluster_rank() { return M.cur->rank; }
int cluster_size() { return M.blocks; }

void *cluster_map(const void *p, int rank, const char *file, int line) {
  Where at{file, line};
  if (rank < 0 || rank >= M.blocks)
    fail("mapa: rank " + std::to_string(rank) + " in a cluster of " + std::to_string(M.blocks), at);
  return from_shared(shared_address(p, at), 1, at, rank);
}

void check_neighbour(int rank, const Fiber *f, Where at) {
  if (!f->met)
    fail("shared memory of block rank " + std::to_string(rank) +
             " before the first barrier.cluster: that block may not run yet", at);
  if (!M.alive[rank])
    fail("shared memory of block rank " + std::to_string(rank) + ", which has exited", at);
}

void check_exit(Fiber *f) {
  if (f->arrived)
    fail("thread exits between barrier.cluster.arrive and its wait", f->arrived_at);
  for (auto &group : f->groups)
    if (!group.empty())
      fail("thread exits before the cp.async.wait_group of this copy", group[0].at);
  for (auto &group : f->stores)
    if (!group.empty())
      fail("thread exits before the cp.async.bulk.wait_group of this store", group[0].at);
  if (f->accumulating) check_products();
  if (--M.alive[f->rank]) return;
  check_barriers(f->rank);
  Where at{};
  if (copies_into(f->rank, at)) fail("block exits before this copy into its shared memory", at);
  if (!M.checks || M.blocks == 1) return;
  Together end;
  end.clear(M.ids);
  for (int i = 0; i < M.threads; i++) end.add(M.fiber[f->rank * M.stride + i].clock);
  std::string what;
  if (touched_after(f->rank, *end.table(), what, at))
    fail("block rank " + std::to_string(f->rank) + " exits unordered with a " + what, at);
}

void reset_cluster() {
  arrived = 0;
  phase = 0;
  arriving.clear(M.checks ? M.ids : 0);
  passed = M.nothing;
  waiting.clear();
}
}  // namespace emu
