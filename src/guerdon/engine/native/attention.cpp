// Attention over a packed forest of segments, in one call a layer; called by ctypes (`forest.py`).
//
// Each segment's keys are transposed into panels of VW lanes once a call. A key's lane is its POSITION, so that logits,
// maxima, sums and products with the values come in blocks of KEYS absolute positions, whoever holds the keys: a row's
// arithmetic, and so its bits, depends on nothing but its own query and the keys and values that it sees, neither on
// sharing nor on other rows or the number of threads. A block of rows (query, head of the group) walks its chain of
// segments from the root, with an online softmax. Products go in micro-kernels of up to 6 rows; values of float32 are
// read in place. A row's mask is a range [low, high) of positions.
//
// A multiplication of a query and a key adds the products of a SLOT, 32 bits that hold PER numbers: one float32, or two of
// bfloat16 if the processor multiplies those (AVX512-BF16). Weights and values are multiplied in float32.
//
// Nothing is allocated here: tables and scratch come from Python, where a failing allocation is an error.
#include <math.h>
#include <omp.h>

#include "vectors.h"
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#if VW == 16 || defined(__aarch64__)
#define NV 4  // panels of a micro-kernel: 32 registers
#else
#define NV 2
#endif
#define MR 6       // rows of a micro-kernel
#define ROWS 48    // rows of a block, unless a single query has more heads
#define KEYS 256   // positions of a block; a multiple of every VW
#define VALUES 64  // positions whose values stay in the first cache
#define LDS (KEYS + 16)

static_assert(KEYS % (NV * VW) == 0, "a block of keys is whole micro-kernels");

typedef struct {
    int64_t start, position, length, panel;  // of its first token; number of its first panel
} Segment;
typedef struct {
    int64_t segment, first, count;  // rows of one segment: indices into `rows`
} Block;

typedef struct {
    const void *query, *key, *value;
    void *out;               // [T][H][E], each [H][E] contiguous
    float *lse;              // [H][T], natural logarithm; may be null
    const float *sinks;      // [H]; may be null
    int64_t query_token, query_head, key_token, key_head, value_token, value_head;  // strides in elements
    int64_t out_token;       // of `out`, whose heads may be some of many
    int64_t tokens, heads, kv_heads, size, value_size, dtype, threads;
    const Segment *segments;
    const int64_t *chain_starts, *chains;  // of each segment: its ancestors, root first, and itself
    const int64_t *panel_segments;         // [panels]
    const Block *blocks;
    const int64_t *rows, *low, *high;      // queries, ascending in each block, and the range of positions that they see
    int64_t num_segments, num_panels, num_blocks;
    float scale, softcap;    // softcap 0: none
    float *scratch;          // as many numbers as `attention_scratch` says
} Attention;

typedef struct {
    int64_t depth, width, keys, values, packs_values, per_thread, rows;  // depth: slots of a query
} Sizes;

INLINE int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// What a slot holds; `add` multiplies slots.
struct One {
    enum { PER = 1 };
    INLINE vf add(vf sum, vf x, vf y) { return sum + x * y; }
};
template <class T>
struct SlotOf {
    typedef One Slot;
};

#ifdef __AVX512BF16__
struct Two {
    enum { PER = 2 };
    INLINE vf add(vf sum, vf x, vf y) { return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y); }
};
template <>
struct SlotOf<BFloat16> {
    typedef Two Slot;
};
#endif

INLINE vf splat_slot(const float *p) {
    int32_t bits;
    memcpy(&bits, p, 4);
    return (vf)splat_int(bits);
}

static Sizes sizes_of(const Attention *a) {
    Sizes s;
    const int64_t per = a->dtype == BFLOAT16 ? SlotOf<BFloat16>::Slot::PER : 1;
    s.depth = padded(a->size, per) / per;
    s.width = padded(a->value_size, VW);
    s.keys = a->kv_heads * a->num_panels * s.depth * VW;
    s.packs_values = a->dtype != FLOAT32 || s.width != a->value_size;
    s.values = s.packs_values ? a->kv_heads * a->tokens * s.width : 0;
    s.rows = most(ROWS, a->heads / a->kv_heads);
    s.per_thread = padded(s.rows * s.depth + s.rows * s.width + s.rows * LDS + 2 * s.rows, 16);
    return s;
}

// ------------------------------------------------------------------------------------------- micro-kernels

// logits[M][N*VW] = factor * queries . keys of N panels; only lanes [first, stop) are written.
template <class Slot, int M, int N>
static void logits_of(const float *q, int64_t depth, const float *panels, float factor, float *out, int64_t first,
                      int64_t stop) {
    vf a[M][N];
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) a[i][j] = (vf){};
#pragma GCC unroll 4
    for (int64_t d = 0; d < depth; d++) {
        vf b[N];
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) b[j] = load(panels + (j * depth + d) * VW);
#pragma GCC unroll 8
        for (int i = 0; i < M; i++) {
            vf x = splat_slot(q + i * depth + d);
#pragma GCC unroll 8
            for (int j = 0; j < N; j++) a[i][j] = Slot::add(a[i][j], x, b[j]);
        }
    }
    if (Slot::PER > 1)  // else the query has it
#pragma GCC unroll 8
        for (int i = 0; i < M; i++)
#pragma GCC unroll 8
            for (int j = 0; j < N; j++) a[i][j] *= splat(factor);
    if (first == 0 && stop == N * VW) {
#pragma GCC unroll 8
        for (int i = 0; i < M; i++)
#pragma GCC unroll 8
            for (int j = 0; j < N; j++) store(out + i * LDS + j * VW, a[i][j]);
        return;
    }
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) {
        vi lane = lanes() + splat_int(j * VW);
        vi own = (lane >= splat_int((int32_t)first)) & (lane < splat_int((int32_t)stop));
#pragma GCC unroll 8
        for (int i = 0; i < M; i++) {
            float *at = out + i * LDS + j * VW;
            store(at, own ? a[i][j] : load(at));
        }
    }
}

// out[M][N*VW] += weights[M][n] . values[n][N*VW]
template <class, int M, int N>
static void add_values(const float *w, const float *values, int64_t stride, int64_t n, float *out, int64_t width) {
    vf a[M][N];
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) a[i][j] = load(out + i * width + j * VW);
#pragma GCC unroll 4
    for (int64_t k = 0; k < n; k++) {
        vf b[N];
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) b[j] = load(values + k * stride + j * VW);
#pragma GCC unroll 8
        for (int i = 0; i < M; i++) {
            vf x = splat(w[i * LDS + k]);
#pragma GCC unroll 8
            for (int j = 0; j < N; j++) a[i][j] += x * b[j];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) store(out + i * width + j * VW, a[i][j]);
}

#define BY_WIDTH(M, N, NAME, ...)                      \
    switch (N) {                                       \
        case 1: NAME<Slot, M, 1>(__VA_ARGS__); break;        \
        case 2: NAME<Slot, M, 2>(__VA_ARGS__); break;        \
        case 3: NAME<Slot, M, NV < 3 ? 1 : 3>(__VA_ARGS__); break; \
        default: NAME<Slot, M, NV < 4 ? 1 : 4>(__VA_ARGS__); \
    }
#define BY_SHAPE(M, N, NAME, ...)                          \
    switch (M) {                                           \
        case 1: BY_WIDTH(1, N, NAME, __VA_ARGS__) break;   \
        case 2: BY_WIDTH(2, N, NAME, __VA_ARGS__) break;   \
        case 3: BY_WIDTH(3, N, NAME, __VA_ARGS__) break;   \
        case 4: BY_WIDTH(4, N, NAME, __VA_ARGS__) break;   \
        case 5: BY_WIDTH(5, N, NAME, __VA_ARGS__) break;   \
        default: BY_WIDTH(6, N, NAME, __VA_ARGS__)         \
    }

template <class Slot>
static void logits_of_rows(int64_t m, int64_t n, const float *q, int64_t depth, const float *panels, float factor,
                           float *out, int64_t first, int64_t stop) {
    BY_SHAPE(m, n, logits_of, q, depth, panels, factor, out, first, stop)
}

static void add_values_of_rows(int64_t m, const float *w, const float *values, int64_t stride, int64_t n, float *out,
                               int64_t width) {
    for (int64_t d = 0; d < width; d += NV * VW) {
        typedef One Slot;
        int64_t vectors = least(NV, (width - d) / VW);
        BY_SHAPE(m, vectors, add_values, w, values + d, stride, n, out + d, width)
    }
}

// ------------------------------------------------------------------------------------------ packing

// Copies a row of so many numbers as slots, `stride` apart; an odd one's partner is 0.
template <class T>
INLINE void copy_slots(const typename T::type *row, int64_t size, float *to, int64_t stride) {
    int64_t whole = size / SlotOf<T>::Slot::PER;
    for (int64_t d = 0; d < whole; d++) memcpy(to + d * stride, row + d * SlotOf<T>::Slot::PER, 4);
    if (whole * SlotOf<T>::Slot::PER == size) return;
    typename T::type last[SlotOf<T>::Slot::PER] = {row[size - 1]};
    memcpy(to + whole * stride, last, 4);
}

template <class T>
static void pack_panel(const Attention *a, int64_t head, int64_t panel, int64_t depth, float *to) {
    const Segment *s = a->segments + a->panel_segments[panel];
    int64_t at = (s->position / VW + panel - s->panel) * VW;  // position of the first lane
    int64_t first = most(0, s->position - at), stop = least(VW, s->position + s->length - at);
    if (stop - first < VW) memset(to, 0, depth * VW * sizeof(float));
    const typename T::type *from = (const typename T::type *)a->key + head * a->key_head +
                                   (s->start + at - s->position) * a->key_token;
    if (SlotOf<T>::Slot::PER > 1) {
        for (int64_t lane = first; lane < stop; lane++)
            copy_slots<T>(from + lane * a->key_token, a->size, to + lane, VW);
        return;
    }
    float numbers[VW];
    for (int64_t d = 0; d < a->size; d += VW)
        for (int64_t lane = first; lane < stop; lane++) {
            store(numbers, get_some<T>(from + lane * a->key_token + d, a->size - d));
            for (int64_t i = 0; i < least(VW, a->size - d); i++) to[(d + i) * VW + lane] = numbers[i];
        }
}

template <class T>
static void pack_value(const Attention *a, int64_t head, int64_t token, float *to, int64_t width) {
    const typename T::type *from = (const typename T::type *)a->value + head * a->value_head + token * a->value_token;
    for (int64_t i = 0; i < width; i += VW) store(to + i, get_some<T>(from + i, a->value_size - i));
}

template <class T>
static void pack_query(const Attention *a, int64_t head, int64_t token, float factor, float *to) {
    const typename T::type *from = (const typename T::type *)a->query + head * a->query_head + token * a->query_token;
    if (SlotOf<T>::Slot::PER > 1) return copy_slots<T>(from, a->size, to, 1);
    for (int64_t i = 0; i < a->size; i += VW)
        put_some<Float32>(to + i, get_some<T>(from + i, a->size - i) * splat(factor), a->size - i);
}

template <class T>
static void write_row(const Attention *a, int64_t head, int64_t token, const float *from, float factor) {
    typename T::type *to = (typename T::type *)a->out + token * a->out_token + head * a->value_size;
    for (int64_t i = 0; i < a->value_size; i += VW)
        put_some<T>(to + i, load(from + i) * splat(factor), a->value_size - i);
}

// ------------------------------------------------------------------------------------------ softmax

// Turns a row's logits in columns [first, stop) into weights, zero in the rest of [from, to); updates its sums.
static void soften(const Attention *a, float *x, int64_t from, int64_t to, int64_t first, int64_t stop, float *largest,
                   float *total, float *out, int64_t width) {
    if (stop <= first) {
        for (int64_t j = from; j < to; j++) x[j] = 0;
        return;
    }
    int64_t begin = first / VW * VW, end = padded(stop, VW);
    if (a->softcap != 0)
        for (int64_t j = begin; j < end; j += VW) store(x + j, tanh_of(load(x + j)) * splat(a->softcap * 1.44269504089f));
    for (int64_t j = begin; j < first; j++) x[j] = -INFINITY;
    for (int64_t j = stop; j < end; j++) x[j] = -INFINITY;
    vf max = load(x + begin);
    for (int64_t j = begin + VW; j < end; j += VW) max = load(x + j) > max ? load(x + j) : max;
    float best = *largest;
    for (int j = 0; j < VW; j++) best = max[j] > best ? max[j] : best;
    vf shift = splat(best == -INFINITY ? 0.0f : best), added = {};
    for (int64_t j = begin; j < end; j += VW) {
        vf e = exp2_of(load(x + j) - shift);
        store(x + j, e);
        added += e;
    }
    if (best != *largest) {
        float shrunk = *largest == -INFINITY ? 0.0f : exp2_of(splat(*largest - best))[0];
        *total *= shrunk;
        for (int64_t d = 0; d < width; d += VW) store(out + d, load(out + d) * splat(shrunk));
        *largest = best;
    }
    *total += sum(added);
    for (int64_t j = from; j < begin; j++) x[j] = 0;
    for (int64_t j = end; j < to; j++) x[j] = 0;
}

// ------------------------------------------------------------------------------------------ a block of rows

typedef struct {
    float *q, *out, *logits, *largest, *total;
} Room;

template <class T>
static void attend(const Attention *a, const Sizes *sizes, const float *panels, const float *packed, int64_t head,
                   const Block *block, Room room) {
    typedef typename SlotOf<T>::Slot Slot;
    const int64_t depth = sizes->depth, width = sizes->width;
    const int64_t group = a->heads / a->kv_heads, num = block->count * group;
    const int64_t *tokens = a->rows + block->first, *low = a->low + block->first, *high = a->high + block->first;
    const int64_t *chain = a->chains + a->chain_starts[block->segment];
    const int64_t *chain_end = a->chains + a->chain_starts[block->segment + 1];
    const float log2e = 1.44269504089f, factor = a->softcap != 0 ? a->scale / a->softcap : a->scale * log2e;
    for (int64_t r = 0; r < num; r++) {
        int64_t h = head * group + r % group;
        pack_query<T>(a, h, tokens[r / group], factor, room.q + r * depth);
        room.largest[r] = a->sinks ? a->sinks[h] * log2e : -INFINITY;
        room.total[r] = a->sinks ? 1.0f : 0.0f;
    }
    memset(room.out, 0, num * width * sizeof(float));
    const float *values = sizes->packs_values ? packed : (const float *)a->value + head * a->value_head;
    const int64_t stride = sizes->packs_values ? width : a->value_token;

    for (int64_t at = low[0] / KEYS * KEYS; at < high[block->count - 1]; at += KEYS) {
        while (chain < chain_end && a->segments[*chain].position + a->segments[*chain].length <= at) chain++;
        for (const int64_t *c = chain; c < chain_end && a->segments[*c].position < at + KEYS; c++) {
            const Segment *s = a->segments + *c;
            int64_t first = most(s->position, at), stop = least(s->position + s->length, at + KEYS);
            for (int64_t p = first / VW; p * VW < stop; p += NV) {
                const float *own = panels + (s->panel + p - s->position / VW) * depth * VW;
                for (int64_t r = 0; r < num; r += MR) {
                    int64_t m = least(MR, num - r);
                    int64_t to = least(stop, high[(r + m - 1) / group]);
                    if (p * VW >= to || (p + NV) * VW <= low[r / group]) continue;
                    int64_t n = least(NV, (to - p * VW + VW - 1) / VW);
                    float *logits = room.logits + r * LDS + p * VW - at;
                    logits_of_rows<Slot>(m, n, room.q + r * depth, depth, own, factor, logits,
                                         most(0, first - p * VW), least(n * VW, stop - p * VW));
                }
            }
        }
        for (int64_t r = 0; r < num; r += MR) {
            int64_t m = least(MR, num - r);
            int64_t from = most(0, low[r / group] - at), to = least(KEYS, high[(r + m - 1) / group] - at);
            for (int64_t i = r; i < r + m; i++)
                soften(a, room.logits + i * LDS, from, to, most(0, low[i / group] - at),
                             least(KEYS, high[i / group] - at), room.largest + i, room.total + i,
                             room.out + i * width, width);
        }
        for (const int64_t *c = chain; c < chain_end && a->segments[*c].position < at + KEYS; c++) {
            const Segment *s = a->segments + *c;
            int64_t end = least(s->position + s->length, at + KEYS);
            for (int64_t p = most(s->position, at); p < end; p += VALUES) {
                int64_t stop = least(p + VALUES, end);
                for (int64_t r = 0; r < num; r += MR) {
                    int64_t m = least(MR, num - r);
                    int64_t from = most(p, low[r / group]), to = least(stop, high[(r + m - 1) / group]);
                    if (from < to)
                        add_values_of_rows(m, room.logits + r * LDS + from - at,
                                           values + (s->start + from - s->position) * stride, stride, to - from,
                                           room.out + r * width, width);
                }
            }
        }
    }
    for (int64_t r = 0; r < num; r++) {
        int64_t h = head * group + r % group, token = tokens[r / group];
        write_row<T>(a, h, token, room.out + r * width, 1.0f / room.total[r]);
        if (a->lse)
            a->lse[h * a->tokens + token] =
                (float)((room.largest[r] + log2((double)room.total[r])) * 0.6931471805599453);
    }
}

template <class T>
static void compute(const Attention *a) {
    const Sizes sizes = sizes_of(a);
    float *keys = a->scratch, *values = keys + padded(sizes.keys, 16), *rooms = values + padded(sizes.values, 16);
    const int64_t panel_size = sizes.depth * VW, head_values = sizes.values / a->kv_heads;
#pragma omp parallel num_threads((int)a->threads)
    {
        Room room;
        room.q = rooms + omp_get_thread_num() * sizes.per_thread;
        room.out = room.q + sizes.rows * sizes.depth;
        room.logits = room.out + sizes.rows * sizes.width;
        room.largest = room.logits + sizes.rows * LDS;
        room.total = room.largest + sizes.rows;
#pragma omp for collapse(2) schedule(static) nowait
        for (int64_t head = 0; head < a->kv_heads; head++)
            for (int64_t panel = 0; panel < a->num_panels; panel++)
                pack_panel<T>(a, head, panel, sizes.depth, keys + (head * a->num_panels + panel) * panel_size);
        if (sizes.packs_values) {
#pragma omp for collapse(2) schedule(static) nowait
            for (int64_t head = 0; head < a->kv_heads; head++)
                for (int64_t token = 0; token < a->tokens; token++)
                    pack_value<T>(a, head, token, values + head * head_values + token * sizes.width, sizes.width);
        }
#pragma omp barrier
#pragma omp for collapse(2) schedule(dynamic, 1)
        for (int64_t head = 0; head < a->kv_heads; head++)
            for (int64_t i = 0; i < a->num_blocks; i++)
                attend<T>(a, &sizes, keys + head * a->num_panels * panel_size, values + head * head_values, head,
                          a->blocks + i, room);
    }
}

extern "C" {
// Lanes of a panel, and rows of a block: what the tables depend on.
extern const int64_t attention_lanes, attention_rows;
const int64_t attention_lanes = VW, attention_rows = ROWS;

// Returns how many numbers of float32 the call needs as scratch.
int64_t attention_scratch(const Attention *a) {
    Sizes s = sizes_of(a);
    return padded(s.keys, 16) + padded(s.values, 16) + a->threads * s.per_thread;
}

void attention(const Attention *a) { BY_DTYPE(a->dtype, compute<T>(a)) }
}
