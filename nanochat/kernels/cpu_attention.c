/* Attention on CPU in fp32; D is a multiple of 32.
 *
 * Called from attention.py, where its PyTorch twin is and the shapes get their names.
 * "Strides" count floats. The order of sums does not depend on the number of threads.
 */
#include "cpu_product.h"

#define BLOCK 16 /* queries whose scores are held at a time: they stay in the nearest cache */

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

/* The tensors of an attention (_spec of attention.py). */
typedef struct {
    const float *q, *k, *v, *prefix_k, *prefix_v, *own_bias, *prefix_bias;
    long U, H, R, G, T, Tk, Tp, D;
    long prefix_bias_rows;  /* 1, or T */
    long q_strides[5];      /* u, h, r, g, t: of q and of what lies like it */
    long k_strides[4];      /* u, h, r, t: of own keys and values */
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
