// Vectors of VW floats by the compilers' vector types, without intrinsics: one source for every processor.
//
// Dtypes are numbers in the C interface: 0 float32, 1 bfloat16, 2 float16. All arithmetic is float32, but for what
// attention multiplies by AVX512-BF16.
#pragma once
#include <stdint.h>
#include <string.h>

#ifndef VW
#define VW 4
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(VW * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(VW * 4), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(VW * 4), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(VW * 2), aligned(2), may_alias));
enum { FLOAT32, BFLOAT16, FLOAT16 };

INLINE vf splat(float x) { return x - (vf){}; }
INLINE vi splat_int(int32_t x) { return x - (vi){}; }
INLINE vf load(const float *p) { return *(const vf *)p; }
INLINE void store(float *p, vf x) { *(vf *)p = x; }

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE vi lanes() {
    vi n = {};
    for (int i = 0; i < VW; i++) n[i] = i;
    return n;
}

// The sum of all lanes, always in the same order.
INLINE float sum(vf x) {
    float total = 0;
    for (int i = 0; i < VW; i++) total += x[i];
    return total;
}

// 2^x for any x up to 127, with a relative error below 2e-7; 0 below -126, NaN for NaN.
INLINE vf exp2_of(vf x) {
    const float magic = 12583039.0f;  // 1.5 x 2^23 + 127: adding it rounds to a whole number, in the lowest bits
    vf shifted = x + splat(magic);
    vf f = x - (shifted - splat(magic));
    vf p = splat(1.5461444725e-04f);  // interpolates 2^f in Chebyshev's points of [-1/2, 1/2]
    p = p * f + splat(1.3400428178e-03f);
    p = p * f + splat(9.6180566784e-03f);
    p = p * f + splat(5.5503272267e-02f);
    p = p * f + splat(2.4022650922e-01f);
    p = p * f + splat(6.9314720670e-01f);
    p = p * f + splat(1.0f);
    vf power = p * (vf)((vi)shifted << 23);
    return x < splat(-126.0f) ? splat(0.0f) : power;
}

// tanh, accurate to a few units in the last place also for small arguments.
INLINE vf tanh_of(vf x) {
    vf u = x * x;
    vf p = splat(2.0606214342e-03f);  // (tanh(x) / x - 1) / x^2 up to 0.7
    p = p * u + splat(-8.1135070207e-03f);
    p = p * u + splat(2.1689405898e-02f);
    p = p * u + splat(-5.3948170331e-02f);
    p = p * u + splat(1.3333250169e-01f);
    p = p * u + splat(-3.3333332769e-01f);
    vf near = x + x * u * p;
    vf size = x < splat(0.0f) ? -x : x;
    vf bounded = size > splat(20.0f) ? splat(20.0f) : size;  // NaN stays
    vf t = exp2_of(bounded * splat(-2.8853900818f));
    vf far = (splat(1.0f) - t) / (splat(1.0f) + t);
    far = x < splat(0.0f) ? -far : far;
    return size < splat(0.7f) ? near : far;
}

// ------------------------------------------------------------------------------------------------ dtypes

// Of a dtype: `get` reads a vector, `put` writes one, `rounded` writes and reads it; to the nearest, ties to even.
struct Float32 {
    typedef float type;
    INLINE vf get(const float *p) { return load(p); }
    INLINE void put(float *p, vf x) { store(p, x); }
    INLINE vf rounded(vf x) { return x; }
};

struct BFloat16 {
    typedef uint16_t type;
    INLINE vf get(const uint16_t *p) { return (vf)(__builtin_convertvector(*(const vh *)p, vu) << 16); }
    INLINE void put(uint16_t *p, vf x) { *(vh *)p = __builtin_convertvector((vu)rounded(x) >> 16, vh); }
    INLINE vf rounded(vf x) {
        vu bits = (vu)x;
        bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
        return (vf)(x != x ? (vu){} + 0x7fc00000 : bits);
    }
};

struct Float16 {
    typedef uint16_t type;
    INLINE vf get(const uint16_t *p) { return of_bits(__builtin_convertvector(*(const vh *)p, vu)); }
    INLINE void put(uint16_t *p, vf x) { *(vh *)p = __builtin_convertvector(bits_of(x), vh); }
    INLINE vf rounded(vf x) { return of_bits(bits_of(x)); }

    INLINE vf of_bits(vu half) {
        // As a float32 the bits are too small by 2^112, also where they are subnormal.
        vu bits = (vu)((vf)((half & 0x7fff) << 13) * splat(5.192296858534828e33f));
        bits = (half & 0x7c00) == 0x7c00 ? bits | 0x7f800000 : bits;
        return (vf)(bits | (half & 0x8000) << 16);
    }
    INLINE vu bits_of(vf x) {
        vu bits = (vu)x, sign = bits >> 16 & 0x8000;
        bits &= 0x7fffffff;
        vu normal = (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
        vu subnormal = (vu)((vf)bits + splat(0.5f)) - 0x3f000000;
        vu found = bits < 0x38800000 ? subnormal : normal;
        found = bits >= 0x477ff000 ? (vu){} + 0x7c00 : found;
        found = bits > 0x7f800000 ? (vu){} + 0x7e00 : found;
        return found | sign;
    }
};

// Reads and writes the first n lanes, zeros in the others.
template <class T>
INLINE vf get_some(const typename T::type *p, int64_t n) {
    if (n >= VW) return T::get(p);
    typename T::type some[VW] = {};
    for (int64_t i = 0; i < n; i++) some[i] = p[i];
    return T::get(some);
}
template <class T>
INLINE void put_some(typename T::type *p, vf x, int64_t n) {
    if (n >= VW) return T::put(p, x);
    typename T::type some[VW];
    T::put(some, x);
    for (int64_t i = 0; i < n; i++) p[i] = some[i];
}

// Calls CODE with the type T of a dtype.
#define BY_DTYPE(DTYPE, CODE)                                             \
    switch (DTYPE) {                                                      \
        case BFLOAT16: { typedef BFloat16 T; CODE; break; }               \
        case FLOAT16: { typedef Float16 T; CODE; break; }                 \
        default: { typedef Float32 T; CODE; break; }                      \
    }
