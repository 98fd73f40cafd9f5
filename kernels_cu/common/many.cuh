// Many tensors in one launch: a block takes a chunk of one of them, a warp 256 values at a time.
//
//   tensors     a record for every tensor: addresses, then ELEMENTS, FIRST (its first chunk), KIND
//   owners      for every chunk, the number of its tensor
//   constants   FIELDS    numbers in a record; the constant of a field's name is its index there
//               KINDS     a bit for every kind in the launch: a Dtype, and flags of the kernel
//               LANES     values of one access: 4, or fewer as the addresses allow
//               CHUNK     elements of a chunk
//               THREADS   threads of a block
#pragma once
#include <common/vector.cuh>

constexpr int SPAN = 256, GROUPS = SPAN / 32 / LANES;

enum Dtype { FLOAT16, BFLOAT16, FLOAT32, DTYPE = 3 };  // DTYPE: mask of a kind's dtype bits

template <int> struct Number { using type = float; };
template <> struct Number<FLOAT16> { using type = __half; };
template <> struct Number<BFLOAT16> { using type = __nv_bfloat16; };
template <int KIND> using NumberOf = typename Number<KIND & DTYPE>::type;

// Call `use` with the kind of a tensor as a compile-time constant, one of KINDS.
template <int VALUE> struct Constant { static constexpr int value = VALUE; };
template <int K = 0, class Use> DEVICE void with_kind(int kind, Use use) {
    if constexpr (K < 32) {
        if constexpr (KINDS >> K & 1)
            if (kind == K) return use(Constant<K>());
        with_kind<K + 1>(kind, use);
    }
}

// The values of a span that one thread holds.  Neighbouring lanes hold neighbouring values, so that
// a warp's access has no gap in any dtype.
struct Values { float at[GROUPS][LANES]; };

// Call use(i, j) for each of them.
template <class Use> DEVICE void each(Use use) {
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
#pragma unroll
        for (int j = 0; j < LANES; j++) use(i, j);
}

DEVICE int offset(int group) { return (group * 32 + (int)threadIdx.x % 32) * LANES; }

template <class T>
DEVICE void load(Values &to, const T *span, long long count) {
#pragma unroll
    for (int i = 0; i < GROUPS; i++) load(to.at[i], span + offset(i), count - offset(i));
}

template <class T>
DEVICE void store(T *base, long long at, const Values &from, long long count) {
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
        if (count - offset(i) >= LANES) store(base, at + offset(i), from.at[i]);
        else store(base + at + offset(i), from.at[i], count - offset(i));
}

template <class T> DEVICE T *address(const long long *record, int field) {
    return reinterpret_cast<T *>(record[field]);
}
