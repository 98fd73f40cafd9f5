// One cluster of CUDA blocks at a time: the state that the source files share.
//
//   scheduler.cpp     a fiber per CUDA thread, the launch, deadlocks
//   cluster.cpp       the blocks of a cluster side by side, each with its own shared memory
//   collectives.cpp   the rendezvous behind barriers, shuffles, votes and tensor-core products
//   clock.hpp         the vector clocks of threads, and of agents that work beside them
//   memory.cpp        bounds, uninitialised reads, races by vector clocks
//   calls.hpp         what kernels call
//   hooks.cpp         what the compiler calls on every access
//   tensor_core.cpp   mma, ldmatrix, wgmma
//   narrow.cpp        8-bit floats; sums of every dtype that a copy can add
//   async_copy.cpp    cp.async, mbarrier, TMA
//   traffic.cpp       sectors of global memory and banks of shared memory, warp by warp
#pragma once
#include "calls.hpp"
#include "clock.hpp"
#include <cstdint>
#include <cstring>
#include <new>
#include <string>
#include <sys/mman.h>
#include <utility>
#include <vector>

struct uint3 { unsigned x, y, z; };
extern uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace emu {
// Agents are what works beside the threads: 8 warpgroups' tensor cores of every block, then TMA
// copies in turn.
constexpr int kMaxThreads = 1024, kMaxCluster = 8, kWarpgroups = 8, kCopyAgents = 16;
constexpr int kStack = 128 << 10;
constexpr int kIdle = 50'000;  // polls while nobody wakes anybody: a deadlock
constexpr int kPending = 0xffff;  // shadow owner of bytes that an unfinished cp.async will write
constexpr int kInstructionPointer = -1;  // Where::line when Where::file is a code address

struct CpAsync {
  char *dst;
  const char *src;
  int bytes, src_bytes;
  Where at;
};

struct Store {
  int agent;
  Clock time;  // when it has read; a moment later it is there
  Where at;
};

struct Fiber {
  enum State : uint8_t { Ready, Waiting, Done } state;
  void *sp;
  char *stack;
  uint3 tid;
  int index, rank;  // in the cluster; of the block in it
  const char *doing;  // what a Waiting fiber waits for, and where
  Where at;
  VectorClock clock;  // times of threads, then of agents; none without checks
  Clock fence;       // own time of the last fence.proxy.async
  bool acquired;     // what others published, and no such fence since
  bool arrived, met;  // at the cluster's barrier without a wait yet; once behind it
  unsigned phase;     // of that barrier, on arrival, and where
  Where arrived_at;
  std::vector<std::vector<CpAsync>> groups;  // cp.async groups, the last one open
  std::vector<std::vector<Store>> stores;    // TMA stores that may still read, by bulk group
  bool accumulating;  // wgmma may still write its registers
  int votes;  // of those that met at the last barrier
};

// What is known of one byte: who wrote it, who read it last (two readers), when and where.
struct Shadow {
  uint16_t writer, reader[2];
  uint8_t atomic, turn;
  Clock wrote, read[2];
  uint32_t wrote_in, read_in;  // the cluster, as M.serial counts
  uint16_t wrote_at, read_at[2];
  uint16_t foreign, foreign_at;  // a reader of the cluster that read before this one
  Clock foreign_read;
  uint32_t foreign_in;
};

// Memory for a vector: zeros whose pages cost nothing until they are touched, so that a buffer of
// any size has its shadow.
template <class T> struct Pages {
  using value_type = T;
  T *allocate(size_t n) {
    void *p = mmap(nullptr, n * sizeof(T), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    return static_cast<T *>(p);
  }
  void deallocate(T *p, size_t n) { munmap(p, n * sizeof(T)); }
  template <class U> void construct(U *) {}
  template <class U, class... A> void construct(U *p, A &&...a) {
    ::new (p) U(std::forward<A>(a)...);
  }
  bool operator==(const Pages &) const { return true; }
  bool operator!=(const Pages &) const { return false; }
};

struct Region {
  char *base;
  size_t size;
  const char *name;
  bool writable;
  std::vector<Shadow, Pages<Shadow>> shadow;
};

struct Machine {
  // launch
  void (*thunk)(void **);
  void **args;
  int threads;             // of a block
  int stride, fibers;      // the fibers of block r of the cluster start at r * stride
  int wgmma_agents, agents, ids;  // ids = fibers + agents
  uint64_t rng = 0;  // 0: round robin
  bool checks = false, counting = false;
  unsigned serial = 0;  // of the cluster that runs: 1 and up in the order of the grid
  uint64_t accesses = 0, patience = 0;  // of one fiber since it was switched to; 0: no watchdog
  std::string error;
  // cluster
  uint3 cluster;
  int blocks = 1;  // of the cluster
  uint3 block[kMaxCluster];  // their blockIdx
  int alive[kMaxCluster];    // their threads that have not exited
  bool over = false;
  std::vector<Fiber> fiber;
  Known nothing;  // what a clock knows when a cluster starts
  std::vector<VectorClock> agent_clocks;
  std::vector<int> ready;
  size_t ready_head = 0;
  int idle = 0;  // polls since a fiber was woken
  int live = 0;
  Fiber *cur = nullptr;
  // for every block [0] dynamic shared memory, [1] and [2] static shared memory below and above it
  // in its thread-local image of the module; then the module's read-only image, then the global
  // buffers
  std::vector<Region> regions;
  size_t dynamic_capacity = 0;
  std::vector<size_t> guards;  // in the thread-local image: g++'s bytes beside class variables
  int last_region = 0;
};
extern Machine M;

// scheduler.cpp
uint64_t random_bits();
void make_ready(Fiber *f);
uint3 block_of(unsigned serial, int rank);
void suspend(const char *doing, Where at);  // the current fiber waits until make_ready
void yield(Where at);                       // ... or only lets the others go first
void enter_fiber(Fiber *f);                 // it is the current one from now on
[[noreturn]] void fail(const std::string &what, Where at);
std::string place(Where at);
std::string text(uint3 v);
bool same(Where a, Where b);

// cluster.cpp
extern "C" void emu_switch(void **save, void *load);  // leave a stack for another
void switch_to(Fiber *f);                // from the current fiber, whose block may be another
[[noreturn]] void leave_fiber();         // for good: the current fiber ended or failed
void run_cluster();                      // until M.over
void start_blocks(void (*touch_image)(), const void *symbol);  // a launch
void stop_blocks();
bool pass_signal(int number);
void release_cluster();                  // the barrier, if everybody has arrived
void check_exit(Fiber *f);               // nobody may still need its block's shared memory
void check_neighbour(int rank, const Fiber *f, Where at);
void reset_cluster();

// collectives.cpp
// Every lane of `mask` in group `g` brings an operand block; the last to arrive runs op over all
// of them on everybody's behalf, then all resume.
using Op = void (*)(void **lane, int size);
void collective(int kind, int group, int size, uint32_t mask, const char *what, void *mine, Op op,
                Where at);
enum Kind { SYNCWARP, SHFL, BALLOT, MMA, LDMATRIX, WGMMA };
void reset_collectives();

// memory.cpp
void touch(const void *p, size_t n, Access a, Where at, int agent = -1, const Fiber *as = nullptr);
std::string describe(const char *p);         // by the nearest buffer
void mark_pending(const void *p, size_t n);  // an issued cp.async owns these bytes
void settle(const void *p, size_t n);  // ... until its wait: now the waiting thread's write
void heard(const void *p);              // an atomic or volatile access; a fence may follow
void publish(const void *p, bool replace);  // what the fence before it made known
uint32_t shared_address(const void *p, Where at);
char *from_shared(uint32_t address, size_t n, Where at, int rank = M.cur->rank);
void start_memory(size_t size, size_t capacity);              // a launch
void add_image(int rank, char *dynamic, const void *symbol);  // ... the shared memory of a block
bool touched_after(int rank, const Times &end, std::string &what, Where &at);
void reset_memory();                                          // a cluster
inline VectorClock &agent_clock(int a) { return M.agent_clocks[a]; }

// traffic.cpp: of checked builds, while M.counting
void count_access(uint64_t address, size_t size, bool shared, Access a, Where at, const Fiber *f);
void close_traffic();

// tensor_core.cpp
void check_registers(const void *p, size_t n, Where at);  // no wgmma may still write them
void check_products();  // ... of a thread that exits
void check_barriers(int rank);  // ... of a block that exits
void reset_tensor_core();

// narrow.cpp
float decode_fp8(int type, uint32_t bits);
enum Number : uint8_t { Bits, Float32, Float16, BFloat16, Int32 };
void add_in_place(Number type, char *to, const char *from);

// async_copy.cpp
uint32_t swizzled(int mode, uint32_t address);  // mode: 0 none, 1 32, 2 64, 3 128 bytes
void land_oldest_copy();
bool copies_outstanding();
bool copies_into(int rank, Where &at);
void reset_async_copy();
}  // namespace emu
