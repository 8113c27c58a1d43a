// Norms, gated activations and rotary embeddings, each in one pass over memory; called by ctypes (`passes.py`).
//
// All round where transformers does: in half precision after each of its operators. A row's arithmetic depends on its
// own numbers and nothing else. Strides are in elements, and the numbers of a row stand side by side.
#include <math.h>

#include "vectors.h"

#define FEWEST 32768  // numbers from which on threads are worth their start

template <class T>
static void norm_row(const typename T::type *x, const typename T::type *weight, typename T::type *out, int64_t width,
                     float epsilon) {
    vf squares[4] = {};
    for (int64_t i = 0, j = 0; i < width; i += VW, j = (j + 1) & 3) {
        vf y = get_some<T>(x + i, width - i);
        squares[j] += y * y;
    }
    float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    vf factor = splat(1.0f / sqrtf(total / (float)width + epsilon));
    for (int64_t i = 0; i < width; i += VW) {
        vf y = T::rounded(get_some<T>(x + i, width - i) * factor);
        put_some<T>(out + i, y * get_some<T>(weight + i, width - i), width - i);
    }
}

template <class T>
static void norm_rows(const void *x, const void *weight, void *out, int64_t rows, int64_t width, int64_t stride,
                      float epsilon, int64_t threads) {
    typedef typename T::type N;
#pragma omp parallel for schedule(static) num_threads((int)threads) if (rows * width > FEWEST)
    for (int64_t r = 0; r < rows; r++)
        norm_row<T>((const N *)x + r * stride, (const N *)weight, (N *)out + r * width, width, epsilon);
}

INLINE vf logistic(vf x) {
    vf size = x < splat(0.0f) ? -x : x;
    vf t = exp2_of(size * splat(-1.44269504089f)), large = splat(1.0f) / (splat(1.0f) + t);
    return x < splat(0.0f) ? t * large : large;
}
INLINE vf silu(vf x) { return x * logistic(x); }
INLINE vf gelu(vf x) {  // by tanh: (1 + tanh z) / 2 is the logistic function of 2 z, without its cancellation
    return x * logistic(splat(1.59576912161f) * (x + splat(0.044715f) * x * x * x));
}

INLINE vf gelu_by_erf(vf x) {
    vf size = x < splat(0.0f) ? -x : x, t = splat(1.0f) / (splat(1.0f) + splat(0.28284271247f) * size);
    vf p = splat(-2.1027494371e-02f);  // interpolates exp(x^2 / 2) (1 - erf(|x| / sqrt 2)) / 2
    p = p * t + splat(1.3503424733e-01f);
    p = p * t + splat(-3.4070147282e-01f);
    p = p * t + splat(4.0698259153e-01f);
    p = p * t + splat(-2.6605140436e-01f);
    p = p * t + splat(2.1250372283e-01f);
    p = p * t + splat(3.3135729784e-02f);
    p = p * t + splat(1.1616376492e-01f);
    p = p * t + splat(1.1096308389e-01f);
    p = p * t + splat(1.1300370476e-01f);
    p = p * t + splat(-6.4736386018e-06f);
    vf tail = p * exp2_of(size * size * splat(-0.72134752044f));
    return x * (x < splat(0.0f) ? tail : splat(1.0f) - tail);
}
INLINE vf activation(vf x, int64_t kind) {
    switch (kind) {
        case 0: return silu(x);
        case 1: return gelu(x);
        case 2: return gelu_by_erf(x);
        default: return logistic(x);
    }
}

template <class T>
static void gate_rows(const void *gate, const void *up, void *out, int64_t rows, int64_t width, int64_t gate_stride,
                      int64_t up_stride, int64_t kind, int64_t threads) {
    typedef typename T::type N;
#pragma omp parallel for schedule(static) num_threads((int)threads) if (rows * width > FEWEST)
    for (int64_t r = 0; r < rows; r++) {
        const N *g = (const N *)gate + r * gate_stride, *u = up ? (const N *)up + r * up_stride : g;
        N *to = (N *)out + r * width;
        for (int64_t i = 0; i < width; i += VW) {
            vf x = get_some<T>(g + i, width - i);
            vf y = T::rounded(activation(x, kind));
            put_some<T>(to + i, up ? y * get_some<T>(u + i, width - i) : y, width - i);
        }
    }
}

template <class T>
static void rotate_rows(const void *x, const void *cosine, const void *sine, void *out, int64_t tokens, int64_t heads,
                        int64_t size, int64_t token_stride, int64_t head_stride, int64_t wave_stride, int64_t threads) {
    typedef typename T::type N;
    const int64_t half = size / 2;
#pragma omp parallel for schedule(static) num_threads((int)threads) if (tokens * heads * size > FEWEST)
    for (int64_t t = 0; t < tokens; t++) {
        const N *c = (const N *)cosine + t * wave_stride, *s = (const N *)sine + t * wave_stride;
        for (int64_t h = 0; h < heads; h++) {
            const N *from = (const N *)x + t * token_stride + h * head_stride;
            N *to = (N *)out + (t * heads + h) * size;
            for (int64_t i = 0; i < half; i += VW) {
                int64_t n = half - i, k = i + half;
                vf one = get_some<T>(from + i, n), two = get_some<T>(from + k, n);
                vf first = T::rounded(one * get_some<T>(c + i, n)) - T::rounded(two * get_some<T>(s + i, n));
                vf second = T::rounded(two * get_some<T>(c + k, n)) + T::rounded(one * get_some<T>(s + k, n));
                put_some<T>(to + i, first, n);
                put_some<T>(to + k, second, n);
            }
        }
    }
}

extern "C" {
// RMSNorm of rows `stride` apart into contiguous ones.
void norm(const void *x, const void *weight, void *out, int64_t rows, int64_t width, int64_t stride, float epsilon,
          int64_t dtype, int64_t threads) {
    BY_DTYPE(dtype, norm_rows<T>(x, weight, out, rows, width, stride, epsilon, threads))
}

// SiLU, GELU by tanh, GELU or the logistic function of the gate, by `kind`, times `up` unless that is null.
void gated(const void *gate, const void *up, void *out, int64_t rows, int64_t width, int64_t gate_stride,
           int64_t up_stride, int64_t kind, int64_t dtype, int64_t threads) {
    BY_DTYPE(dtype, gate_rows<T>(gate, up, out, rows, width, gate_stride, up_stride, kind, threads))
}

// The rotary embedding of [T][H][D] by cosines and sines [T][D]; out is contiguous.
void rotated(const void *x, const void *cosine, const void *sine, void *out, int64_t tokens, int64_t heads,
             int64_t size, int64_t token_stride, int64_t head_stride, int64_t wave_stride, int64_t dtype,
             int64_t threads) {
    BY_DTYPE(dtype, rotate_rows<T>(x, cosine, sine, out, tokens, heads, size, token_stride, head_stride, wave_stride,
                                   threads))
}
}
