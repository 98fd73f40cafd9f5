// One CUDA block on one CPU thread: the state that the five source files share.
//
//   scheduler.cpp     a fiber per CUDA thread, the launch, deadlocks
//   collectives.cpp   the rendezvous behind barriers, shuffles, votes and tensor-core products
//   memory.cpp        bounds, uninitialised reads, races by vector clocks; the compiler's hooks
//   tensor_core.cpp   mma, ldmatrix, wgmma
//   async_copy.cpp    cp.async, mbarrier, TMA
#pragma once
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

struct uint3 { unsigned x, y, z; };
extern uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace emu {
// Agents are what works beside the threads: 8 warpgroups' tensor cores, then TMA copies in turn.
constexpr int kMaxThreads = 1024, kAgents = 24, kWgmmaAgents = 8, kStack = 128 << 10;
constexpr int kPending = 0xffff;  // shadow owner of bytes that an unfinished cp.async will write
constexpr int kInstructionPointer = -1;  // Where::line when Where::file is a code address
using Clock = uint32_t;

struct Where {
  const char *file;
  int line;
};

struct CpAsync {
  char *dst;
  const char *src;
  int bytes, src_bytes;
};

struct Fiber {
  enum State : uint8_t { Ready, Waiting, Done } state;
  void *sp;
  char *stack;
  uint3 tid;
  int index;
  const char *doing;  // what a Waiting fiber waits for, and where
  Where at;
  Clock *clock;      // vector clock: one entry per thread, then one per agent
  Clock fence;       // own time of the last fence.proxy.async
  bool dirty;        // wrote global memory since the last __threadfence
  int stores;        // TMA stores issued and not yet waited for
  std::vector<std::vector<CpAsync>> groups;  // cp.async groups, the last one open
};

// What is known of one byte: who wrote it, who read it last (two readers), when and where.
struct Shadow {
  uint16_t writer, reader[2];
  uint8_t atomic, turn;
  Clock wrote, read[2];
  uint32_t block;
  uint16_t wrote_at, read_at[2];
};

struct Region {
  char *base;
  size_t size;
  const char *name;
  bool writable;
  std::vector<Shadow> shadow;
};

struct Machine {
  // launch
  void (*thunk)(void **);
  void **args;
  int threads, ids;  // ids = threads + agents
  uint64_t rng = 0;  // 0: round robin
  bool checks = false;
  unsigned block_serial = 0;
  uint64_t accesses = 0, patience = 0;  // of one fiber since it was switched to; 0: no watchdog
  std::string error;
  // block
  std::vector<Fiber> fiber;
  std::vector<Clock> clocks, agent_clocks;
  std::vector<int> ready;
  size_t ready_head = 0;
  int live = 0;
  Fiber *cur = nullptr;
  void *main_sp = nullptr;
  // [0] dynamic shared memory, [1] and [2] static shared memory below and above it in the
  // module's thread-local image, then the module's read-only image, then the global buffers
  std::vector<Region> regions;
  size_t dynamic_capacity = 0;
  int last_region = 0;
};
extern Machine M;

// scheduler.cpp
uint64_t random_bits();
void make_ready(Fiber *f);
void suspend(const char *doing, Where at);  // the current fiber waits until make_ready
void yield(Where at);                       // ... or only lets the others go first
[[noreturn]] void fail(const std::string &what, Where at);
std::string place(Where at);

// collectives.cpp
// Every lane of `mask` in group `g` brings an operand block; the last to arrive runs op over all
// of them on everybody's behalf, then all resume.
using Op = void (*)(void **lane, int size);
void collective(int kind, int group, int size, uint32_t mask, const char *what, void *mine, Op op,
                Where at);
enum Kind { SYNCWARP, SHFL, BALLOT, MMA, LDMATRIX, WGMMA };
void join(Clock *into, const Clock *from);
void reset_collectives();

// memory.cpp
enum Access { Read, Write, Atomic };
void touch(const void *p, size_t n, Access a, Where at, int agent = -1, const Fiber *as = nullptr);
void mark_pending(const void *p, size_t n);  // an issued cp.async owns these bytes
void settle(const void *p, size_t n);  // ... until its wait: now the waiting thread's write
uint32_t shared_address(const void *p);
char *from_shared(uint32_t address, size_t n, Where at);
void start_memory(char *dynamic, size_t size, size_t capacity, void *module_symbol);  // a launch
void reset_memory();                                                                  // a block
inline Clock *agent_clock(int a) { return &M.agent_clocks[size_t(a) * M.ids]; }

// tensor_core.cpp
enum { BF16, F16 };
void reset_tensor_core();

// async_copy.cpp
uint32_t swizzled(int mode, uint32_t address);  // mode: 0 none, 1 32, 2 64, 3 128 bytes
void land_oldest_copy();
bool copies_outstanding();
void reset_async_copy();
}  // namespace emu
