// LANES neighbouring values of a row: converted to float on load and back on store, moved in
// accesses of up to 16 bytes.
#pragma once

template <int BYTES> struct Word { using type = uint4; };
template <> struct Word<8> { using type = uint2; };
template <> struct Word<4> { using type = unsigned; };
template <> struct Word<2> { using type = unsigned short; };
template <> struct Word<1> { using type = unsigned char; };

// Values in the dtype of memory, for kernels that keep them in few registers.
template <class T, int LANES> struct Vector {
    static constexpr int BYTES = sizeof(T) * LANES;
    using Word = typename ::Word<(BYTES < 16 ? BYTES : 16)>::type;
    static constexpr int WORDS = BYTES / sizeof(Word);
    alignas(Word) T at[LANES];
};

template <int LANES, class T>
DEVICE void fetch(Vector<T, LANES> &to, const T *from) {
    using V = Vector<T, LANES>;
#pragma unroll
    for (int i = 0; i < V::WORDS; i++)
        reinterpret_cast<typename V::Word *>(&to)[i] =
            reinterpret_cast<const typename V::Word *>(from)[i];
}

template <int LANES, class T>
DEVICE void put(T *to, const Vector<T, LANES> &from) {
    using V = Vector<T, LANES>;
#pragma unroll
    for (int i = 0; i < V::WORDS; i++)
        reinterpret_cast<typename V::Word *>(to)[i] =
            reinterpret_cast<const typename V::Word *>(&from)[i];
}

// The same at base + at, where base is aligned and LANES divides `at`.  The compiler cannot tell
// that base + at is aligned: in a loop with an unknown step it splits such an access in four.
template <int LANES, class T>
DEVICE void put(T *base, long long at, const Vector<T, LANES> &from) {
    using V = Vector<T, LANES>;
#pragma unroll
    for (int i = 0; i < V::WORDS; i++)
        reinterpret_cast<typename V::Word *>(base)[at / (LANES / V::WORDS) + i] =
            reinterpret_cast<const typename V::Word *>(&from)[i];
}

template <int LANES, class T>
DEVICE void widen(float (&to)[LANES], const Vector<T, LANES> &from) {
#pragma unroll
    for (int j = 0; j < LANES; j++) to[j] = (float)from.at[j];
}

template <int LANES, class T>
DEVICE void load(float (&to)[LANES], const T *from) {
    Vector<T, LANES> v;
    fetch(v, from);
    widen(to, v);
}

template <int LANES, class T>
DEVICE void narrow(Vector<T, LANES> &to, const float (&from)[LANES]) {
#pragma unroll
    for (int j = 0; j < LANES; j++) to.at[j] = (T)from[j];
}

template <int LANES, class T>
DEVICE void store(T *to, const float (&from)[LANES]) {
    Vector<T, LANES> v;
    narrow(v, from);
    put(to, v);
}

template <int LANES, class T>
DEVICE void store(T *base, long long at, const float (&from)[LANES]) {
    Vector<T, LANES> v;
    narrow(v, from);
    put(base, at, v);
}

// The same for the first `count` values where a flat array has fewer than LANES left; values past
// its end load as 0.
template <int LANES, class T>
DEVICE void load(float (&to)[LANES], const T *from, long long count) {
    if (count >= LANES) return load(to, from);
#pragma unroll
    for (int j = 0; j < LANES; j++) to[j] = j < count ? (float)from[j] : 0.0f;
}

template <int LANES, class T>
DEVICE void store(T *to, const float (&from)[LANES], long long count) {
    if (count >= LANES) return store(to, from);
#pragma unroll
    for (int j = 0; j < LANES; j++)
        if (j < count) to[j] = (T)from[j];
}
