// The state that the source files share, for one running cluster of CUDA blocks at a time.
//
//   scheduler.cpp     a fiber for each CUDA thread, the launch, deadlocks
//   cluster.cpp       the concurrent blocks of a cluster, each with its own shared memory
//   collectives.cpp   the rendezvous behind barriers, shuffles, votes and tensor-core products
//   clock.hpp         the vector clocks of threads and of asynchronous agents
//   memory.cpp        bounds, uninitialised reads, races by vector clocks
//   calls.hpp         the functions that kernels call
//   hooks.cpp         the functions that the compiler calls on every access
//   tensor_core.cpp   mma, ldmatrix, wgmma
//   narrow.cpp        8-bit floats; additions in every dtype of a reducing copy
//   async_copy.cpp    cp.async, mbarrier, TMA
//   traffic.cpp       sectors of global memory and banks of shared memory, by requests of warps
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
// Agents work asynchronously to threads: the tensor cores of 8 warpgroups of every block, then TMA,
// whose copies take turns between kCopyAgents agents.
constexpr int kMaxThreads = 1024, kMaxCluster = 8, kWarpgroups = 8, kCopyAgents = 16;
constexpr int kStack = 256 << 10;
constexpr int kIdle = 50'000;  // more polls than this without a fiber being woken are a deadlock
constexpr int kPending = 0xffff;  // shadow owner of bytes that a pending cp.async will write
constexpr int kInstructionPointer = -1;  // Where::line when Where::file is a code address

struct CpAsync {
  char *dst;
  const char *src;
  int bytes, src_bytes;
  Where at;
};

struct Store {
  int agent;
  Clock time;  // when it has read its source; it has written one tick later
  Where at;
};

struct Fiber {
  enum State : uint8_t { Ready, Waiting, Done } state;
  void *sp;
  char *stack;
  uint3 tid;
  int index, rank;  // the fiber's index in the cluster; its block's rank
  const char *doing;  // what a Waiting fiber waits for, and where
  Where at;
  VectorClock clock;  // times of threads, then of agents; unused without checks
  Clock fence;       // own time of the last fence.proxy.async
  bool acquired;     // it acquired what others published, without such a fence since
  bool arrived, met;  // has arrived at the cluster's barrier without a wait; has ever passed it
  unsigned phase;     // of that barrier on arrival
  Where arrived_at;
  std::vector<std::vector<CpAsync>> groups;  // cp.async groups, the last one open
  std::vector<std::vector<Store>> stores;    // TMA stores that may still read, by bulk group
  bool accumulating;  // wgmma may still write its registers
  int votes;  // of all threads at the last barrier
};

// The history of one byte: its last writer and last two readers, with their times and source lines.
struct Shadow {
  uint16_t writer, reader[2];
  uint8_t atomic, turn;
  Clock wrote, read[2];
  uint32_t wrote_in, read_in;  // the cluster, by its M.serial
  uint16_t wrote_at, read_at[2];
  uint16_t foreign, foreign_at;  // a reader in the previous cluster that read the byte
  Clock foreign_read;
  uint32_t foreign_in;
};

// An allocator of zeros whose pages take no memory until they are used, so that a buffer of any
// size can have a shadow.
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
  int threads;             // in a block
  int stride, fibers;      // the fibers of block r of the cluster start at r * stride
  int wgmma_agents, agents, ids;  // ids = fibers + agents
  uint64_t rng = 0;  // 0: round robin
  bool checks = false, counting = false;
  unsigned serial = 0;  // number of the running cluster, from 1 in the order of the grid
  uint64_t accesses = 0, patience = 0;  // since a fiber last waited; the most (0: no watchdog)
  std::string error;
  // cluster
  uint3 cluster;
  int blocks = 1;  // in the cluster
  uint3 block[kMaxCluster];  // the blockIdx of each block
  int alive[kMaxCluster];    // the number of its threads that have not exited
  std::vector<Fiber> fiber;
  std::vector<uint32_t> lanes;  // of each warp, those that have not exited
  Known nothing;  // the table of a clock when a cluster starts: zeros
  std::vector<VectorClock> agent_clocks;
  std::vector<int> ready;
  size_t ready_head = 0;
  int idle = 0;  // polls since a fiber was last woken
  int live = 0;
  Fiber *cur = nullptr;
  // for every block: [0] dynamic shared memory, [1] and [2] static shared memory below and above it
  // in the block's thread-local image of the module; then the module's read-only image; then the
  // global buffers
  std::vector<Region> regions;
  size_t dynamic_capacity = 0;
  std::vector<size_t> guards;  // offsets in the thread-local image of g++'s guard bytes
  int last_region = 0;
};
extern Machine M;

// scheduler.cpp
uint64_t random_bits();
void make_ready(Fiber *f);
uint3 block_of(unsigned serial, int rank);
void suspend(const char *doing, Where at);  // the current fiber waits until make_ready
void yield(Where at);                       // the current fiber lets the others run first
void enter_fiber(Fiber *f);                 // makes a fiber the current one
[[noreturn]] void fail(const std::string &what, Where at);
std::string place(Where at);
std::string text(uint3 v);
bool same(Where a, Where b);

// cluster.cpp
extern "C" void emu_switch(void **save, void *load);  // switches to another stack
void switch_to(Fiber *f);                // from the current fiber, possibly to another block
[[noreturn]] void leave_fiber();         // never returns to the current fiber: it ended or failed
void run_cluster();                      // until all its fibers ended, or one failed
void start_blocks(void (*touch_image)(), const void *symbol);  // at the start of a launch
void stop_blocks();
bool pass_signal(int number);
void release_cluster();                  // its barrier, if all threads have arrived
void check_exit(Fiber *f);               // nothing may still use its block's shared memory
void check_neighbour(int rank, const Fiber *f, Where at);
void reset_cluster();

// collectives.cpp
// Every lane of `mask` in `group` passes its operands (`mine`); the last one to arrive runs op over
// the operands of all lanes, then all continue.
using Op = void (*)(void **lane, int size);
void collective(int kind, int group, int size, uint32_t mask, const char *what, void *mine, Op op,
                Where at);
enum Kind { SYNCWARP, SHFL, BALLOT, MMA, LDMATRIX, WGMMA };
void reset_collectives();

// memory.cpp
void touch(const void *p, size_t n, Access a, Where at, int agent = -1, const Fiber *as = nullptr);
std::string describe(const char *p);         // relative to the nearest buffer
void mark_pending(const void *p, size_t n);  // an issued cp.async owns these bytes
void settle(const void *p, size_t n);  // at its wait: they count as written by the waiting thread
void heard(const void *p);              // an atomic or volatile access, which a fence may follow
void publish(const void *p, bool replace);  // publishes at p what the thread's last fence ordered
uint32_t shared_address(const void *p, Where at);
char *from_shared(uint32_t address, size_t n, Where at, int rank = M.cur->rank);
void start_memory(size_t size, size_t capacity);              // at the start of a launch
void add_image(int rank, char *dynamic, const void *symbol);  // adds the shared memory of a block
bool touched_after(int rank, const Times &end, std::string &what, Where &at);
void reset_memory();                                          // at the start of a cluster
inline VectorClock &agent_clock(int a) { return M.agent_clocks[a]; }

// traffic.cpp: used by checked builds while M.counting
void count_access(uint64_t address, size_t size, bool shared, Access a, Where at, const Fiber *f);
void close_traffic();

// tensor_core.cpp
void check_registers(const void *p, size_t n, Where at);  // fails if a wgmma may still write them
void check_products();  // of a thread that exits
void check_barriers(int rank);  // of a block that exits
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
