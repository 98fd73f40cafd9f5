// Clusters: blocks that run concurrently and access each other's shared memory.
//
// __shared__ is thread_local, so every block of a cluster has its own CPU thread, whose
// thread-local variables are the block's shared memory.  Only one of these CPU threads runs at a
// time: if the next fiber belongs to another block, its CPU thread is woken and this one sleeps.
#include "machine.hpp"

#include <algorithm>
#include <csignal>
#include <pthread.h>
#include <semaphore.h>
#include <xmmintrin.h>

namespace emu {
static thread_local int this_rank = -1;
static pthread_t threads[kMaxCluster];
static sem_t turns[kMaxCluster];
static void *home[kMaxCluster];  // the stack to which a block's fibers switch to leave the block
static bool quit;
static void (*image)();
static const void *symbol;

static void sleep_until_called(int rank) {
  while (sem_wait(&turns[rank])) {}  // again if a signal interrupts it
}

void switch_to(Fiber *f) {
  Fiber *me = M.cur;
  enter_fiber(f);
  emu_switch(&me->sp, f->rank == me->rank ? f->sp : home[me->rank]);
}

[[noreturn]] void leave_fiber() {
  M.over = true;
  void *dead;
  emu_switch(&dead, home[this_rank]);
  __builtin_unreachable();
}

static void run_own_fibers(int rank) {
  while (!M.over && M.cur->rank == rank) emu_switch(&home[rank], M.cur->sp);
}

void run_cluster() {
  for (M.over = false; !M.over;) {
    run_own_fibers(0);
    if (M.over) break;
    sem_post(&turns[M.cur->rank]);
    sleep_until_called(0);
  }
}

static void *serve(void *argument) {
  int rank = this_rank = int((intptr_t)argument);
  _mm_setcsr(_mm_getcsr() | 0x8040);
  add_image(rank, ((char *(*)())image)(), symbol);
  for (;;) {
    sem_post(&turns[M.over ? 0 : M.cur->rank]);
    sleep_until_called(rank);
    if (quit) return nullptr;
    run_own_fibers(rank);
  }
}

void start_blocks(void (*touch_image)(), const void *module_symbol) {
  image = touch_image;
  symbol = module_symbol;
  this_rank = 0;
  threads[0] = pthread_self();
  M.over = true;
  quit = false;
  for (int r = 0; r < M.blocks; r++) sem_init(&turns[r], 0, 0);
  add_image(0, ((char *(*)())image)(), symbol);
  for (int r = 1; r < M.blocks; r++) {
    pthread_create(&threads[r], nullptr, serve, (void *)(intptr_t)r);
    sleep_until_called(0);
  }
}

void stop_blocks() {
  quit = true;
  for (int r = 1; r < M.blocks; r++) {
    sem_post(&turns[r]);
    pthread_join(threads[r], nullptr);
  }
}

// A signal to the process may reach any of its threads: pass it to the one that runs fibers.
bool pass_signal(int number) {
  if (!M.cur || this_rank == M.cur->rank) return false;
  pthread_kill(threads[M.cur->rank], number);
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
