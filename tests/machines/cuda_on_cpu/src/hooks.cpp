// Hooks: checked builds are compiled with g++'s thread and undefined-behaviour sanitisers; this
// file implements the functions that they call, instead of libtsan and libubsan.
#include "machine.hpp"

namespace emu {
void access(char *p, size_t n, Access a, Where at) {
  if (!M.checks || !M.cur) return;
  if (size_t(p - M.cur->stack) < kStack) {
    if (M.cur->accumulating) check_registers(p, n, at);
    return;
  }
  if (M.patience && ++M.accesses > M.patience)
    fail("watchdog: " + std::to_string(M.patience) + " accesses since the block last met", at);
  if (a == Peek && M.accesses % 64 == 0) yield(at);
  touch(p, n, a, at);
}

// Volatile accesses are relaxed atomics, for flags that one thread writes and others poll.
void access_volatile(char *p, size_t n, bool write, Where at) {
  if (!M.checks || !M.cur || size_t(p - M.cur->stack) < kStack) return;
  access(p, n, write ? Atomic : Peek, at);
  heard(p);
  if (write) publish(p, true);
}

void check_alignment(const void *p, size_t n, Where at, const char *type) {
  if (uintptr_t(p) % n)
    fail("address not aligned to " + std::to_string(n) + " bytes" +
             (type ? " for " + std::string(type) : "") + " (" + describe((const char *)p) + ")", at);
}

static inline void hook(void *p, size_t n, Access a, void *pc) {
  access((char *)p, n, a, {(const char *)pc, kInstructionPointer});
}
static inline void hook_volatile(void *p, size_t n, bool write, void *pc) {
  access_volatile((char *)p, n, write, {(const char *)pc, kInstructionPointer});
}

#define HERE __builtin_return_address(0)
#define EMU_HOOK(N)                                                            \
  void __tsan_read##N(void *p) { hook(p, N, Read, HERE); }                     \
  void __tsan_write##N(void *p) { hook(p, N, Write, HERE); }                   \
  void __tsan_unaligned_read##N(void *p) { hook(p, N, Read, HERE); }           \
  void __tsan_unaligned_write##N(void *p) { hook(p, N, Write, HERE); }         \
  void __tsan_volatile_read##N(void *p) { hook_volatile(p, N, false, HERE); }      \
  void __tsan_volatile_write##N(void *p) { hook_volatile(p, N, true, HERE); }  \
  void __tsan_unaligned_volatile_read##N(void *p) { hook_volatile(p, N, false, HERE); } \
  void __tsan_unaligned_volatile_write##N(void *p) { hook_volatile(p, N, true, HERE); }

struct Source {
  const char *file;
  uint32_t line, column;
};
struct TypeName {
  uint16_t kind, info;
  char name[1];
};
struct OutOfBounds {
  Source at;
  TypeName *array, *index;
};
struct TypeMismatch {
  Source at;
  TypeName *type;
  uint8_t log_align, kind;
};
static Where where(const Source &s) { return {s.file, (int)s.line}; }

extern "C" {
EMU_HOOK(1) EMU_HOOK(2) EMU_HOOK(4) EMU_HOOK(8) EMU_HOOK(16)
void __tsan_read_range(void *p, size_t n) { hook(p, n, Read, HERE); }
void __tsan_write_range(void *p, size_t n) { hook(p, n, Write, HERE); }
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void *, void *) {}

// _abort: -fno-sanitize-recover, which compiles faster, as nothing lives on after the call
void __ubsan_handle_out_of_bounds_abort(OutOfBounds *d, uintptr_t i) {
  fail("index " + std::to_string((long)i) + " out of bounds of " + d->array->name, where(d->at));
}
void __ubsan_handle_type_mismatch_v1_abort(TypeMismatch *d, uintptr_t p) {
  check_alignment((void *)p, 1ull << d->log_align, where(d->at), d->type->name);
}
void __ubsan_handle_shift_out_of_bounds_abort(Source *d, uintptr_t, uintptr_t) {
  fail("shift exponent out of range", where(*d));
}
}
}  // namespace emu
