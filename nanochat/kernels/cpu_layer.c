/* A transformer layer on CPU in fp32, before its attention and after it, and the gradients of both.
 *
 * ROWS tokens at a time go through all operations, so that what lies between two products never leaves the caches.
 * Called from layer.py, where the plain counterparts are. C, the width, and D are multiples of 32. Weights are (out, in).
 * Gradients of weights are sums over all tokens: each thread adds up those of its share of the tokens.
 */
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_thread_num() 0
#define omp_get_num_threads() 1
#endif
#include "cpu_product.h"
#include "cpu_heads.h"

#define ROWS 64

/* y = x / rms(x) of one row of C floats. Returns 1 / rms. */
static inline float norm_row(float *y, const float *x, long C, float epsilon)
{
    vec squares = {0};
    for (long c = 0; c < C; c += L)
        squares += load(x + c) * load(x + c);
    float inverse = 1 / sqrtf(sum(squares) / C + epsilon);
    for (long c = 0; c < C; c += L)
        store(y + c, load(x + c) * inverse);
    return inverse;
}

/* grad_x = the gradient of x from that of y = x / rms(x), plus `more`. grad_x may be `more`. */
static inline void norm_row_back(float *grad_x, const float *grad, const float *more, const float *y, float inverse,
                                 long C)
{
    vec products = {0};
    for (long c = 0; c < C; c += L)
        products += load(grad + c) * load(y + c);
    float mean = sum(products) / C;
    for (long c = 0; c < C; c += L)
        store(grad_x + c, (load(grad + c) - load(y + c) * mean) * inverse + load(more + c));
}

/* y (m, C) = the normed rows of x, from their 1 / rms. */
static inline void scale_rows(float *y, const float *x, const float *inverse, long m, long C)
{
    for (long i = 0; i < m; i++)
        for (long c = 0; c < C; c += L)
            store(y + i * C + c, load(x + i * C + c) * inverse[i]);
}

/* How many of N tokens to take at a time: at most ROWS, such that each thread has as many. */
static inline long share(long N, long threads)
{
    long pieces = ((N + ROWS - 1) / ROWS + threads - 1) / threads * threads;
    return ((N + pieces - 1) / pieces + TILE - 1) / TILE * TILE;
}

/* Where this thread adds up n floats, 0 at first: the first one in the result, others in `more` (threads - 1, n). */
static float *begin_sum(float *result, float *more, long n)
{
    long thread = omp_get_thread_num();
    return memset(thread ? more + (thread - 1) * n : result, 0, n * sizeof(float));
}

/* Adds what the other threads have to the result, in their order. All threads call it, after a barrier. */
static void end_sum(float *result, const float *more, long n)
{
    for (long thread = 0; thread < omp_get_num_threads() - 1; thread++)
#pragma omp for schedule(static)
        for (long i = 0; i < n; i++)
            result[i] += more[thread * n + i];
}

/* panels: the transpose of w (n, k), as the forward kernels want it; n and k multiples of 32. */
void pack_weight(const float *w, float *panels, long n, long k, long threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long j = 0; j < n; j += PANEL)
        pack_transposed(panels + j * k, w + j * k, PANEL, k);
}

/* mixed = a x + b x0; queries, keys and values of its norm, as split_heads makes them; where there is an
 * embedding, values gain gate * embedding, gate = 3 sigmoid(the first `channels` of the norm @ w_gate^T).
 * x, x0, mixed (N, C); weights: panels of queries, keys and values ((Hq + 2 Hkv) D, C); w_gate (Hkv, channels);
 * inverse (N): 1 / rms. */
void before_forward(const Heads *s, long C, long channels, const float *x, const float *x0, const float *a,
                    const float *b, const float *weights, const float *w_gate, const float *embedding,
                    const float *cosine, const float *sine, float *mixed, float *inverse, float *gate, float *q,
                    float *k, float *v, float *factors, long threads)
{
    long N = s->U * s->R * s->T, Hkv = s->Hkv, width = (s->Hq + 2 * Hkv) * s->D, most = share(N, threads);
#pragma omp parallel num_threads(threads)
    {
        float *normed = floats(most * C), *rows = floats(most * width);
#pragma omp for schedule(static)
        for (long n = 0; n < N; n += most) {
            long m = least(most, N - n);
            for (long i = n; i < n + m; i++) {
                for (long c = 0; c < C; c += L)
                    store(mixed + i * C + c, load(x + i * C + c) * *a + load(x0 + i * C + c) * *b);
                inverse[i] = norm_row(normed + (i - n) * C, mixed + i * C, C, s->epsilon);
            }
            product_packed(rows, width, normed, C, weights, m, width, C, 0);
            for (long i = 0; embedding && i < m; i++)
                for (long h = 0; h < Hkv; h++) {
                    float z = 0;
                    for (long c = 0; c < channels; c++)
                        z += normed[i * C + c] * w_gate[h * channels + c];
                    gate[(n + i) * Hkv + h] = 3 / (1 + expf(-z));
                }
            for (long i = 0; i < m; i++)
                split_row(s, n + i, rows + i * width, cosine, sine, embedding ? gate : NULL, embedding,
                          q, k, v, factors);
        }
        free(normed), free(rows);
    }
}

/* The gradients, from those of mixed, q, k and v. sums (N / 64, rounded up; 2): of ROWS tokens each, they make those of
 * a and b. grads: those of queries', keys' and values' weights, where `trained`, and after them of w_gate. */
void before_backward(const Heads *s, long C, long channels, const float *x, const float *x0, const float *a,
                     const float *b, const float *w_q, const float *w_k, const float *w_v, const float *w_gate,
                     const float *embedding, const float *cosine, const float *sine, const float *mixed,
                     const float *inverse, const float *gate, const float *q, const float *k, const float *factors,
                     const float *grad_mixed, const float *grad_q, const float *grad_k, const float *grad_v,
                     float *grad_x, float *grad_x0, float *sums, float *grads, float *grad_embedding, long trained,
                     long threads)
{
    long N = s->U * s->R * s->T, D = s->D, Hkv = s->Hkv, width = (s->Hq + 2 * Hkv) * D;
    long of_weights = trained * width * C, num_sums = of_weights + Hkv * channels;
    float *weights = floats(width * C), *more = floats((threads - 1) * num_sums);
    pack_rows(weights, w_q, s->Hq * D, C, width, 0);
    pack_rows(weights, w_k, Hkv * D, C, width, s->Hq * D);
    pack_rows(weights, w_v, Hkv * D, C, width, (s->Hq + Hkv) * D);
#pragma omp parallel num_threads(threads)
    {
        float *normed = floats(ROWS * C), *grad = floats(ROWS * C), *rows = floats(ROWS * width), *gates = floats(Hkv);
        float *mine = begin_sum(grads, more, num_sums);
#pragma omp for schedule(static)
        for (long n = 0; n < N; n += ROWS) {
            long m = least(ROWS, N - n);
            double of_a = 0, of_b = 0;
            scale_rows(normed, mixed + n * C, inverse + n, m, C);
            for (long i = 0; i < m; i++) {
                split_row_back(s, n + i, grad_q, grad_k, grad_v, q, k, factors, cosine, sine,
                               embedding ? gate : NULL, embedding, rows + i * width, gates, grad_embedding);
                for (long h = 0; embedding && h < Hkv; h++) { /* gates: now the gradient of the gate's product */
                    float y = gate[(n + i) * Hkv + h];
                    gates[h] *= y * (1 - y / 3);
                    for (long c = 0; c < channels; c++)
                        mine[of_weights + h * channels + c] += gates[h] * normed[i * C + c];
                }
                for (long c = 0; c < C; c += L)
                    store(grad + i * C + c, (vec){0});
                for (long h = 0; embedding && h < Hkv; h++)
                    for (long c = 0; c < channels; c++)
                        grad[i * C + c] += gates[h] * w_gate[h * channels + c];
            }
            product_packed(grad, C, rows, width, weights, m, C, width, 1);
            if (trained)
                product_t(mine, C, rows, width, normed, C, width, C, m, 1);
            for (long i = 0; i < m; i++) {
                long at = (n + i) * C;
                vec dot_a = {0}, dot_b = {0};
                norm_row_back(grad + i * C, grad + i * C, grad_mixed + at, normed + i * C, inverse[n + i], C);
                for (long c = 0; c < C; c += L) {
                    vec g = load(grad + i * C + c);
                    dot_a += g * load(x + at + c), dot_b += g * load(x0 + at + c);
                    store(grad_x + at + c, g * *a), store(grad_x0 + at + c, g * *b);
                }
                of_a += sum(dot_a), of_b += sum(dot_b);
            }
            sums[n / ROWS * 2] = of_a, sums[n / ROWS * 2 + 1] = of_b;
        }
        end_sum(grads, more, num_sums);
        free(normed), free(grad), free(rows), free(gates);
    }
    free(weights), free(more);
}

/* added = x + y @ w_o^T; out = added + max(norm(added) @ w_up^T, 0)^2 @ w_down^T.
 * x, y, added, out (N, C); o, in, down: panels of w_o (C, C), w_up (F, C) and w_down (C, F); inverse (N): 1 / rms;
 * up (N, F): norm @ w_up^T. */
void after_forward(const float *x, const float *y, const float *o, const float *in, const float *down, float *added,
                    float *inverse, float *up, float *out, long N, long C, long F, float epsilon, long threads)
{
    long most = share(N, threads);
#pragma omp parallel num_threads(threads)
    {
        float *normed = floats(most * C), *squares = floats(most * F);
#pragma omp for schedule(static)
        for (long n = 0; n < N; n += most) {
            long m = least(most, N - n), at = n * C;
            for (long c = at; c < at + m * C; c += L)
                store(added + c, load(x + c));
            product_packed(added + at, C, y + at, C, o, m, C, C, 1);
            for (long i = 0; i < m; i++)
                inverse[n + i] = norm_row(normed + i * C, added + at + i * C, C, epsilon);
            product_packed(up + n * F, F, normed, C, in, m, F, C, 0);
            for (long c = 0; c < m * F; c += L) {
                vec positive = larger((vec){0}, load(up + n * F + c));
                store(squares + c, positive * positive);
            }
            for (long c = at; c < at + m * C; c += L)
                store(out + c, load(added + c));
            product_packed(out + at, C, squares, F, down, m, C, F, 1);
        }
        free(normed), free(squares);
    }
}

/* The gradients, from grad (of out). grads: those of w_o, w_up and w_down, where `trained`. */
void after_backward(const float *grad, const float *y, const float *w_o, const float *w_up, const float *w_down,
                     const float *added, const float *inverse, const float *up, float *grad_x, float *grad_y,
                     float *grads, long trained, long N, long C, long F, long threads)
{
    long num_sums = trained * (C * C + 2 * F * C);
    float *o = floats(C * C), *in = floats(C * F), *down = floats(F * C), *more = floats((threads - 1) * num_sums);
    pack_rows(o, w_o, C, C, C, 0), pack_rows(in, w_up, F, C, F, 0), pack_rows(down, w_down, C, F, C, 0);
#pragma omp parallel num_threads(threads)
    {
        float *grad_o = begin_sum(grads, more, num_sums), *grad_up = grad_o + C * C, *grad_down = grad_up + F * C;
        float *normed = floats(ROWS * C), *inner = floats(ROWS * C), *squares = floats(ROWS * F);
        float *slope = floats(ROWS * F);
#pragma omp for schedule(static)
        for (long n = 0; n < N; n += ROWS) {
            long m = least(ROWS, N - n), at = n * C;
            product_packed(slope, F, grad + at, C, down, m, F, C, 0);
            for (long c = 0; c < m * F; c += L) {
                vec positive = larger((vec){0}, load(up + n * F + c));
                store(squares + c, positive * positive);
                store(slope + c, 2 * positive * load(slope + c));
            }
            scale_rows(normed, added + at, inverse + n, m, C);
            product_packed(inner, C, slope, F, in, m, C, F, 0);
            for (long i = 0; i < m * C; i += C)
                norm_row_back(grad_x + at + i, inner + i, grad + at + i, normed + i, inverse[n + i / C], C);
            product_packed(grad_y + at, C, grad_x + at, C, o, m, C, C, 0);
            if (trained) {
                product_t(grad_down, F, grad + at, C, squares, F, C, F, m, 1);
                product_t(grad_up, C, slope, F, normed, C, F, C, m, 1);
                product_t(grad_o, C, grad_x + at, C, y + at, C, C, C, m, 1);
            }
        }
        end_sum(grads, more, num_sums);
        free(normed), free(inner), free(squares), free(slope);
    }
    free(o), free(in), free(down), free(more);
}
