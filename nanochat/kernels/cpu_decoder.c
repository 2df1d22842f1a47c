/* An imported model's layer on CPU with products in bf16 and all else in fp32: before its attention, after it, the
 * gradients of both, and one token of each row through all layers.
 *
 * ROWS tokens at a time go through all operations, so that what lies between two products never leaves the caches.
 * places: where among all tokens, padding included, the N tokens are that are run; NULL: they are all.
 * Called from tiles.py and decode_step.py, where the shapes get their names. Weights are (out, in), as panels.
 */
#include "cpu_tiles.h"
#include "cpu_heads.h"

#define ROWS 256
#define MANY 1024    /* tokens from which what is written will not be in the caches when it is read */

static inline long place(const long *places, long n) { return places ? places[n] : n; }

/* How many of N tokens to take at a time: at most ROWS, such that each thread has as many. A multiple of DEEP. */
static inline long share(long N, long threads)
{
    long pieces = ((N + ROWS - 1) / ROWS + threads - 1) / threads * threads;
    if (!N)
        return DEEP;
    return ((N + pieces - 1) / pieces + DEEP - 1) / DEEP * DEEP;
}

/* Copies n floats; far: they are put away. */
static inline void copy(float *to, const float *from, long n, long far)
{
    for (long i = 0; i < n; i += L)
        if (far)
            put_away(to + i, load(from + i));
        else
            store(to + i, load(from + i));
}

/* y = weight * x / rms(x) of one row, in bf16. Returns 1 / rms. */
static inline float norm_narrow(bf16 *y, const float *x, const float *weight, long C, float epsilon)
{
    float row[512];
    vec squares = {0};
    for (long c = 0; c < C; c += L)
        squares += load(x + c) * load(x + c);
    float inverse = 1 / sqrtf(sum(squares) / C + epsilon);
    for (long start = 0; start < C; start += 512) {
        long n = least(512, C - start);
        for (long c = 0; c < n; c += L)
            store(row + c, load(x + start + c) * inverse * load(weight + start + c));
        narrow_row(y + start, row, n);
    }
    return inverse;
}

/* The gradient of x from that of y = weight * x / rms(x), plus `more` where there is one; of_weight += the weight's. */
static inline void norm_back(float *grad_x, const float *grad, const float *more, const float *x, const float *weight,
                             float inverse, float *of_weight, long C)
{
    vec products = {0};
    for (long c = 0; c < C; c += L) {
        vec y = load(x + c) * inverse, g = load(grad + c);
        store(of_weight + c, load(of_weight + c) + g * y);
        products += g * load(weight + c) * y;
    }
    float mean = sum(products) / C;
    for (long c = 0; c < C; c += L) {
        vec g = (load(grad + c) * load(weight + c) - load(x + c) * inverse * mean) * inverse;
        store(grad_x + c, more ? g + load(more + c) : g);
    }
}

/* One head, rotated by minus the angle; `back` turns it by plus. */
static inline void turn(float *out, const float *x, const float *cosine, const float *sine, long D, float back)
{
    long half = D / 2;
    for (long d = 0; d < half; d += L) {
        vec a = load(x + d), b = load(x + half + d), c = load(cosine + d), e = load(sine + d) * back;
        store(out + d, a * c + b * e), store(out + half + d, b * c - a * e);
    }
}

/* Queries, keys and values of a layer's normed input, rotated. x (U R T, C); panels: of all three; bias: theirs, or
 * NULL; q (U R T, Hq, D), k and v (U, Hkv, R, T, D); inverse (N): 1 / rms. */
void decoder_before(const Heads *s, long C, const float *x, const float *weight, const bf16 *panels, const float *bias,
                    const float *cosine, const float *sine, float *inverse, float *q, float *k, float *v,
                    const long *places, long N, long threads)
{
    long D = s->D, Hq = s->Hq, Hkv = s->Hkv, T = s->T, R = s->R, width = (Hq + 2 * Hkv) * D;
    long most = share(N, threads);
#pragma omp parallel num_threads(threads)
    {
        bf16 *normed = halves(most * C);
        float *rows = floats(most * width);
        begin_tiles();
#pragma omp for schedule(dynamic)
        for (long n = 0; n < N; n += most) {
            long m = least(most, N - n);
            for (long i = 0; i < m; i++)
                inverse[n + i] = norm_narrow(normed + i * C, x + place(places, n + i) * C, weight, C, s->epsilon);
            product_tiles(rows, width, normed, C, panels, m, width, C, 0);
            for (long i = 0; i < m; i++) {
                float *row = rows + i * width;
                long own = place(places, n + i), t = own % T, r = own / T % R, u = own / T / R;
                const float *c = cosine + own * D / 2, *e = sine + own * D / 2;
                for (long d = 0; bias && d < width; d += L)
                    store(row + d, load(row + d) + load(bias + d));
                for (long h = 0; h < Hq; h++)
                    turn(q + (own * Hq + h) * D, row + h * D, c, e, D, 1);
                for (long h = 0; h < Hkv; h++) {
                    long at = (((u * Hkv + h) * R + r) * T + t) * D;
                    turn(k + at, row + (Hq + h) * D, c, e, D, 1);
                    memcpy(v + at, row + (Hq + Hkv + h) * D, D * sizeof(float));
                }
            }
        }
        end_tiles();
        free(normed), free(rows);
    }
}

/* The gradients, from those of q, k and v, which lie as these do. panels: of the stacked weights (width, C), for
 * x @ w; sums (N / ROWS, rounded up; C + width): of ROWS tokens each, those of the norm's weight and of the bias;
 * grads (width, C) where they are wanted, else NULL. */
void decoder_before_back(const Heads *s, long C, const float *x, const float *weight, const bf16 *panels,
                         const float *cosine, const float *sine, const float *inverse, const float *grad_q,
                         const float *grad_k, const float *grad_v, float *grad_x, float *sums, float *grads,
                         const long *places, long N, long threads)
{
    long D = s->D, Hq = s->Hq, Hkv = s->Hkv, T = s->T, R = s->R, width = (Hq + 2 * Hkv) * D;
    long blocks = (N + DEEP - 1) / DEEP;
    bf16 *left = halves(grads ? blocks * DEEP * width : 0), *right = halves(grads ? blocks * DEEP * C : 0);
#pragma omp parallel num_threads(threads)
    {
        bf16 *normed = halves(ROWS * C), *narrowed = halves(ROWS * width);
        float *row = floats(width), *grad = floats(ROWS * C);
        begin_tiles();
#pragma omp for schedule(dynamic)
        for (long n = 0; n < N; n += ROWS) {
            long m = least(ROWS, N - n), deep = (m + DEEP - 1) / DEEP * DEEP;
            float *of_weight = sums + n / ROWS * (C + width), *of_bias = of_weight + C;
            memset(of_weight, 0, (C + width) * sizeof(float));
            for (long i = 0; i < m; i++) {
                long own = place(places, n + i), t = own % T, r = own / T % R, u = own / T / R;
                const float *c = cosine + own * D / 2, *e = sine + own * D / 2;
                for (long h = 0; h < Hq; h++)
                    turn(row + h * D, grad_q + (own * Hq + h) * D, c, e, D, -1);
                for (long h = 0; h < Hkv; h++) {
                    long at = (((u * Hkv + h) * R + r) * T + t) * D;
                    turn(row + (Hq + h) * D, grad_k + at, c, e, D, -1);
                    memcpy(row + (Hq + Hkv + h) * D, grad_v + at, D * sizeof(float));
                }
                for (long d = 0; d < width; d += L)
                    store(of_bias + d, load(of_bias + d) + load(row + d));
                narrow_row(narrowed + i * width, row, width);
            }
            memset(narrowed + m * width, 0, (deep - m) * width * sizeof(bf16));
            product_tiles(grad, C, narrowed, width, panels, m, C, width, 0);
            if (grads) {
                for (long i = 0; i < m; i++)
                    norm_narrow(normed + i * C, x + place(places, n + i) * C, weight, C, s->epsilon);
                memset(normed + m * C, 0, (deep - m) * C * sizeof(bf16));
                for (long i = 0; i < deep; i += DEEP) {
                    put_left(left, narrowed + i * width, width, (n + i) / DEEP, blocks);
                    pack_block(right, normed + i * C, C, C, n + i, blocks * DEEP, 1);
                }
            }
            for (long i = 0; i < m; i++) {
                long own = place(places, n + i);
                norm_back(grad_x + own * C, grad + i * C, NULL, x + own * C, weight, inverse[n + i], of_weight, C);
            }
            arrive();
        }
        if (grads)
            weight_gradient(grads, left, right, width, C, blocks, 0);
        end_tiles();
        free(normed), free(narrowed), free(row), free(grad);
    }
    free(left), free(right);
}

static inline vec sigmoid(vec x)
{
    return 1 / (1 + exponential(choose(x < -80, splat(80), -x)));
}

/* added = x + y @ w_o^T; out = added + (silu(g) * u) @ w_down^T, g and u = weight * norm(added) @ w_gate^T and w_up^T.
 * x, out (all, C); y (all, Q); o, gate_up, down: panels, those of gate and up in turn; added (N, C); inverse (N):
 * 1 / rms; inner (N, 2 F): g and u, in bf16; added, inner NULL: not kept. out may be x. */
void decoder_after(const float *x, const float *y, const bf16 *o, const float *weight, const bf16 *gate_up,
                    const bf16 *down, float *added, float *inverse, bf16 *inner, float *out, const long *places,
                    long N, long C, long Q, long F, float epsilon, long threads)
{
    long most = share(N, threads);
#pragma omp parallel num_threads(threads)
    {
        bf16 *narrowed = halves(most * Q), *normed = halves(most * C), *hidden = halves(most * F);
        float *g = floats(most * STRIP), *u = floats(most * STRIP), *sums = floats(most * C), product[STRIP];
        begin_tiles();
#pragma omp for schedule(dynamic)
        for (long n = 0; n < N; n += most) {
            long m = least(most, N - n);
            for (long i = 0; i < m; i++) {
                long own = place(places, n + i);
                narrow_row(narrowed + i * Q, y + own * Q, Q);
                memcpy(sums + i * C, x + own * C, C * sizeof(float));
            }
            product_tiles(sums, C, narrowed, Q, o, m, C, Q, 1);
            for (long i = 0; i < m; i++)
                inverse[n + i] = norm_narrow(normed + i * C, sums + i * C, weight, C, epsilon);
            if (added)
                copy(added + n * C, sums, m * C, N >= MANY);
            for (long f = 0; f < F; f += STRIP) {
                strip(g, STRIP, normed, C, gate_up + 2 * f * C, m, C, 0);
                strip(u, STRIP, normed, C, gate_up + (2 * f + STRIP) * C, m, C, 0);
                for (long i = 0; i < m; i++) {
                    for (long c = 0; c < STRIP; c += L) {
                        vec a = load(g + i * STRIP + c);
                        store(product + c, a * sigmoid(a) * load(u + i * STRIP + c));
                    }
                    narrow_row(hidden + i * F + f, product, STRIP);
                    if (inner) {
                        narrow_row(inner + (n + i) * 2 * F + f, g + i * STRIP, STRIP);
                        narrow_row(inner + (n + i) * 2 * F + F + f, u + i * STRIP, STRIP);
                    }
                }
            }
            product_tiles(sums, C, hidden, F, down, m, C, F, 1);
            for (long i = 0; i < m; i++)
                copy(out + place(places, n + i) * C, sums + i * C, C, N >= MANY);
            arrive();
        }
        end_tiles();
        free(narrowed), free(normed), free(hidden), free(g), free(u), free(sums);
    }
}

static inline vec widened(const bf16 *x)
{
    uint16_t narrow __attribute__((vector_size(2 * L)));
    memcpy(&narrow, x, sizeof(narrow));
    return (vec)(__builtin_convertvector(narrow, ivec) << 16);
}

/* From the gradient of silu(g) * u and g and u, STRIP numbers of each: that product, and the gradients of g and u, all
 * in bf16. */
static inline void swiglu_back(bf16 *hidden, bf16 *of_gate, bf16 *of_up, const bf16 *gate, const bf16 *up,
                               const float *grad)
{
    float row[3][STRIP];
    for (long c = 0; c < STRIP; c += L) {
        vec g = widened(gate + c), u = widened(up + c), s = sigmoid(g), d = load(grad + c);
        store(row[0] + c, g * s * u);
        store(row[1] + c, d * u * s * (1 + g * (1 - s)));
        store(row[2] + c, d * g * s);
    }
    narrow_row(hidden, row[0], STRIP);
    narrow_row(of_gate, row[1], STRIP);
    narrow_row(of_up, row[2], STRIP);
}

/* The gradients, from grad (of out). o, gate_up, down: panels for x @ w, of w_o (C, Q), of w_gate and w_up one below
 * the other (2 F, C), and of w_down (C, F); sums (N / ROWS, rounded up; C): of ROWS tokens each, those of the norm's
 * weight; grad_o, grad_gate_up, grad_down where they are wanted, else NULL. */
void decoder_after_back(const float *grad, const float *y, const bf16 *o, const float *weight, const bf16 *gate_up,
                         const bf16 *down, const float *added, const float *inverse, const bf16 *inner, float *grad_x,
                         float *grad_y, float *sums, float *grad_o, float *grad_gate_up, float *grad_down,
                         const long *places, long N, long C, long Q, long F, float epsilon, long threads)
{
    long blocks = (N + DEEP - 1) / DEEP, kept = grad_o ? blocks * DEEP : 0;
    bf16 *of_out = halves(kept * C), *of_hidden = halves(kept * F), *of_slopes = halves(kept * 2 * F);
    bf16 *of_normed = halves(kept * C), *of_added = halves(kept * C), *of_y = halves(kept * Q);
#pragma omp parallel num_threads(threads)
    {
        bf16 *narrowed = halves(ROWS * C), *hidden = halves(ROWS * F), *slopes = halves(ROWS * 2 * F);
        bf16 *read = halves(ROWS * (C > Q ? C : Q));
        float *of_product = floats(ROWS * STRIP), *of_norm = floats(ROWS * C);
        float *rows = floats(places ? ROWS * Q : 0);
        begin_tiles();
#pragma omp for schedule(dynamic)
        for (long n = 0; n < N; n += ROWS) {
            long m = least(ROWS, N - n), deep = (m + DEEP - 1) / DEEP * DEEP;
            float *of_weight = sums + n / ROWS * C;
            memset(of_weight, 0, C * sizeof(float));
            for (long i = 0; i < m; i++)
                narrow_row(narrowed + i * C, grad + place(places, n + i) * C, C);
            memset(narrowed + m * C, 0, (deep - m) * C * sizeof(bf16));
            for (long f = 0; f < F; f += STRIP) {
                strip(of_product, STRIP, narrowed, C, down + f * C, m, C, 0);
                for (long i = 0; i < m; i++) {
                    long at = i * 2 * F + f;
                    const bf16 *own = inner + n * 2 * F + at;
                    swiglu_back(hidden + i * F + f, slopes + at, slopes + at + F, own, own + F,
                                of_product + i * STRIP);
                }
            }
            memset(hidden + m * F, 0, (deep - m) * F * sizeof(bf16));
            memset(slopes + m * 2 * F, 0, (deep - m) * 2 * F * sizeof(bf16));
            product_tiles(of_norm, C, slopes, 2 * F, gate_up, m, C, 2 * F, 0);
            for (long i = 0; grad_o && i < deep; i += DEEP) {
                long block = (n + i) / DEEP;
                put_left(of_out, narrowed + i * C, C, block, blocks);
                pack_block(of_hidden, hidden + i * F, F, F, n + i, kept, 1);
                put_left(of_slopes, slopes + i * 2 * F, 2 * F, block, blocks);
            }
            for (long i = 0; i < m; i++) {
                long own = place(places, n + i);
                norm_back(grad_x + own * C, of_norm + i * C, grad + own * C, added + (n + i) * C, weight,
                          inverse[n + i], of_weight, C);
            }
            if (grad_o) {
                for (long i = 0; i < m; i++)
                    norm_narrow(read + i * C, added + (n + i) * C, weight, C, epsilon);
                memset(read + m * C, 0, (deep - m) * C * sizeof(bf16));
                for (long i = 0; i < deep; i += DEEP)
                    pack_block(of_normed, read + i * C, C, C, n + i, kept, 1);
            }
            for (long i = 0; i < m; i++)
                narrow_row(narrowed + i * C, grad_x + place(places, n + i) * C, C);
            product_tiles(places ? rows : grad_y + n * Q, Q, narrowed, C, o, m, Q, C, 0);
            for (long i = 0; places && i < m; i++)
                copy(grad_y + places[n + i] * Q, rows + i * Q, Q, N >= MANY);
            if (grad_o) {
                for (long i = 0; i < m; i++)
                    narrow_row(read + i * Q, y + place(places, n + i) * Q, Q);
                memset(read + m * Q, 0, (deep - m) * Q * sizeof(bf16));
                for (long i = 0; i < deep; i += DEEP) {
                    put_left(of_added, narrowed + i * C, C, (n + i) / DEEP, blocks);
                    pack_block(of_y, read + i * Q, Q, Q, n + i, kept, 1);
                }
            }
            arrive();
        }
        if (grad_o) {
            weight_gradient(grad_o, of_added, of_y, C, Q, blocks, 0);
            weight_gradient(grad_gate_up, of_slopes, of_normed, 2 * F, C, blocks, 0);
            weight_gradient(grad_down, of_out, of_hidden, C, F, blocks, 0);
        }
        end_tiles();
        free(narrowed), free(hidden), free(slopes), free(read), free(of_product), free(of_norm);
        free(rows);
    }
    free(of_out), free(of_hidden), free(of_slopes), free(of_normed), free(of_added), free(of_y);
}

/* A layer (decode_step.py). Norms' weights (C); bias of queries, keys and values, or NULL; panels. */
typedef struct {
    const float *norm, *norm_after, *bias;
    const bf16 *qkv, *o, *gate_up, *down;
    float *k, *v; /* these four as in Decoding */
    const float *prefix_k, *prefix_v;
} DecoderLayer;

/* What layers have in common. embedding (vocabulary, C), fp32 or not (is_wide); cosine
 * and sine (positions, D / 2). */
typedef struct {
    const void *embedding;
    const float *norm, *cosine, *sine;
    long is_wide, layers, C, F;
} DecoderTrunk;

/* One token of each row through the trunk, ids and positions (n): out (n, C), after the final norm. Keys and values as
 * in decode_trunk. work: decoder_numbers_per_row of decode_step.py for each row. */
void decode_decoder(const Heads *heads, const DecoderTrunk *t, const DecoderLayer *layers, Decoding *s, const long *ids,
                    const long *positions, float *work, float *out, long threads)
{
    long n = s->n, C = t->C, F = t->F, keys = s->H * s->D, queries = s->G * keys, half = s->D / 2;
    float *cosine = work, *sine = cosine + n * half, *x = sine + n * half, *y = x + n * C, *q = y + n * queries;
    float *k = q + n * queries, *v = k + n * keys, *inverse = v + n * keys;
    const Weight embedding = {t->embedding, t->is_wide};
    for (long i = 0; i < n; i++) {
        memcpy(cosine + i * half, t->cosine + positions[i] * half, half * sizeof(float));
        memcpy(sine + i * half, t->sine + positions[i] * half, half * sizeof(float));
        for (long c = 0; c < C; c++)
            x[i * C + c] = widen(narrow(weight_at(&embedding, ids[i] * C + c)));
    }
    s->q = q, s->new_k = k, s->new_v = v;
    s->q_row = queries, s->q_head = s->G * s->D, s->q_group = s->D, s->kv_row = keys, s->kv_head = s->D;
    for (const DecoderLayer *l = layers; l < layers + t->layers; l++) {
        s->k = l->k, s->v = l->v, s->prefix_k = l->prefix_k, s->prefix_v = l->prefix_v;
        decoder_before(heads, C, x, l->norm, l->qkv, l->bias, cosine, sine, inverse, q, k, v, NULL, n, threads);
        decode(s, y, threads);
        decoder_after(x, y, l->o, l->norm_after, l->gate_up, l->down, NULL, inverse, NULL, x, NULL, n, C, queries, F,
                       heads->epsilon, threads);
    }
    for (long i = 0; i < n; i++) {
        vec squares = {0};
        for (long c = 0; c < C; c += L)
            squares += load(x + i * C + c) * load(x + i * C + c);
        float scale = 1 / sqrtf(sum(squares) / C + heads->epsilon);
        for (long c = 0; c < C; c += L)
            store(out + i * C + c, load(x + i * C + c) * scale * load(t->norm + c));
    }
}
