// The forward of a Llama-shaped model over a handful of rows, for CPUs.
//
// What bounds it is reading the weights, so they are read once per forward, in panels of 16 outputs, and where all of
// them are bfloat16 values (most checkpoints store those) as bfloat16: half the bytes, the very same numbers, widened
// in registers. Activations, sums and the KV cache are float32 throughout.
//
// One parallel region per forward: its threads share the panels, rows and heads of each phase through a counter and
// meet at a barrier of their own, which does not sleep for the microseconds that a phase takes.
#include <math.h>
#include <omp.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t i8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t u8 __attribute__((vector_size(32), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16") // so that arrays of sums become registers
#define ROWS 6  // rows x 2 vectors of sums fill the registers of AVX2
#define LANES 7 // vectors of queries that attention works on at once
#define PHASES 8
#define HIDDEN_FROM_ALL -3e38f

enum { STORE, ADD, GATED };

typedef struct {
    const void *panels; // [ceil(out / 16)][in][16] float32, or bfloat16 with columns j and j + 8 in one word
    const float *bias;  // [out] or NULL
    int64_t in, out;    // out counts both halves of a gated product, in panels of 8 gates and 8 ups
    int64_t half;       // whether the panels are bfloat16
} Product;

typedef struct {
    const float *norm1, *norm2, *q_norm, *k_norm; // the last two or NULL
    Product qkv, out, gate_up, down;
} Layer;

typedef struct {
    int64_t layers, rows, past, hidden, heads, kv_heads, dim, threads;
    float eps, scale;
    const Layer *layer;
    const float *norm;             // of the last hidden states, or NULL to leave them
    float *x;                      // [rows, hidden]: embeddings in, hidden states out
    const float *cos, *sin;        // [rows, dim]
    const float *mask;             // additive [rows, past + rows], or NULL: rows follow each other
    float *const *keys, *const *values; // per layer [kv_heads, capacity, dim]; rows from past on are written
    const int64_t *capacity;       // per layer
} Forward;

typedef struct {
    atomic_int arrived, turn;
    int threads;
} Barrier;

static void meet(Barrier *b) {
    int turn = atomic_load(&b->turn);
    if (atomic_fetch_add(&b->arrived, 1) + 1 == b->threads) {
        atomic_store(&b->arrived, 0);
        atomic_fetch_add(&b->turn, 1);
        return;
    }
    for (int spins = 0; atomic_load(&b->turn) == turn; spins++) {
        if (spins > 4000) sched_yield(); // somebody else has this core
#if defined(__x86_64__)
        else __builtin_ia32_pause();
#endif
    }
}

INLINE v8 exp8(v8 x) {
    // e^x = 2^n e^r, |r| <= ln 2 / 2, degree 6: relative error below 2e-7
    i8 low = (i8)(x < -87.0f), high = (i8)(x > 88.0f);
    x = (v8)(((i8)x & ~low) | (low & (i8)(v8){-87, -87, -87, -87, -87, -87, -87, -87}));
    x = (v8)(((i8)x & ~high) | (high & (i8)(v8){88, 88, 88, 88, 88, 88, 88, 88}));
    v8 shifted = x * 1.44269504f + 12582912.0f; // rounds to an integer in the low bits
    v8 n = shifted - 12582912.0f;
    v8 r = x - n * 0.693359375f + n * 2.12194440e-4f;
    v8 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return (v8)((u8)p + ((u8)shifted << 23));
}

INLINE v8 larger(v8 a, v8 b) {
    i8 more = (i8)(a > b);
    return (v8)(((i8)a & more) | ((i8)b & ~more));
}

// R rows of x times one panel; meanwhile the panel that comes next is fetched, `fetch` bytes per 8 inputs
INLINE void tile(const float *x, const Product *p, const char *panel, const char *ahead, int64_t fetch, const int R, v8 *low,
                 v8 *high) {
    const int64_t in = p->in, step = p->half ? 32 : 64;
    v8 a[ROWS], b[ROWS];
    for (int r = 0; r < R; r++) a[r] = b[r] = (v8){0};
    for (int64_t k = 0; k < in; k += 8, ahead += fetch) {
        const int64_t end = in - k < 8 ? in : k + 8;
        for (int64_t at = 0; at < fetch; at += 64) __builtin_prefetch(ahead + at, 0, 3);
        if (p->half) {
            for (int64_t i = k; i < end; i++) {
                u8 both = *(const u8 *)(panel + i * step);
                v8 first = (v8)(both << 16), second = (v8)(both & 0xffff0000u);
                for (int r = 0; r < R; r++) {
                    float s = x[r * in + i];
                    a[r] += first * s;
                    b[r] += second * s;
                }
            }
        } else {
            for (int64_t i = k; i < end; i++) {
                v8 first = *(const v8 *)(panel + i * step), second = *(const v8 *)(panel + i * step + 32);
                for (int r = 0; r < R; r++) {
                    float s = x[r * in + i];
                    a[r] += first * s;
                    b[r] += second * s;
                }
            }
        }
    }
    for (int r = 0; r < R; r++) low[r] = a[r], high[r] = b[r];
}

static void any_tile(const float *x, const Product *p, const char *panel, const char *ahead, int64_t fetch, int R, v8 *low,
                     v8 *high) {
#define CASE(R) case R: tile(x, p, panel, ahead, fetch, R, low, high); break;
    switch (R) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
}

static void finish(const Product *p, int mode, int64_t panel, float *out, v8 low, v8 high) {
    int64_t at = panel * 16, width = p->out - at < 16 ? p->out - at : 16;
    float sums[16];
    *(v8 *)sums = low, *(v8 *)(sums + 8) = high;
    if (p->bias)
        for (int64_t j = 0; j < width; j++) sums[j] += p->bias[at + j];
    if (mode == GATED) {
        v8 gate = *(v8 *)sums, up = *(v8 *)(sums + 8);
        *(v8 *)(out + panel * 8) = gate / (1.0f + exp8(-gate)) * up;
    } else if (mode == ADD) {
        for (int64_t j = 0; j < width; j++) out[at + j] += sums[j];
    } else {
        memcpy(out + at, sums, width * sizeof(float));
    }
}

// this thread's share of out (+)= x @ W.T; next is shared by all threads
static void product(const Product *p, const float *x, int64_t rows, float *out, int mode, int threads, atomic_long *next) {
    int64_t panels = (p->out + 15) / 16, stride = mode == GATED ? p->out / 2 : p->out;
    int64_t bytes = p->in * (p->half ? 32 : 64), share = panels / (threads * 16);
    int64_t blocks = (rows + ROWS - 1) / ROWS;
    int64_t fetch = (bytes / p->in * 8 / blocks + 63) / 64 * 64; // shared by the blocks of rows
    if (share < 1) share = 1;
    for (int64_t start; (start = atomic_fetch_add(next, share)) < panels;) {
        int64_t end = start + share < panels ? start + share : panels;
        for (int64_t panel = start; panel < end; panel++) {
            const char *weights = (const char *)p->panels + panel * bytes;
            for (int64_t b = 0, row = 0; b < blocks; b++) {
                int R = (int)((rows - row) / (blocks - b)); // blocks of like sizes
                v8 low[ROWS], high[ROWS];
                any_tile(x + row * p->in, p, weights, weights + bytes + b * fetch * ((p->in + 7) / 8), fetch, R, low, high);
                for (int r = 0; r < R; r++) finish(p, mode, panel, out + (row + r) * stride, low[r], high[r]);
                row += R;
            }
        }
    }
}

static void normed(const float *x, const float *weight, float *out, int64_t size, float eps) {
    v8 sums = {0};
    int64_t k = 0;
    for (; k + 8 <= size; k += 8) sums += *(const v8 *)(x + k) * *(const v8 *)(x + k);
    float sum = 0;
    for (int j = 0; j < 8; j++) sum += sums[j];
    for (; k < size; k++) sum += x[k] * x[k];
    float by = 1.0f / sqrtf(sum / size + eps);
    for (k = 0; k < size; k++) out[k] = x[k] * by * weight[k];
}

static void turned(const float *x, const float *cos, const float *sin, float *out, int64_t dim) {
    int64_t half = dim / 2;
    for (int64_t d = 0; d < half; d++) {
        float first = x[d], second = x[d + half];
        out[d] = first * cos[d] - second * sin[d];
        out[d + half] = second * cos[d + half] + first * sin[d + half];
    }
}

// one row's q/k/v: norms, rotation, keys and values into the cache
static void place(const Forward *f, int64_t layer, int64_t row, float *qkv) {
    const Layer *l = f->layer + layer;
    const float *cos = f->cos + row * f->dim, *sin = f->sin + row * f->dim;
    float plain[f->dim];
    for (int64_t head = 0; head < f->heads + f->kv_heads; head++) {
        int64_t key = head - f->heads;
        float *x = qkv + head * f->dim, *to = x;
        const float *norm = key < 0 ? l->q_norm : l->k_norm;
        if (key >= 0) to = f->keys[layer] + (key * f->capacity[layer] + f->past + row) * f->dim;
        if (norm) normed(x, norm, plain, f->dim, f->eps);
        else memcpy(plain, x, sizeof plain);
        turned(plain, cos, sin, to, f->dim);
    }
    for (int64_t head = 0; head < f->kv_heads; head++) {
        float *to = f->values[layer] + (head * f->capacity[layer] + f->past + row) * f->dim;
        memcpy(to, qkv + (f->heads + f->kv_heads + head) * f->dim, f->dim * sizeof(float));
    }
}

typedef struct {
    float *queries, *scores; // of one block: [dim][LANES * 8], [keys][LANES * 8]
    int64_t free;            // leading keys that all rows see
} Attention;

// queries of one KV head as lanes: N vectors of them, K keys (or value columns) at a time
INLINE void attend(const Forward *f, const Attention *a, int64_t layer, int64_t kv, int64_t lane, int64_t lanes, const float *qkv,
                   float *out, const int N, const int K) {
    const int64_t dim = f->dim, group = f->heads / f->kv_heads, width = (f->heads + 2 * f->kv_heads) * dim;
    const float *keys = f->keys[layer] + kv * f->capacity[layer] * dim;
    const float *values = f->values[layer] + kv * f->capacity[layer] * dim;
    const int64_t all = f->past + f->rows, last = (lane + lanes - 1) / group;
    const int64_t seen = f->mask ? all : f->past + last + 1;
    v8 *q = (v8 *)a->queries, *s = (v8 *)a->scores;
    memset(q, 0, dim * N * sizeof(v8));
    for (int64_t i = 0; i < lanes; i++) {
        const float *from = qkv + (lane + i) / group * width + (kv * group + (lane + i) % group) * dim;
        for (int64_t d = 0; d < dim; d++) a->queries[d * N * 8 + i] = from[d] * f->scale;
    }
    v8 top[LANES];
    UNROLL for (int n = 0; n < N; n++) top[n] = (v8){0} + HIDDEN_FROM_ALL;
    for (int64_t j = 0; j < seen; j += K) {
        v8 sum[14];
        const float *key[8];
        UNROLL for (int k = 0; k < K; k++) {
            key[k] = keys + (j + k < seen ? j + k : seen - 1) * dim;
            UNROLL for (int n = 0; n < N; n++) sum[k * N + n] = (v8){0};
        }
        for (int64_t d = 0; d < dim; d++)
            UNROLL for (int k = 0; k < K; k++)
                UNROLL for (int n = 0; n < N; n++) sum[k * N + n] += q[d * N + n] * key[k][d];
        for (int k = 0; k < K && j + k < seen; k++) {
            float *row = a->scores + (j + k) * N * 8;
            UNROLL for (int n = 0; n < N; n++) s[(j + k) * N + n] = sum[k * N + n];
            if (j + k >= a->free)
                for (int64_t i = 0; i < lanes; i++) {
                    int64_t r = (lane + i) / group;
                    if (f->mask) row[i] += f->mask[r * all + j + k];
                    else if (j + k > f->past + r) row[i] = HIDDEN_FROM_ALL;
                }
            UNROLL for (int n = 0; n < N; n++) top[n] = larger(top[n], s[(j + k) * N + n]);
        }
    }
    v8 total[LANES];
    UNROLL for (int n = 0; n < N; n++) total[n] = (v8){0};
    for (int64_t j = 0; j < seen; j++)
        UNROLL for (int n = 0; n < N; n++) total[n] += s[j * N + n] = exp8(s[j * N + n] - top[n]);
    for (int64_t d = 0; d < dim; d += K) {
        v8 sum[14];
        UNROLL for (int i = 0; i < K * N; i++) sum[i] = (v8){0};
        for (int64_t j = 0; j < seen; j++)
            UNROLL for (int k = 0; k < K; k++)
                UNROLL for (int n = 0; n < N; n++) sum[k * N + n] += s[j * N + n] * values[j * dim + d + k];
        UNROLL for (int n = 0; n < N; n++)
            UNROLL for (int k = 0; k < K; k++) q[(d + k) * N + n] = sum[k * N + n] / total[n];
    }
    for (int64_t i = 0; i < lanes; i++) {
        float *to = out + (lane + i) / group * f->heads * dim + (kv * group + (lane + i) % group) * dim;
        for (int64_t d = 0; d < dim; d++) to[d] = a->queries[d * N * 8 + i];
    }
}

static void attention(const Forward *f, const Attention *a, int64_t layer, const float *qkv, float *out, int threads,
                      atomic_long *next) {
    int64_t lanes = f->rows * (f->heads / f->kv_heads), vectors = (lanes + 7) / 8;
    int64_t blocks = (vectors + LANES - 1) / LANES, wanted = (2 * threads + f->kv_heads - 1) / f->kv_heads;
    if (blocks < wanted) blocks = wanted < vectors ? wanted : vectors;
    int64_t each = (vectors + blocks - 1) / blocks;
    blocks = (vectors + each - 1) / each;
    for (int64_t task; (task = atomic_fetch_add(next, 1)) < f->kv_heads * blocks;) {
        int64_t kv = task / blocks, lane = task % blocks * each * 8;
        int64_t here = lanes - lane < each * 8 ? lanes - lane : each * 8;
#define CASE(N, K) case N: attend(f, a, layer, kv, lane, here, qkv, out, N, K); break;
        switch ((here + 7) / 8) { CASE(1, 8) CASE(2, 4) CASE(3, 4) CASE(4, 2) CASE(5, 2) CASE(6, 2) CASE(7, 2) }
#undef CASE
    }
}

static int64_t seen_by_all(const Forward *f) {
    if (!f->mask) return f->past + 1;
    int64_t all = f->past + f->rows, free = all;
    for (int64_t r = 0; r < f->rows; r++)
        for (int64_t j = 0; j < free; j++)
            if (f->mask[r * all + j] != 0) free = j;
    return free;
}

typedef struct {
    float *normed, *qkv, *attended, *gated; // [rows, ...]
    atomic_long *next;                      // a counter per layer and phase
    Barrier barrier;
} Shared;

static void norm_rows(const Forward *f, const float *weight, float *out, atomic_long *next) {
    for (int64_t r; (r = atomic_fetch_add(next, 1)) < f->rows;)
        normed(f->x + r * f->hidden, weight, out + r * f->hidden, f->hidden, f->eps);
}

static void run_layer(const Forward *f, Shared *s, Attention *a, int64_t i) {
    const Layer *l = f->layer + i;
    const int threads = s->barrier.threads;
    atomic_long *next = s->next + i * PHASES;
    norm_rows(f, l->norm1, s->normed, next + 0);
    meet(&s->barrier);
    product(&l->qkv, s->normed, f->rows, s->qkv, STORE, threads, next + 1);
    meet(&s->barrier);
    for (int64_t r; (r = atomic_fetch_add(next + 2, 1)) < f->rows;) place(f, i, r, s->qkv + r * l->qkv.out);
    meet(&s->barrier);
    attention(f, a, i, s->qkv, s->attended, threads, next + 3);
    meet(&s->barrier);
    product(&l->out, s->attended, f->rows, f->x, ADD, threads, next + 4);
    meet(&s->barrier);
    norm_rows(f, l->norm2, s->normed, next + 5);
    meet(&s->barrier);
    product(&l->gate_up, s->normed, f->rows, s->gated, GATED, threads, next + 6);
    meet(&s->barrier);
    product(&l->down, s->gated, f->rows, f->x, ADD, threads, next + 7);
    meet(&s->barrier);
}

static float *floats(int64_t count) { return aligned_alloc(64, (count * sizeof(float) + 127) / 64 * 64); }

// 0, or 1 if memory ran out (nothing is written then but part of x and of the cache's new rows)
int treespec_forward(const Forward *f) {
    const Layer *l = f->layer;
    Shared s = {.normed = floats(f->rows * f->hidden), .qkv = floats(f->rows * l->qkv.out)};
    s.attended = floats(f->rows * f->heads * f->dim), s.gated = floats(f->rows * l->down.in);
    s.next = calloc(f->layers * PHASES + 1, sizeof(atomic_long));
    int64_t free_keys = seen_by_all(f);
    int failed = !(s.normed && s.qkv && s.attended && s.gated && s.next);
    if (!failed) {
#pragma omp parallel num_threads((int)f->threads)
        {
#pragma omp single
            s.barrier.threads = omp_get_num_threads();
            Attention a = {floats(f->dim * LANES * 8), floats((f->past + f->rows) * LANES * 8), free_keys};
            if (!(a.queries && a.scores)) {
#pragma omp atomic write
                failed = 1;
            }
#pragma omp barrier
            if (!failed) {
                for (int64_t i = 0; i < f->layers; i++) run_layer(f, &s, &a, i);
                if (f->norm) norm_rows(f, f->norm, f->x, s.next + f->layers * PHASES);
            }
            free(a.queries), free(a.scores);
        }
    }
    free(s.normed), free(s.qkv), free(s.attended), free(s.gated), free(s.next);
    return failed;
}

// out [rows, p->out] = x [rows, p->in] @ W.T (+ bias), or += if add
void treespec_product(const Product *p, const float *x, int64_t rows, float *out, int64_t add, int64_t threads) {
    atomic_long next = 0;
#pragma omp parallel num_threads((int)threads)
    product(p, x, rows, out, add ? ADD : STORE, omp_get_num_threads(), &next);
}

INLINE int64_t insert(float *best, int64_t *at, int64_t count, int64_t k, float value, int64_t index) {
    int64_t i = count < k ? count : k - 1;
    for (; i > 0 && best[i - 1] < value; i--) best[i] = best[i - 1], at[i] = at[i - 1];
    best[i] = value, at[i] = index; // behind its equals: the lower index comes first
    return count < k ? count + 1 : k;
}

static void best_of(const float *x, int64_t size, int64_t k, float *best, int64_t *at) {
    int64_t count = 0, i = 0;
    for (; i < k; i++) count = insert(best, at, count, k, x[i], i);
    for (; i + 8 <= size; i += 8) {
        i8 more = (i8)(*(const v8 *)(x + i) > (v8){0} + best[k - 1]);
        int any = 0;
        for (int j = 0; j < 8; j++) any |= more[j];
        if (any)
            for (int64_t j = i; j < i + 8; j++)
                if (x[j] > best[k - 1]) insert(best, at, k, k, x[j], j);
    }
    for (; i < size; i++)
        if (x[i] > best[k - 1]) insert(best, at, k, k, x[i], i);
}

// Of every row of logits [rows, size]: the k <= size largest, best first (token, logp [rows, k]), and the entropy in nats
// [rows]. A row that is -inf throughout, or holds NaN or inf, has no children and infinite entropy.
void treespec_propose(const float *logits, int64_t rows, int64_t size, int64_t k, int64_t *token, float *logp, float *entropy,
                      int64_t threads) {
#pragma omp parallel for num_threads((int)threads) if (rows * size > 100000)
    for (int64_t r = 0; r < rows; r++) {
        const float *x = logits + r * size;
        float *best = logp + r * k;
        best_of(x, size, k, best, token + r * k);
        float top = best[0];
        v8 sums = {0}, spreads = {0};
        i8 odd = {0};
        int64_t i = 0;
        for (; i + 8 <= size; i += 8) {
            v8 here = *(const v8 *)(x + i), below = larger(here - top, (v8){0} - 80.0f), share = exp8(below);
            odd |= (i8)(here != here);
            sums += share;
            spreads += share * below;
        }
        double sum = 0, spread = 0;
        int broken = !(top > -INFINITY && top < INFINITY);
        for (int j = 0; j < 8; j++) sum += sums[j], spread += spreads[j], broken |= odd[j];
        for (; i < size; i++) {
            float below = fmaxf(x[i] - top, -80.0f), share = expf(below);
            sum += share, spread += share * below, broken |= x[i] != x[i];
        }
        if (broken) {
            for (i = 0; i < k; i++) best[i] = -INFINITY;
            entropy[r] = INFINITY;
            continue;
        }
        float log_sum = (float)log(sum);
        for (i = 0; i < k; i++) best[i] -= top + log_sum;
        entropy[r] = fmaxf(log_sum - (float)(spread / sum), 0.0f);
    }
}
