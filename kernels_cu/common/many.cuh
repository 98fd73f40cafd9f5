// Many tensors in one launch: a block takes a chunk of one of them, a warp 256 values at a time.
//
//   tensors   FIELDS numbers of every tensor: up to seven addresses, then ELEMENTS, FIRST (its first
//             chunk) and KIND (which of the variants that KINDS has a bit for)
//   owners    for every chunk, the number of its tensor
//
//   A kernel wants the constants KINDS, LANES (of one access: 4, or what all addresses are multiples
//   of) and THREADS.
#pragma once
#include "common/vector.cuh"

constexpr int FIELDS = 10, ELEMENTS = 7, FIRST = 8, KIND = 9;
constexpr int CHUNK = 8192, SPAN = 256, GROUPS = SPAN / 32 / LANES;

template <int> struct Number { using type = __half; };
template <> struct Number<1> { using type = __nv_bfloat16; };
template <> struct Number<2> { using type = float; };

// What one thread holds of a span: neighbouring lanes hold neighbouring values, so that an access
// of any dtype leaves no gap.
struct Values {
    float at[GROUPS][LANES];
};

__device__ __forceinline__ int place(int group) {
    return (group * 32 + (int)threadIdx.x % 32) * LANES;
}

template <class T>
__device__ __forceinline__ void load(Values &to, const T *span, long long count) {
#pragma unroll
    for (int i = 0; i < GROUPS; i++) load(to.at[i], span + place(i), count - place(i));
}

template <class T>
__device__ __forceinline__ void store(T *base, long long at, const Values &from, long long count) {
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
        if (count - place(i) >= LANES) store(base, at + place(i), from.at[i]);
        else store(base + at + place(i), from.at[i], count - place(i));
}

template <class T> __device__ __forceinline__ T *address(const long long *record, int field) {
    return reinterpret_cast<T *>(record[field]);
}
