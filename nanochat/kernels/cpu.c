/* CPU kernels in fp32: what PyTorch runs as many passes over memory, in one. cpu.py compiles and calls them and has their PyTorch twins.
 *
 * Vectors of 16 floats are GCC's and Clang's; they become whatever the machine has. Shapes are named as in attention.py; D is a multiple
 * of 16. "Strides" count floats. Nothing is read or written in an order that depends on the number of threads.
 */
#include <math.h>
#include <stdlib.h>

#define L 16     /* floats in a vector */
#define BLOCK 32 /* queries whose scores are held at a time */

typedef float vec __attribute__((vector_size(64)));
typedef float loose __attribute__((vector_size(64), aligned(4), may_alias));
typedef int ivec __attribute__((vector_size(64)));

static inline vec load(const float *p) { return *(const loose *)p; }
static inline void store(float *p, vec x) { *(loose *)p = x; }
static inline vec splat(float x) { return x - (vec){0}; }
static inline vec choose(ivec mask, vec a, vec b) { return (vec)(((ivec)a & mask) | ((ivec)b & ~mask)); }
static inline vec larger(vec a, vec b) { return choose(a > b, a, b); }
static inline long up(long n) { return (n + L - 1) / L * L; }
static float *floats(long n) { return aligned_alloc(64, (size_t)up(n + 1) * sizeof(float)); }

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif
#define EVEN(a, b) SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODD(a, b) SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
#define ZIP_LOW(a, b) SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define ZIP_HIGH(a, b) SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)

static float sum(vec x)
{
    float s = 0;
    for (int i = 0; i < L; i++)
        s += x[i];
    return s;
}

static float maximum(vec x)
{
    float m = x[0];
    for (int i = 1; i < L; i++)
        m = x[i] > m ? x[i] : m;
    return m;
}

/* e^x to 2 units in the last place; 0 below -87, NaN of NaN. x = n ln 2 + f, |f| <= ln 2 / 2, and a polynomial for e^f. */
static inline vec exponential(vec x)
{
    const vec least = splat(-87.0f), round = splat(12582912.0f); /* adding 1.5 * 2^23 rounds to an integer */
    vec safe = choose(x < least, least, x);
    vec n = safe * 1.44269504f + round - round;
    vec f = safe - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    vec power = (vec)((__builtin_convertvector(n, ivec) + 127) << 23);
    return choose(x < least, (vec){0}, p * power);
}

/* A tile of a product: `rows` x `vecs` vectors of c, plus or equal to a @ b over k; a is read at a[i * ra + p * ca]. */
static inline __attribute__((always_inline)) void tile(const int rows, const int vecs, float *c, long ldc, const float *a, const long ra,
                                                       const long ca, const float *b, long ldb, long k, int add)
{
    vec acc[8][2];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vecs; j++)
            acc[i][j] = add ? load(c + i * ldc + j * L) : (vec){0};
    for (long p = 0; p < k; p++) {
        vec b0 = load(b + p * ldb), b1 = vecs == 2 ? load(b + p * ldb + L) : (vec){0};
        for (int i = 0; i < rows; i++) {
            vec x = splat(a[i * ra + p * ca]);
            acc[i][0] += x * b0;
            if (vecs == 2)
                acc[i][1] += x * b1;
        }
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vecs; j++)
            store(c + i * ldc + j * L, acc[i][j]);
}

static inline __attribute__((always_inline)) void columns(const int vecs, float *c, long ldc, const float *a, const long ra, const long ca,
                                                          const float *b, long ldb, long m, long k, int add)
{
    long i = 0;
    for (; i + 8 <= m; i += 8)
        tile(8, vecs, c + i * ldc, ldc, a + i * ra, ra, ca, b, ldb, k, add);
    for (; i + 2 <= m; i += 2)
        tile(2, vecs, c + i * ldc, ldc, a + i * ra, ra, ca, b, ldb, k, add);
    for (; i < m; i++)
        tile(1, vecs, c + i * ldc, ldc, a + i * ra, ra, ca, b, ldb, k, add);
}

/* c (m, n) = or += a (m, k) @ b (k, n), n a multiple of 16. */
static void product(float *c, long ldc, const float *a, long lda, const float *b, long ldb, long m, long n, long k, int add)
{
    for (long j = 0; j < n; j += 2 * L)
        if (n - j > L)
            columns(2, c + j, ldc, a, lda, 1, b + j, ldb, m, k, add);
        else
            columns(1, c + j, ldc, a, lda, 1, b + j, ldb, m, k, add);
}

/* c (m, n) += a^T @ b, a (k, m). */
static void product_t(float *c, long ldc, const float *a, long lda, const float *b, long ldb, long m, long n, long k)
{
    for (long j = 0; j < n; j += 2 * L)
        if (n - j > L)
            columns(2, c + j, ldc, a, 1, lda, b + j, ldb, m, k, 1);
        else
            columns(1, c + j, ldc, a, 1, lda, b + j, ldb, m, k, 1);
}

static inline void zip(vec *y, const vec *x)
{
    for (int i = 0; i < L / 2; i++) {
        y[2 * i] = ZIP_LOW(x[i], x[i + L / 2]);
        y[2 * i + 1] = ZIP_HIGH(x[i], x[i + L / 2]);
    }
}

/* out (D, up(n)) = scale * x^T, x (n, D) of row stride `stride`; columns from n on are 0. Zipping 16 vectors four times transposes them. */
static void transpose(float *out, const float *x, long stride, long n, long D, float scale)
{
    for (long j = 0; j < n; j += L)
        for (long d = 0; d < D; d += L) {
            vec a[L], b[L];
            for (int i = 0; i < L; i++)
                a[i] = j + i < n ? load(x + (j + i) * stride + d) * scale : (vec){0};
            zip(b, a), zip(a, b), zip(b, a), zip(a, b);
            for (int i = 0; i < L; i++)
                store(out + (d + i) * up(n) + j, a[i]);
        }
}

/* The tensors of an attention: _Spec of attention.py. */
typedef struct {
    const float *q, *k, *v, *prefix_k, *prefix_v, *own_bias, *prefix_bias;
    const float *recent_k, *recent_v; /* decoding: more own keys and values, that follow the others */
    long U, H, R, G, T, Tk, Tp, D;
    long prefix_bias_rows;  /* 1, or T */
    long recent;            /* keys there */
    long q_strides[5];      /* u, h, r, g, t: of q and of what lies like it */
    long k_strides[4];      /* u, h, r, t: of own keys and values */
    long recent_strides[4]; /* the same */
} Attention;

static inline long at_query(const Attention *s, long u, long h, long r, long g, long t)
{
    const long *x = s->q_strides;
    return u * x[0] + h * x[1] + r * x[2] + g * x[3] + t * x[4];
}

static inline long at_key(const long *strides, long u, long h, long r)
{
    return u * strides[0] + h * strides[1] + r * strides[2];
}

/* Scores (m, up(Tp) + up(seen)) of the queries from t on: prefix, padding, own keys, padding; -inf where a query may not look. */
static void block_scores(const Attention *s, float *scores, long ld, const float *q, long u, long t, long m, const float *prefix_kt, const float *kt)
{
    long Tp = s->Tp, Tpp = up(Tp), before = s->Tk - s->T, seen = before + t + m;
    if (Tp)
        product(scores, ld, q, s->q_strides[4], prefix_kt, Tpp, m, Tpp, s->D, 0);
    product(scores + Tpp, ld, q, s->q_strides[4], kt, up(s->Tk), m, up(seen), s->D, 0);
    for (long i = 0; i < m; i++) {
        float *row = scores + i * ld, *own = row + Tpp;
        if (Tp && s->prefix_bias) {
            const float *bias = s->prefix_bias + (u * s->prefix_bias_rows + (s->prefix_bias_rows > 1 ? t + i : 0)) * Tp;
            for (long j = 0; j < Tp; j++)
                row[j] += bias[j];
        }
        for (long j = Tp; j < Tpp; j++)
            row[j] = -INFINITY;
        if (s->own_bias)
            for (long j = 0; j < seen; j++)
                own[j] += s->own_bias[(t + i) * s->Tk + j];
        for (long j = before + t + i + 1; j < up(seen); j++)
            own[j] = -INFINITY;
    }
}

/* Replaces scores by exp(score - the highest). Returns their sum; highest: where the highest goes. */
static inline float softmax(float *scores, long width, float *highest)
{
    vec best = load(scores), total = {0};
    for (long j = L; j < width; j += L)
        best = larger(load(scores + j), best);
    *highest = maximum(best);
    for (long j = 0; j < width; j += L) {
        vec p = exponential(load(scores + j) - *highest);
        store(scores + j, p);
        total += p;
    }
    return sum(total);
}

/* y = softmax(q k^T / sqrt(D) + bias) v; lse (U, H, R, G, T): the logarithm of the softmax' denominator. */
void attend_forward(const Attention *s, float *y, float *lse, long threads)
{
    long R = s->R, G = s->G, T = s->T, D = s->D, Tp = s->Tp, Tpp = up(Tp), Tkp = up(s->Tk), ld = Tpp + Tkp, stride = s->k_strides[3];
    float scale = 1 / sqrtf(D);
#pragma omp parallel num_threads(threads)
    {
        float *prefix_kt = floats(D * Tpp), *kt = floats(D * Tkp), *scores = floats(BLOCK * ld);
#pragma omp for schedule(dynamic)
        for (long unit = 0; unit < s->U * s->H; unit++) {
            long u = unit / s->H, h = unit % s->H;
            transpose(prefix_kt, s->prefix_k + unit * Tp * D, D, Tp, D, scale);
            for (long r = 0; r < R; r++) {
                const float *v = s->v + at_key(s->k_strides, u, h, r);
                transpose(kt, s->k + at_key(s->k_strides, u, h, r), stride, s->Tk, D, scale);
                for (long g = 0; g < G; g++)
                    for (long t = 0; t < T; t += BLOCK) {
                        long m = T - t < BLOCK ? T - t : BLOCK, seen = s->Tk - T + t + m, width = Tpp + up(seen), at = at_query(s, u, h, r, g, t);
                        float inverse[BLOCK];
                        block_scores(s, scores, ld, s->q + at, u, t, m, prefix_kt, kt);
                        for (long i = 0; i < m; i++) {
                            float highest, total = softmax(scores + i * ld, width, &highest);
                            inverse[i] = 1 / total;
                            lse[((unit * R + r) * G + g) * T + t + i] = highest + logf(total);
                        }
                        if (Tp)
                            product(y + at, s->q_strides[4], scores, ld, s->prefix_v + unit * Tp * D, D, m, D, Tp, 0);
                        product(y + at, s->q_strides[4], scores + Tpp, ld, v, stride, m, D, seen, Tp > 0);
                        for (long i = 0; i < m; i++)
                            for (long d = 0; d < D; d++)
                                y[at + i * s->q_strides[4] + d] *= inverse[i];
                    }
            }
        }
        free(prefix_kt), free(kt), free(scores);
    }
}

/* The gradients, from grad and y (lying like q); grad_q lies like q, the others must be 0: grad_k, grad_v (U, H, R, Tk, D), of the prefix (U, H, Tp, D). */
void attend_backward(const Attention *s, const float *y, const float *lse, const float *grad, float *grad_q, float *grad_k, float *grad_v,
                     float *grad_prefix_k, float *grad_prefix_v, long threads)
{
    long R = s->R, G = s->G, T = s->T, D = s->D, Tp = s->Tp, Tpp = up(Tp), Tkp = up(s->Tk), ld = Tpp + Tkp, row = s->q_strides[4], stride = s->k_strides[3];
    float scale = 1 / sqrtf(D);
#pragma omp parallel num_threads(threads)
    {
        float *prefix_kt = floats(D * Tpp), *prefix_vt = floats(D * Tpp), *kt = floats(D * Tkp), *vt = floats(D * Tkp);
        float *probs = floats(BLOCK * ld), *ds = floats(BLOCK * ld);
#pragma omp for schedule(dynamic)
        for (long unit = 0; unit < s->U * s->H; unit++) {
            long u = unit / s->H, h = unit % s->H, before = s->Tk - T;
            const float *prefix_k = s->prefix_k + unit * Tp * D;
            transpose(prefix_kt, prefix_k, D, Tp, D, scale);
            transpose(prefix_vt, s->prefix_v + unit * Tp * D, D, Tp, D, 1);
            for (long r = 0; r < R; r++) {
                const float *k = s->k + at_key(s->k_strides, u, h, r);
                float *gk = grad_k + (unit * R + r) * s->Tk * D, *gv = grad_v + (unit * R + r) * s->Tk * D;
                transpose(kt, k, stride, s->Tk, D, scale);
                transpose(vt, s->v + at_key(s->k_strides, u, h, r), stride, s->Tk, D, 1);
                for (long g = 0; g < G; g++)
                    for (long t = 0; t < T; t += BLOCK) {
                        long m = T - t < BLOCK ? T - t : BLOCK, seen = before + t + m, at = at_query(s, u, h, r, g, t);
                        block_scores(s, probs, ld, s->q + at, u, t, m, prefix_kt, kt);
                        if (Tp)
                            product(ds, ld, grad + at, row, prefix_vt, Tpp, m, Tpp, D, 0);
                        product(ds + Tpp, ld, grad + at, row, vt, Tkp, m, up(seen), D, 0);
                        for (long i = 0; i < m; i++) {
                            vec delta = {0};
                            for (long d = 0; d < D; d += L)
                                delta += load(grad + at + i * row + d) * load(y + at + i * row + d);
                            float mean = sum(delta), log_total = lse[((unit * R + r) * G + g) * T + t + i];
                            for (long j = i * ld; j < i * ld + Tpp + up(seen); j += L) {
                                vec p = exponential(load(probs + j) - log_total);
                                store(probs + j, p);
                                store(ds + j, p * (load(ds + j) - mean) * scale);
                            }
                        }
                        if (Tp) {
                            product(grad_q + at, row, ds, ld, prefix_k, D, m, D, Tp, 0);
                            product_t(grad_prefix_k + unit * Tp * D, D, ds, ld, s->q + at, row, Tp, D, m);
                            product_t(grad_prefix_v + unit * Tp * D, D, probs, ld, grad + at, row, Tp, D, m);
                        }
                        product(grad_q + at, row, ds + Tpp, ld, k, stride, m, D, seen, Tp > 0);
                        product_t(gk, D, ds + Tpp, ld, s->q + at, row, seen, D, m);
                        product_t(gv, D, probs + Tpp, ld, grad + at, row, seen, D, m);
                    }
            }
        }
        free(prefix_kt), free(prefix_vt), free(kt), free(vt), free(probs), free(ds);
    }
}

/* The sums of 16 vectors, as one vector: pairs are folded into one, four times over. */
static inline __attribute__((always_inline)) vec sums(vec x[L])
{
    for (int i = 0; i < 8; i++)
        x[i] = EVEN(x[2 * i], x[2 * i + 1]) + ODD(x[2 * i], x[2 * i + 1]);
    for (int i = 0; i < 4; i++)
        x[i] = EVEN(x[2 * i], x[2 * i + 1]) + ODD(x[2 * i], x[2 * i + 1]);
    for (int i = 0; i < 2; i++)
        x[i] = EVEN(x[2 * i], x[2 * i + 1]) + ODD(x[2 * i], x[2 * i + 1]);
    return EVEN(x[0], x[1]) + ODD(x[0], x[1]);
}

/* out[j] = q . k_j for n keys, and -inf up to a multiple of 16. */
static inline __attribute__((always_inline)) void dots_of(const long D, float *out, const float *q, const float *k, long stride, long n)
{
    for (long j = 0; j < n; j += L) {
        vec x[L];
        for (int i = 0; i < L; i++) {
            const float *key = k + (j + i < n ? j + i : n - 1) * stride;
            x[i] = load(q) * load(key);
            for (long d = L; d < D; d += L)
                x[i] += load(q + d) * load(key + d);
        }
        store(out + j, sums(x));
    }
    for (long j = n; j < up(n); j++)
        out[j] = -INFINITY;
}

static void dots(float *out, const float *q, const float *k, long stride, long n, long D)
{
    switch (D) {
    case 32: dots_of(32, out, q, k, stride, n); break;
    case 64: dots_of(64, out, q, k, stride, n); break;
    case 128: dots_of(128, out, q, k, stride, n); break;
    default: dots_of(D, out, q, k, stride, n);
    }
}

/* y (D) += the sum of p[j] v_j over n values. */
static void add_values(float *y, const float *p, const float *v, long stride, long n, long D)
{
    for (long d = 0; d < D; d += L) {
        vec acc[4] = {load(y + d)};
        long j = 0;
        for (; j + 4 <= n; j += 4)
            for (int i = 0; i < 4; i++)
                acc[i] += p[j + i] * load(v + (j + i) * stride + d);
        for (; j < n; j++)
            acc[0] += p[j] * load(v + j * stride + d);
        store(y + d, acc[0] + acc[1] + acc[2] + acc[3]);
    }
}

static void add_bias(float *scores, const float *bias, long n)
{
    for (long j = 0; bias && j < n; j++)
        scores[j] += bias[j];
}

static void prefetch(const float *x, long n)
{
    for (long i = 0; i < n; i += L)
        __builtin_prefetch(x + i, 0, 2);
}

/* Decoding: one query per row (T = 1) over the prefix, own keys and the recent ones behind those. All rows of a unit read its prefix together. */
void attend_one(const Attention *s, float *y, long threads)
{
    long D = s->D, Tp = s->Tp, Tk = s->Tk, Tpp = up(Tp), Tkp = up(Tk), recent = s->recent, width = Tpp + Tkp + up(recent), rows = s->R * s->G;
    float scale = 1 / sqrtf(D);
#pragma omp parallel num_threads(threads)
    {
        float *scores = floats(BLOCK * width), *prefix_kt = floats(D * Tpp), *q = floats(BLOCK * D), *out = floats(BLOCK * D);
#pragma omp for schedule(static)
        for (long unit = 0; unit < s->U * s->H; unit++) {
            long u = unit / s->H, h = unit % s->H;
            transpose(prefix_kt, s->prefix_k + unit * Tp * D, D, Tp, D, 1);
            for (long first = 0; first < rows; first += BLOCK) {
                long m = rows - first < BLOCK ? rows - first : BLOCK;
                for (long i = 0; i < m; i++)
                    for (long d = 0; d < D; d++)
                        q[i * D + d] = scale * s->q[at_query(s, u, h, (first + i) / s->G, (first + i) % s->G, 0) + d];
                product(scores, width, q, D, prefix_kt, Tpp, m, Tpp, D, 0);
                for (long i = 0; i < m; i++) {
                    long r = (first + i) / s->G, key = at_key(s->k_strides, u, h, r), late = at_key(s->recent_strides, u, h, r);
                    float *row = scores + i * width, highest;
                    if (i + 1 < m) {
                        long next = (first + i + 1) / s->G;
                        prefetch(s->k + at_key(s->k_strides, u, h, next), Tk * D);
                        prefetch(s->recent_k + at_key(s->recent_strides, u, h, next), recent * D);
                    }
                    prefetch(s->v + key, Tk * D);
                    prefetch(s->recent_v + late, recent * D);
                    dots(row + Tpp, q + i * D, s->k + key, s->k_strides[3], Tk, D);
                    dots(row + Tpp + Tkp, q + i * D, s->recent_k + late, s->recent_strides[3], recent, D);
                    add_bias(row, s->prefix_bias ? s->prefix_bias + u * Tp : NULL, Tp);
                    add_bias(row + Tpp, s->own_bias, Tk);
                    add_bias(row + Tpp + Tkp, s->own_bias ? s->own_bias + Tk : NULL, recent);
                    for (long j = Tp; j < Tpp; j++)
                        row[j] = -INFINITY;
                    float inverse = 1 / softmax(row, width, &highest);
                    for (long j = 0; j < width; j++)
                        row[j] *= inverse;
                }
                product(out, D, scores, width, s->prefix_v + unit * Tp * D, D, m, D, Tp, 0);
                for (long i = 0; i < m; i++) {
                    long r = (first + i) / s->G, at = at_query(s, u, h, r, (first + i) % s->G, 0);
                    float *row = scores + i * width;
                    add_values(out + i * D, row + Tpp, s->v + at_key(s->k_strides, u, h, r), s->k_strides[3], Tk, D);
                    add_values(out + i * D, row + Tpp + Tkp, s->recent_v + at_key(s->recent_strides, u, h, r), s->recent_strides[3], recent, D);
                    for (long d = 0; d < D; d++)
                        y[at + d] = out[i * D + d];
                }
            }
        }
        free(scores), free(prefix_kt), free(q), free(out);
    }
}

/* y = x / rms(x) per row of C floats; with delta, x is first replaced by x + delta in `sum`. inverse (rows): 1 / rms. C is a multiple of 16. */
void norm_forward(const float *x, const float *delta, float *added, float *y, float *inverse, long rows, long C, float epsilon, long threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < rows; i++) {
        const float *row = x + i * C;
        vec squares = {0};
        if (delta) {
            for (long c = 0; c < C; c += L)
                store(added + i * C + c, load(x + i * C + c) + load(delta + i * C + c));
            row = added + i * C;
        }
        for (long c = 0; c < C; c += L)
            squares += load(row + c) * load(row + c);
        inverse[i] = 1 / sqrtf(sum(squares) / C + epsilon);
        for (long c = 0; c < C; c += L)
            store(y + i * C + c, load(row + c) * inverse[i]);
    }
}

/* grad_x of the above from grad (of y); with also_grad (of x + delta) their sum. */
void norm_backward(const float *grad, const float *also_grad, const float *y, const float *inverse, float *grad_x, long rows, long C, long threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < rows; i++) {
        vec products = {0};
        for (long c = i * C; c < (i + 1) * C; c += L)
            products += load(grad + c) * load(y + c);
        float mean = sum(products) / C;
        for (long c = i * C; c < (i + 1) * C; c += L) {
            vec g = (load(grad + c) - load(y + c) * mean) * inverse[i];
            store(grad_x + c, also_grad ? g + load(also_grad + c) : g);
        }
    }
}

/* y = max(x, 0)^2 of n floats, n a multiple of 16; backward: grad_x = 2 max(x, 0) grad. */
void relu_squared_forward(const float *x, float *y, long n, long threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < n; i += L) {
        vec positive = larger(load(x + i), (vec){0});
        store(y + i, positive * positive);
    }
}

void relu_squared_backward(const float *grad, const float *x, float *grad_x, long n, long threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < n; i += L)
        store(grad_x + i, 2 * larger(load(x + i), (vec){0}) * load(grad + i));
}

typedef struct {
    long U, R, T, Hq, Hkv, D; /* D a multiple of 32 */
    float scale, epsilon;
} Heads;

/* One head: out = scale * y / rms(y), y = x rotated by minus the angle. Returns scale / rms. */
static inline float rotate(const Heads *s, float *out, const float *x, const float *cosine, const float *sine)
{
    long half = s->D / 2;
    vec squares = {0};
    for (long d = 0; d < half; d += L) {
        vec a = load(x + d), b = load(x + half + d), c = load(cosine + d), e = load(sine + d), ya = a * c + b * e, yb = b * c - a * e;
        store(out + d, ya), store(out + half + d, yb);
        squares += ya * ya + yb * yb;
    }
    float factor = s->scale / sqrtf(sum(squares) / s->D + s->epsilon);
    for (long d = 0; d < s->D; d += L)
        store(out + d, load(out + d) * factor);
    return factor;
}

static inline void rotate_back(const Heads *s, float *grad_x, const float *grad, const float *out, float factor, const float *cosine, const float *sine)
{
    long half = s->D / 2;
    vec products = {0};
    for (long d = 0; d < s->D; d += L)
        products += load(grad + d) * load(out + d);
    float mean = sum(products) / (s->D * s->scale * s->scale);
    for (long d = 0; d < half; d += L) {
        vec a = (load(grad + d) - load(out + d) * mean) * factor, b = (load(grad + half + d) - load(out + half + d) * mean) * factor;
        vec c = load(cosine + d), e = load(sine + d);
        store(grad_x + d, a * c - b * e), store(grad_x + half + d, b * c + a * e);
    }
}

/* Rows x (U*R*T, (Hq + 2 Hkv) D) -> q (U*R, T, Hq, D) and k (U, Hkv, R, T, D), both rotated and normed, v like k, plus gate * embedding
 * (gate (U*R*T, Hkv), embedding (U*R*T, Hkv * D)) where there is one. cosine, sine (U*R*T, D/2); factors (U*R*T, Hq + Hkv) for the backward pass. */
void split_heads_forward(const Heads *s, const float *x, const float *cosine, const float *sine, const float *gate, const float *embedding,
                         float *q, float *k, float *v, float *factors, long threads)
{
    long D = s->D, Hq = s->Hq, Hkv = s->Hkv, T = s->T, R = s->R;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long n = 0; n < s->U * R * T; n++) {
        long t = n % T, r = n / T % R, u = n / T / R;
        const float *row = x + n * (Hq + 2 * Hkv) * D, *c = cosine + n * D / 2, *e = sine + n * D / 2;
        float *factor = factors + n * (Hq + Hkv);
        for (long h = 0; h < Hq; h++)
            factor[h] = rotate(s, q + (n * Hq + h) * D, row + h * D, c, e);
        for (long h = 0; h < Hkv; h++) {
            long at = (((u * Hkv + h) * R + r) * T + t) * D;
            const float *value = row + (Hq + Hkv + h) * D;
            factor[Hq + h] = rotate(s, k + at, row + (Hq + h) * D, c, e);
            for (long d = 0; d < D; d += L)
                store(v + at + d, gate ? load(value + d) + gate[n * Hkv + h] * load(embedding + (n * Hkv + h) * D + d) : load(value + d));
        }
    }
}

/* The gradients of x, gate and embedding, from those of q, k and v, which lie as these do. */
void split_heads_backward(const Heads *s, const float *grad_q, const float *grad_k, const float *grad_v, const float *q, const float *k,
                          const float *factors, const float *cosine, const float *sine, const float *gate, const float *embedding,
                          float *grad_x, float *grad_gate, float *grad_embedding, long threads)
{
    long D = s->D, Hq = s->Hq, Hkv = s->Hkv, T = s->T, R = s->R;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long n = 0; n < s->U * R * T; n++) {
        long t = n % T, r = n / T % R, u = n / T / R;
        const float *c = cosine + n * D / 2, *e = sine + n * D / 2, *factor = factors + n * (Hq + Hkv);
        float *row = grad_x + n * (Hq + 2 * Hkv) * D;
        for (long h = 0; h < Hq; h++)
            rotate_back(s, row + h * D, grad_q + (n * Hq + h) * D, q + (n * Hq + h) * D, factor[h], c, e);
        for (long h = 0; h < Hkv; h++) {
            long at = (((u * Hkv + h) * R + r) * T + t) * D, own = (n * Hkv + h) * D;
            rotate_back(s, row + (Hq + h) * D, grad_k + at, k + at, factor[Hq + h], c, e);
            vec products = {0};
            for (long d = 0; d < D; d += L) {
                vec g = load(grad_v + at + d);
                store(row + (Hq + Hkv + h) * D + d, g);
                if (gate) {
                    store(grad_embedding + own + d, gate[n * Hkv + h] * g);
                    products += g * load(embedding + own + d);
                }
            }
            if (gate)
                grad_gate[n * Hkv + h] = sum(products);
        }
    }
}
