/* Attention on CPU in fp32; D is a multiple of 32.
 *
 * Called from attention.py and decode_cache.py, where its PyTorch twins are and the shapes get their names.
 * "Strides" count floats. The order of sums does not depend on the number of threads.
 */
#include <string.h>

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

/* out[j] = q . k_j for n keys, and -inf up to a multiple of L. soon: what lies like these and is read next. */
static inline __attribute__((always_inline)) void dots_of(const long D, float *out, const float *q,
                                                          const float *k, long stride, long n, const float *soon)
{
    for (long j = 0; j < n; j += L) {
        vec x[L];
        prefetch(soon + j * stride, L * D);
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

static void dots(float *out, const float *q, const float *k, long stride, long n, long D, const float *soon)
{
    switch (D) {
    case 32: dots_of(32, out, q, k, stride, n, soon); break;
    case 64: dots_of(64, out, q, k, stride, n, soon); break;
    case 128: dots_of(128, out, q, k, stride, n, soon); break;
    default: dots_of(D, out, q, k, stride, n, soon);
    }
}

/* y (D) += the sum of p[j] v_j over n values. soon: what lies like these and is read next. */
static void add_values(float *y, const float *p, const float *v, long stride, long n, long D, const float *soon)
{
    for (long d = 0; d < D; d += L) {
        vec acc[4] = {load(y + d)};
        long j = 0;
        for (; j + 4 <= n; j += 4) {
            prefetch(soon + j * stride + 4 * d, 4 * L);
            for (int i = 0; i < 4; i++)
                acc[i] += p[j + i] * load(v + (j + i) * stride + d);
        }
        for (; j < n; j++)
            acc[0] += p[j] * load(v + j * stride + d);
        store(y + d, acc[0] + acc[1] + acc[2] + acc[3]);
    }
}

/* The tensors of decoding: _DecodeSpec of decode_cache.py. Each row has one query, and a place where its own keys and
 * values are; rows of one slot continue the same prompt, whose keys come transposed where many rows read them. */
typedef struct {
    const float *q, *new_k, *new_v; /* (n, H, G, D), (n, H, D) twice */
    float *k, *v;                   /* (places, H, capacity, D) */
    const float *prefix_k, *prefix_v; /* (slots, H, Tp, D), or keys (slots, H, D, Tp) */
    const long *places, *lengths, *slots, *prefix_lengths; /* (n), (places), (places), (slots) */
    long n, H, G, D, capacity, Tp, transposed, window;
    long q_row, q_head, q_group, kv_row, kv_head; /* strides of q, new_k and new_v */
} Decoding;

/* Scores of a row's own keys behind those of its prompt; then weights, and 1 / their sum.
 * The query sees `window` positions before its own. */
static inline float row_weights(const Decoding *s, float *row, const float *q, const float *k, const float *v,
                                const float *prefix_k, const float *prefix_v, long length, long Tp)
{
    long D = s->D, Tpp = up(Tp), sees = length - 1 - s->window; /* own column from which the query sees */
    float highest;
    if (!s->transposed)
        dots(row, q, prefix_k, D, Tp, D, prefix_v);
    for (long j = Tp; j < Tpp; j++)
        row[j] = -INFINITY;
    for (long j = 0; j < Tp && j < Tp + sees; j++)
        row[j] = -INFINITY;
    dots(row + Tpp, q, k, D, length, D, v);
    for (long j = 0; j < sees; j++)
        row[Tpp + j] = -INFINITY;
    return 1 / softmax(row, Tpp + up(length), &highest);
}

/* Decoding: puts the new keys and values behind each row's own, which are `lengths` then, and attends to all of them.
 * y (n, H, G, D). Consecutive rows of one slot read its keys together; what a row gets depends on no other row. */
void decode(const Decoding *s, float *y, long threads)
{
    long n = s->n, H = s->H, G = s->G, D = s->D, own = s->capacity * D, longest = 1;
    long *starts = malloc((n + 1) * sizeof(long)), runs = 0;
    for (long i = 0; i < n; i++) {
        long place = s->places[i];
        if (i == 0 || s->slots[place] != s->slots[s->places[i - 1]])
            starts[runs++] = i;
        longest = s->lengths[place] > longest ? s->lengths[place] : longest;
    }
    starts[runs] = n;
    float scale = 1 / sqrtf(D);
    long chunk = runs >= 4 * threads ? H : 1; /* heads of a row, which lie one behind the other */
#pragma omp parallel num_threads(threads)
    {
        long width = up(s->Tp) + up(longest);
        float *scores = floats(PLACES * width), *q = floats(PLACES * D), *out = floats(PLACES * D);
#pragma omp for schedule(dynamic, chunk)
        for (long unit = 0; unit < runs * H; unit++) {
            long run = unit / H, h = unit % H, slot = s->slots[s->places[starts[run]]], Tp = s->prefix_lengths[slot];
            long first = starts[run] * G, end = starts[run + 1] * G, at_prompt = (slot * H + h) * s->Tp * D;
            const float *prefix_k = s->prefix_k + at_prompt, *prefix_v = s->prefix_v + at_prompt;
            for (; first < end; first += PLACES) {
                long m = end - first < PLACES ? end - first : PLACES;
                float inverse[PLACES];
                for (long i = 0; i < m; i++) {
                    long r = (first + i) / G, g = (first + i) % G, place = s->places[r];
                    const float *from = s->q + r * s->q_row + h * s->q_head + g * s->q_group;
                    for (long d = 0; d < D; d++)
                        q[i * D + d] = scale * from[d];
                    if (g)
                        continue;
                    long to = ((place * H + h) * s->capacity + s->lengths[place] - 1) * D;
                    memcpy(s->k + to, s->new_k + r * s->kv_row + h * s->kv_head, D * sizeof(float));
                    memcpy(s->v + to, s->new_v + r * s->kv_row + h * s->kv_head, D * sizeof(float));
                }
                if (s->transposed)
                    product(scores, width, q, D, prefix_k, s->Tp, m, up(Tp), D, 0);
                for (long i = 0; i < m; i++) {
                    float *row = scores + i * width, *o = out + i * D;
                    long place = s->places[(first + i) / G], at = (place * H + h) * own, length = s->lengths[place];
                    /* The next row's keys, or those of the next head. */
                    long next = i + 1 < m ? (s->places[(first + i + 1) / G] * H + h) * own
                                          : (s->places[first / G] * H + h + (h + 1 < H)) * own;
                    inverse[i] = row_weights(s, row, q + i * D, s->k + at, s->v + at, prefix_k, prefix_v, length, Tp);
                    memset(o, 0, D * sizeof(float));
                    if (!s->transposed)
                        add_values(o, row, prefix_v, D, Tp, D, prefix_k + (i + 1 == m && h + 1 < H) * s->Tp * D);
                    add_values(o, row + up(Tp), s->v + at, D, length, D, s->k + next);
                }
                if (s->transposed)
                    product(out, D, scores, width, prefix_v, D, m, D, Tp, 1);
                for (long i = 0; i < m; i++)
                    for (long d = 0; d < D; d++) {
                        long r = (first + i) / G, g = (first + i) % G;
                        y[((r * H + h) * G + g) * D + d] = out[i * D + d] * inverse[i];
                    }
            }
        }
        free(scores), free(q), free(out);
    }
    free(starts);
}
