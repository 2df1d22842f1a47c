/* One token of each row on CPU in fp32: its attention, and a whole GPT up to its head. D is a multiple of 32.
 *
 * Called from decode_cache.py and decode_step.py, where the shapes get their names. Decoding reads all keys once
 * for a token, from memory: what is read next is asked for while the last is used.
 */
#include <string.h>

#include "cpu_product.h"
#include "cpu_heads.h"

#define PLACES 32 /* queries whose scores are held at a time */

/* The sums of L vectors, as one vector: pairs are folded into one, again and again. */
static inline __attribute__((always_inline)) vec sums(vec x[L])
{
#pragma GCC unroll 4
    for (int n = L / 2; n; n /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < n; i++)
            x[i] = EVEN(x[2 * i], x[2 * i + 1]) + ODD(x[2 * i], x[2 * i + 1]);
    return x[0];
}

/* out[j] = q . k_j for n keys, and -inf up to a multiple of L. soon: what lies like these and is read next, or NULL. */
static inline __attribute__((always_inline)) void dots_of(const long D, float *out, const float *q,
                                                          const float *k, long stride, long n, const float *soon)
{
    for (long j = 0; j < n; j += L) {
        vec x[L];
        if (soon)
            prefetch(soon + j * stride, L * D);
#pragma GCC unroll 16
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

/* y (vecs * L) += the sum of p[j] v_j over n values. soon: as in dots_of. */
static inline __attribute__((always_inline)) void add_columns(const int vecs, float *y, const float *p, const float *v,
                                                              long stride, long n, const float *soon)
{
    vec acc[4][4] = {0};
    long j = 0;
    for (int c = 0; c < vecs; c++)
        acc[0][c] = load(y + c * L);
    for (; j + 4 <= n; j += 4)
        for (int i = 0; i < 4; i++) {
            if (soon)
                prefetch(soon + (j + i) * stride, vecs * L);
            for (int c = 0; c < vecs; c++)
                acc[i][c] += p[j + i] * load(v + (j + i) * stride + c * L);
        }
    for (; j < n; j++)
        for (int c = 0; c < vecs; c++)
            acc[0][c] += p[j] * load(v + j * stride + c * L);
    for (int c = 0; c < vecs; c++)
        store(y + c * L, acc[0][c] + acc[1][c] + acc[2][c] + acc[3][c]);
}

/* y (D) += the sum of p[j] v_j over n values. soon: as in dots_of. */
static void add_values(float *y, const float *p, const float *v, long stride, long n, long D, const float *soon)
{
    long d = 0;
    for (; L == 16 && d + 4 * L <= D; d += 4 * L)
        add_columns(4, y + d, p, v + d, stride, n, soon ? soon + d : NULL);
    for (; d < D; d += 2 * L)
        add_columns(2, y + d, p, v + d, stride, n, soon ? soon + d : NULL);
}

/* Scores of a row's own keys after those of its prompt; then weights, and 1 / their sum.
 * The query sees `window` positions before its own. soon, prefix_soon: as in dots_of. */
static inline float row_weights(const Decoding *s, float *row, const float *q, const float *k, const float *soon,
                                const float *prefix_k, const float *prefix_soon, long length, long Tp)
{
    long D = s->D, Tpp = up(Tp), sees = length - 1 - s->window; /* own column from which the query sees */
    float highest;
    if (!s->transposed)
        dots(row, q, prefix_k, D, Tp, D, prefix_soon);
    for (long j = Tp; j < Tpp; j++)
        row[j] = -INFINITY;
    for (long j = 0; j < Tp && j < Tp + sees; j++)
        row[j] = -INFINITY;
    dots(row + Tpp, q, k, D, length, D, soon);
    for (long j = 0; j < sees; j++)
        row[Tpp + j] = -INFINITY;
    return 1 / softmax(row, Tpp + up(length), &highest);
}

/* Decoding: puts the new keys and values after each row's own, which are `lengths` then, and attends to all of them.
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
    long chunk = runs >= 4 * threads ? H : 1; /* heads of a row, which lie one after the other */
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
                    long r = (first + i) / G, g = (first + i) % G, place = s->places[r];
                    long at = (place * H + h) * own, length = s->lengths[place];
                    /* The next row's keys and values, or the next head's, are fetched with the row's first query. */
                    long next = (r + 1 < starts[run + 1] ? s->places[r + 1] * H + h
                                                         : s->places[starts[run]] * H + h + (h + 1 < H)) * own;
                    const float *soon_k = g ? NULL : s->k + next, *soon_v = g ? NULL : s->v + next;
                    inverse[i] = row_weights(s, row, q + i * D, s->k + at, soon_k, prefix_k, i ? NULL : prefix_v, length,
                                             Tp);
                    memset(o, 0, D * sizeof(float));
                    if (!s->transposed)
                        add_values(o, row, prefix_v, D, Tp, D, i || h + 1 == H ? NULL : prefix_k + s->Tp * D);
                    add_values(o, row + up(Tp), s->v + at, D, length, D, soon_v);
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

/* A layer of a GPT (decode_step.py). Weights are panels (pack_weight), but for the gate's; embedding: the
 * value embeddings (vocabulary, H * D). The last two may be NULL. */
typedef struct {
    const float *a, *b, *weights, *o, *up, *down;
    float *k, *v; /* these four as in Decoding */
    const float *prefix_k, *prefix_v, *gate, *embedding;
    long window;
} Layer;

/* What layers have in common. */
typedef struct {
    const float *embedding, *smear, *strength, *backout; /* (vocabulary, C), (smear_channels), 1, 1 */
    const float *cosine, *sine;                          /* (positions, D / 2) */
    float *last;                                         /* (places, C): of each place the last token's embedding */
    long layers, middle, C, F, channels, smear_channels;
} Trunk;

/* rows[i] = table[at[i]], of width floats each. */
static void gather(float *rows, const float *table, const long *at, long n, long width, long threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < n; i++)
        memcpy(rows + i * width, table + at[i] * width, width * sizeof(float));
}

/* One token of each row through the trunk of a GPT, ids and positions (n): out (n, C), after the final norm. The keys
 * and values that go after the rows' own are those of this token: s gets them here, and each layer's cache. work:
 * numbers_per_row of decode_step.py for each row. */
void decode_trunk(const Heads *heads, const Trunk *t, const Layer *layers, Decoding *s, const long *ids,
                  const long *positions, float *work, float *out, long threads)
{
    long n = s->n, C = t->C, F = t->F, keys = s->H * s->D, queries = s->G * keys, half = s->D / 2;
    float *cosine = work, *sine = cosine + n * half, *embedding = sine + n * half, *x0 = embedding + n * keys;
    float *x = x0 + n * C, *mixed = x + n * C, *added = mixed + n * C, *middle = added + n * C;
    float *y = middle + n * C, *q = y + n * queries, *k = q + n * queries, *v = k + n * keys, *inner = v + n * keys;
    float *inverse = inner + n * F, *gate = inverse + n, *factors = gate + n * s->H;
    const float one = 1, minus_backout = -*t->backout;
    gather(cosine, t->cosine, positions, n, half, threads);
    gather(sine, t->sine, positions, n, half, threads);
    gather(added, t->embedding, ids, n, C, threads);
    norm_forward(added, NULL, NULL, mixed, inverse, n, C, heads->epsilon, threads);
    gather(added, t->last, s->places, n, C, threads);
    smear_forward(mixed, added, t->smear, t->strength, x0, inverse, n, 1, C, t->smear_channels, threads);
    for (long i = 0; i < n; i++)
        memcpy(t->last + s->places[i] * C, mixed + i * C, C * sizeof(float));
    memcpy(x, x0, n * C * sizeof(float));
    s->q = q, s->new_k = k, s->new_v = v;
    s->q_row = queries, s->q_head = s->G * s->D, s->q_group = s->D, s->kv_row = keys, s->kv_head = s->D;
    for (const Layer *l = layers; l < layers + t->layers; l++) {
        s->k = l->k, s->v = l->v, s->prefix_k = l->prefix_k, s->prefix_v = l->prefix_v, s->window = l->window;
        if (l->embedding)
            gather(embedding, l->embedding, ids, n, keys, threads);
        before_forward(heads, C, t->channels, x, x0, l->a, l->b, l->weights, l->gate, l->embedding ? embedding : NULL,
                       cosine, sine, mixed, inverse, gate, q, k, v, factors, threads);
        decode(s, y, threads);
        after_forward(mixed, y, l->o, l->up, l->down, added, inverse, inner, x, n, C, F, heads->epsilon, threads);
        if (l - layers == t->middle)
            memcpy(middle, x, n * C * sizeof(float));
    }
    mix_forward(x, middle, &one, &minus_backout, mixed, n * C, threads);
    norm_forward(mixed, NULL, NULL, out, inverse, n, C, heads->epsilon, threads);
}
