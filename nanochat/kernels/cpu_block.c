/* The small operations of a block, and drawing tokens, on CPU in fp32: each one pass over memory.
 * Called from ops.py, engine.py and cpu_decode.c. */
#include <stdint.h>
#include <string.h>

#include "cpu.h"
#include "cpu_heads.h"

/* y = x / rms(x) per row of C floats, C a multiple of 32; inverse (rows): 1 / rms.
 * With delta, x is first replaced by x + delta, which goes to `added`. */
void norm_forward(const float *x, const float *delta, float *added, float *y, float *inverse,
                  long rows, long C, float epsilon, long threads)
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

/* grad_x of the above from grad (of y). */
void norm_backward(const float *grad, const float *y, const float *inverse, float *grad_x, long rows, long C,
                   long threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < rows; i++) {
        vec products = {0};
        for (long c = i * C; c < (i + 1) * C; c += L)
            products += load(grad + c) * load(y + c);
        float mean = sum(products) / C;
        for (long c = i * C; c < (i + 1) * C; c += L)
            store(grad_x + c, (load(grad + c) - load(y + c) * mean) * inverse[i]);
    }
}

/* y = a x + b x0 of n floats, n a multiple of 32. */
void mix_forward(const float *x, const float *x0, const float *a, const float *b, float *y, long n, long threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < n; i += L)
        store(y + i, load(x + i) * *a + load(x0 + i) * *b);
}

/* grad_x = a grad, grad_x0 = b grad; sums (n / 1024, rounded up; 2): grad . x and grad . x0, which make
 * the gradients of a and b, of 1024 floats each. */
void mix_backward(const float *grad, const float *x, const float *x0, const float *a, const float *b,
                  float *grad_x, float *grad_x0, float *sums, long n, long threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long start = 0; start < n; start += 1024) {
        vec of_a = {0}, of_b = {0};
        for (long i = start; i < n && i < start + 1024; i += L) {
            vec g = load(grad + i);
            of_a += g * load(x + i);
            of_b += g * load(x0 + i);
            store(grad_x + i, g * *a);
            store(grad_x0 + i, g * *b);
        }
        sums[start / 512] = sum(of_a);
        sums[start / 512 + 1] = sum(of_b);
    }
}

static inline float gate_of(const float *x, const float *w, long channels)
{
    float z = 0;
    for (long c = 0; c < channels; c++)
        z += x[c] * w[c];
    return 1 / (1 + expf(-z));
}

/* y = x + strength * gate * the row before, gate = sigmoid(x[:channels] . w). x, y (B, T, C), C a multiple of 32;
 * first (B, C) stands before each first row, NULL: zeros; gates (B, T). */
void smear_forward(const float *x, const float *first, const float *w, const float *strength, float *y, float *gates,
                   long B, long T, long C, long channels, long threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < B * T; i++) {
        const float *row = x + i * C, *before = i % T ? row - C : first ? first + i / T * C : NULL;
        float factor = *strength * (gates[i] = gate_of(row, w, channels));
        for (long c = 0; c < C; c += L)
            store(y + i * C + c, load(row + c) + factor * (before ? load(before + c) : (vec){0}));
    }
}

/* The gradients, from grad (of y). sums (B, channels + 1): each row's part of those of w and of strength. */
void smear_backward(const float *grad, const float *x, const float *first, const float *w, const float *strength,
                    const float *gates, float *grad_x, float *grad_first, float *sums, long B, long T, long C,
                    long channels, long threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long b = 0; b < B; b++) {
        float *mine = sums + b * (channels + 1);
        for (long c = 0; c <= channels; c++)
            mine[c] = 0;
        for (long i = b * T; i < (b + 1) * T; i++) {
            const float *row = x + i * C, *before = i % T ? row - C : first ? first + b * C : NULL;
            float next = (i + 1) % T ? *strength * gates[i + 1] : 0;
            vec products = {0};
            for (long c = 0; c < C; c += L) {
                vec g = load(grad + i * C + c);
                if (before)
                    products += g * load(before + c);
                store(grad_x + i * C + c, next ? g + next * load(grad + (i + 1) * C + c) : g);
            }
            float of_gate = sum(products), of_z = *strength * gates[i] * (1 - gates[i]) * of_gate;
            for (long c = 0; c < channels; c++) {
                grad_x[i * C + c] += of_z * w[c];
                mine[c] += of_z * row[c];
            }
            mine[channels] += gates[i] * of_gate;
        }
        for (long c = 0; first && c < C; c += L)
            store(grad_first + b * C + c, *strength * gates[b * T] * load(grad + b * T * C + c));
    }
}

/* y = max(x, 0)^2 of n floats, n a multiple of 32. */
void relu_squared(const float *x, float *y, long n, long threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < n; i += L) {
        vec positive = larger((vec){0}, load(x + i));
        store(y + i, positive * positive);
    }
}

/* Rows x (U*R*T, (Hq + 2 Hkv) D) -> q, k and v, as split_row has them. */
void split_heads(const Heads *s, const float *x, const float *cosine, const float *sine, const float *gate,
                 const float *embedding, float *q, float *k, float *v, float *factors, long threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long n = 0; n < s->U * s->R * s->T; n++)
        split_row(s, n, x + n * (s->Hq + 2 * s->Hkv) * s->D, cosine, sine, gate, embedding, q, k, v, factors);
}

/* One number in [0, 1) per key and position, as engine.uniform_noise: the upper 53 bits of splitmix64. */
void uniform_noise(const long *keys, const long *positions, double *noise, long n, long threads)
{
    (void)threads;
    for (long i = 0; i < n; i++) {
        uint64_t x = (uint64_t)keys[i] + ((uint64_t)positions[i] + 1) * 0x9E3779B97F4A7C15;
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
        x = (x ^ x >> 27) * 0x94D049BB133111EB;
        noise[i] = ((x ^ x >> 31) >> 11) * 0x1p-53;
    }
}

static long first_equal(const float *x, long V, float value)
{
    for (long j = 0; j < V; j++)
        if (x[j] == value)
            return j;
    return 0; /* no number */
}

/* The first column at which the cumulative weight e^(logit - highest) exceeds the target: vector by vector, by their
 * sums, then inside of the one that is reached; where rounding lets none be reached there, its last that has weight. */
static long first_above(const float *logits, const float *sums, long V, float highest, double target)
{
    double passed = 0;
    long found = 0, j = 0;
    for (; j + L < V && passed + sums[j / L] <= target; j += L)
        passed += sums[j / L];
    vec weights = exponential(load(logits + j) - highest);
    for (long c = 0; c < L && j + c < V; c++)
        if (weights[c] > 0) {
            found = j + c;
            passed += weights[c];
            if (passed > target)
                break;
        }
    return found;
}

/* Draws a token per row of raw logits z (rows, V) with row stride `stride` under softmax(logit(z)): the first one at
 * which the cumulative weight exceeds noise (rows; in [0, 1)) * total. logprobs (rows): of that distribution.
 * kth (rows), where given: what lies below is not drawn. Temperature 0: the first token of the highest logit, and its
 * logprob at temperature 1. */
void draw(const float *z, long stride, long rows, long V, const float *kth, float softcap, float temperature,
          const double *noise, long *tokens, float *logprobs, long threads)
{
#pragma omp parallel num_threads(threads)
    {
        float *logits = floats(up(V)), *sums = floats(up(V) / L); /* logits from V on: -inf */
#pragma omp for schedule(static)
        for (long i = 0; i < rows; i++) {
            vec best = splat(-INFINITY), least = splat(kth ? kth[i] : -INFINITY);
            double total = 0;
            for (long j = 0; j < V; j += L) {
                vec raw = {0};
                if (j + L <= V)
                    raw = load(z + i * stride + j);
                else
                    memcpy(&raw, z + i * stride + j, (V - j) * sizeof(float));
                raw = choose(raw < least, splat(-INFINITY), logit(raw, softcap, temperature ? temperature : 1));
                for (long c = V - j; c < L; c++)
                    raw[c] = -INFINITY;
                store(logits + j, raw);
                best = larger(raw, best);
            }
            float highest = maximum(best);
            for (long j = 0; j < V; j += L) {
                sums[j / L] = sum(exponential(load(logits + j) - highest));
                total += sums[j / L];
            }
            if (temperature) {
                double target = noise[i] * total;
                tokens[i] = first_above(logits, sums, V, highest, target < total ? target : nextafter(total, 0));
            } else
                tokens[i] = first_equal(logits, V, highest);
            logprobs[i] = logits[tokens[i]] - highest - (float)log(total);
        }
        free(logits), free(sums);
    }
}

/* out (C, rows) = x^T, x (rows, C); C is a multiple of 32. */
void transpose_matrix(const float *x, float *out, long rows, long C, long threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long c = 0; c < C; c += L) {
        long j = 0;
        for (; j + L <= rows; j += L)
            transpose_tile(out + c * rows + j, rows, x + j * C + c, C, L, 1);
        for (; j < rows; j++)
            for (long i = c; i < c + L; i++)
                out[i * rows + j] = x[j * C + i];
    }
}
