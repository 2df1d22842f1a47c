/* Attention on CPU in fp32; D is a multiple of 32.
 *
 * Called from attention.py, where its PyTorch twins are and the shapes get their names.
 * "Strides" count floats. The order of sums does not depend on the number of threads.
 */
#include "cpu_product.h"

#define BLOCK 16 /* queries whose scores are held at a time: they stay in the nearest cache */
#define PLACES 32 /* the same in decoding */

/* out (D, up(n)) = scale * x^T, x (n, D) of row stride `stride`; columns from n on are 0.
 * soon: what lies like x and is read next, or NULL. */
static void transpose(float *out, const float *x, long stride, long n, long D, float scale, const float *soon)
{
    for (long j = 0; j < n; j += L) {
        if (soon)
            prefetch(soon + j * stride, L * D);
        for (long d = 0; d < D; d += L)
            transpose_tile(out + d * up(n) + j, up(n), x + j * stride + d, stride, n - j, scale);
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

/* bias NULL: nothing. Vectors of what was written as vectors: scalars in between would wait for each other. */
static inline void add_bias(float *scores, const float *bias, long n)
{
    long j = 0;
    for (; bias && j + L <= n; j += L)
        store(scores + j, load(scores + j) + load(bias + j));
    for (; bias && j < n; j++)
        scores[j] += bias[j];
}

/* Scores (m, up(Tp) + up(seen)) of the queries from t on: prefix, padding, own keys, padding;
 * -inf where a query may not look. */
static void block_scores(const Attention *s, float *scores, long ld, const float *q, long u, long t, long m,
                         const float *prefix_kt, const float *kt)
{
    long Tp = s->Tp, Tpp = up(Tp), before = s->Tk - s->T, seen = before + t + m;
    if (Tp)
        product(scores, ld, q, s->q_strides[4], prefix_kt, Tpp, m, Tpp, s->D, 0);
    product(scores + Tpp, ld, q, s->q_strides[4], kt, up(s->Tk), m, up(seen), s->D, 0);
    for (long i = 0; i < m; i++) {
        float *row = scores + i * ld, *own = row + Tpp;
        if (s->prefix_bias)
            add_bias(row, s->prefix_bias + (u * s->prefix_bias_rows + (s->prefix_bias_rows > 1 ? t + i : 0)) * Tp, Tp);
        for (long j = Tp; j < Tpp; j++)
            row[j] = -INFINITY;
        if (s->own_bias)
            add_bias(own, s->own_bias + (t + i) * s->Tk, seen);
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
    long R = s->R, G = s->G, T = s->T, D = s->D, Tp = s->Tp;
    long Tpp = up(Tp), Tkp = up(s->Tk), ld = Tpp + Tkp, stride = s->k_strides[3];
    float scale = 1 / sqrtf(D);
#pragma omp parallel num_threads(threads)
    {
        float *prefix_kt = floats(D * Tpp), *kt = floats(D * Tkp), *scores = floats(BLOCK * ld);
#pragma omp for schedule(dynamic)
        for (long unit = 0; unit < s->U * s->H; unit++) {
            long u = unit / s->H, h = unit % s->H;
            transpose(prefix_kt, s->prefix_k + unit * Tp * D, D, Tp, D, scale, NULL);
            for (long r = 0; r < R; r++) {
                const float *v = s->v + at_key(s->k_strides, u, h, r);
                transpose(kt, s->k + at_key(s->k_strides, u, h, r), stride, s->Tk, D, scale, NULL);
                for (long g = 0; g < G; g++)
                    for (long t = 0; t < T; t += BLOCK) {
                        long m = T - t < BLOCK ? T - t : BLOCK, seen = s->Tk - T + t + m;
                        long width = Tpp + up(seen), at = at_query(s, u, h, r, g, t);
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

/* The gradients, from grad and y (lying like q). grad_q lies like q; grad_k, grad_v (U, H, R, Tk, D); those of the
 * prefix (U, H, Tp, D). The last queries come first, since they see all keys: they write what others add to. */
void attend_backward(const Attention *s, const float *y, const float *lse, const float *grad, float *grad_q,
                     float *grad_k, float *grad_v, float *grad_prefix_k, float *grad_prefix_v, long threads)
{
    long R = s->R, G = s->G, T = s->T, D = s->D, Tp = s->Tp;
    long Tpp = up(Tp), Tkp = up(s->Tk), ld = Tpp + Tkp, row = s->q_strides[4], stride = s->k_strides[3];
    float scale = 1 / sqrtf(D);
#pragma omp parallel num_threads(threads)
    {
        float *prefix_kt = floats(D * Tpp), *prefix_vt = floats(D * Tpp), *kt = floats(D * Tkp), *vt = floats(D * Tkp);
        float *probs = floats(BLOCK * ld), *ds = floats(BLOCK * ld);
#pragma omp for schedule(dynamic)
        for (long unit = 0; unit < s->U * s->H; unit++) {
            long u = unit / s->H, h = unit % s->H, before = s->Tk - T;
            const float *prefix_k = s->prefix_k + unit * Tp * D;
            transpose(prefix_kt, prefix_k, D, Tp, D, scale, NULL);
            transpose(prefix_vt, s->prefix_v + unit * Tp * D, D, Tp, D, 1, NULL);
            for (long r = 0; r < R; r++) {
                const float *k = s->k + at_key(s->k_strides, u, h, r);
                float *gk = grad_k + (unit * R + r) * s->Tk * D, *gv = grad_v + (unit * R + r) * s->Tk * D;
                transpose(kt, k, stride, s->Tk, D, scale, NULL);
                transpose(vt, s->v + at_key(s->k_strides, u, h, r), stride, s->Tk, D, 1, NULL);
                for (long g = 0; g < G; g++)
                    for (long t = (T - 1) / BLOCK * BLOCK; t >= 0; t -= BLOCK) {
                        long m = T - t < BLOCK ? T - t : BLOCK, seen = before + t + m, at = at_query(s, u, h, r, g, t);
                        int more = g || t + BLOCK < T;
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
                            product_t(grad_prefix_k + unit * Tp * D, D, ds, ld, s->q + at, row, Tp, D, m, r || more);
                            product_t(grad_prefix_v + unit * Tp * D, D, probs, ld, grad + at, row, Tp, D, m, r || more);
                        }
                        product(grad_q + at, row, ds + Tpp, ld, k, stride, m, D, seen, Tp > 0);
                        product_t(gk, D, ds + Tpp, ld, s->q + at, row, seen, D, m, more);
                        product_t(gv, D, probs + Tpp, ld, grad + at, row, seen, D, m, more);
                    }
            }
        }
        free(prefix_kt), free(prefix_vt), free(kt), free(vt), free(probs), free(ds);
    }
}

/* The sums of L vectors, as one vector: pairs are folded into one, again and again. */
static inline __attribute__((always_inline)) vec sums(vec x[L])
{
    for (int n = L / 2; n; n /= 2)
        for (int i = 0; i < n; i++)
            x[i] = EVEN(x[2 * i], x[2 * i + 1]) + ODD(x[2 * i], x[2 * i + 1]);
    return x[0];
}

/* out[j] = q . k_j for n keys, and -inf up to a multiple of L. */
static inline __attribute__((always_inline)) void dots_of(const long D, float *out, const float *q,
                                                          const float *k, long stride, long n,
                                                          const float *soon, const float *later)
{
    for (long j = 0; j < n; j += L) {
        vec x[L];
        prefetch(soon + j * stride, L * D);
        prefetch(later + j * stride, L * D);
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

static void dots(float *out, const float *q, const float *k, long stride, long n, long D,
                 const float *soon, const float *later)
{
    switch (D) {
    case 32: dots_of(32, out, q, k, stride, n, soon, later); break;
    case 64: dots_of(64, out, q, k, stride, n, soon, later); break;
    case 128: dots_of(128, out, q, k, stride, n, soon, later); break;
    default: dots_of(D, out, q, k, stride, n, soon, later);
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

/* Decoding: one query per row (T = 1) over the prefix, own keys and the recent ones behind those.
 * All rows of a unit read its prefix together. */
void attend_one(const Attention *s, float *y, long threads)
{
    long D = s->D, Tp = s->Tp, Tk = s->Tk, Tpp = up(Tp), Tkp = up(Tk);
    long recent = s->recent, width = Tpp + Tkp + up(recent), rows = s->R * s->G;
    float scale = 1 / sqrtf(D);
#pragma omp parallel num_threads(threads)
    {
        float *scores = floats(PLACES * width), *prefix_kt = floats(D * Tpp);
        float *q = floats(PLACES * D), *out = floats(PLACES * D);
#pragma omp for schedule(static)
        for (long unit = 0; unit < s->U * s->H; unit++) {
            long u = unit / s->H, h = unit % s->H;
            transpose(prefix_kt, s->prefix_k + unit * Tp * D, D, Tp, D, 1, s->prefix_v + unit * Tp * D);
            for (long first = 0; first < rows; first += PLACES) {
                long m = rows - first < PLACES ? rows - first : PLACES;
                float inverse[PLACES];
                for (long i = 0; i < m; i++)
                    for (long d = 0; d < D; d++)
                        q[i * D + d] = scale * s->q[at_query(s, u, h, (first + i) / s->G, (first + i) % s->G, 0) + d];
                product(scores, width, q, D, prefix_kt, Tpp, m, Tpp, D, 0);
                for (long i = 0; i < m; i++) {
                    long r = (first + i) / s->G;
                    long key = at_key(s->k_strides, u, h, r), late = at_key(s->recent_strides, u, h, r);
                    float *row = scores + i * width, highest;
                    long next = i + 1 < m ? (first + i + 1) / s->G : r, part = up(Tp / m + 1) * D;
                    if (unit + 1 < s->U * s->H)
                        prefetch(s->prefix_k + (unit + 1) * Tp * D + i * part, part);
                    dots(row + Tpp, q + i * D, s->k + key, s->k_strides[3], Tk, D,
                         s->v + key, s->k + at_key(s->k_strides, u, h, next));
                    dots(row + Tpp + Tkp, q + i * D, s->recent_k + late, s->recent_strides[3], recent, D,
                         s->recent_v + late, s->recent_k + at_key(s->recent_strides, u, h, next));
                    add_bias(row, s->prefix_bias ? s->prefix_bias + u * Tp : NULL, Tp);
                    add_bias(row + Tpp, s->own_bias, Tk);
                    add_bias(row + Tpp + Tkp, s->own_bias ? s->own_bias + Tk : NULL, recent);
                    for (long j = Tp; j < Tpp; j++)
                        row[j] = -INFINITY;
                    inverse[i] = 1 / softmax(row, width, &highest);
                }
                product(out, D, scores, width, s->prefix_v + unit * Tp * D, D, m, D, Tp, 0);
                for (long i = 0; i < m; i++) {
                    long r = (first + i) / s->G, at = at_query(s, u, h, r, (first + i) % s->G, 0);
                    float *row = scores + i * width;
                    add_values(out + i * D, row + Tpp, s->v + at_key(s->k_strides, u, h, r), s->k_strides[3], Tk, D);
                    add_values(out + i * D, row + Tpp + Tkp, s->recent_v + at_key(s->recent_strides, u, h, r),
                               s->recent_strides[3], recent, D);
                    for (long d = 0; d < D; d++)
                        y[at + d] = out[i * D + d] * inverse[i];
                }
            }
        }
        free(scores), free(prefix_kt), free(q), free(out);
    }
}
