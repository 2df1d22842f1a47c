/* One token of each row on CPU in fp32: its attention, and a whole GPT up to its head. D is a multiple of 32.
 *
 * Called from decode_cache.py and decode_step.py, where the shapes get their names. Decoding reads all keys once
 * for a token, from memory: what is read next is asked for while the last is used.
 */
#include <string.h>

#include "cpu_product.h"
#include "cpu_heads.h"

#define PLACES 32      /* queries whose scores are held at a time */
#define MOST_QUERIES 4 /* of a row that read a key together */

/* The sums of L vectors, as one vector: pairs are folded into one, again and again. */
static inline __attribute__((always_inline)) vec sums(vec x[L])
{
    for (int n = L / 2; n; n /= 2)
        for (int i = 0; i < n; i++)
            x[i] = EVEN(x[2 * i], x[2 * i + 1]) + ODD(x[2 * i], x[2 * i + 1]);
    return x[0];
}

/* out[j] = q . k_j for n keys, and -inf up to a multiple of L; of G queries, which are D apart and whose outputs are
 * `width` apart. soon: what lies like these keys and is read next. */
static inline __attribute__((always_inline)) void dots_of(const long D, const long G, float *out, long width,
                                                          const float *q, const float *k, long stride, long n,
                                                          const float *soon)
{
    for (long j = 0; j < n; j += L) {
        vec x[MOST_QUERIES][L];
        prefetch(soon + j * stride, L * D);
        for (int i = 0; i < L; i++) {
            const float *key = k + (j + i < n ? j + i : n - 1) * stride;
            for (long g = 0; g < G; g++)
                x[g][i] = load(q + g * D) * load(key);
            for (long d = L; d < D; d += L)
                for (long g = 0; g < G; g++)
                    x[g][i] += load(q + g * D + d) * load(key + d);
        }
        for (long g = 0; g < G; g++)
            store(out + g * width + j, sums(x[g]));
    }
    for (long g = 0; g < G; g++)
        for (long j = n; j < up(n); j++)
            out[g * width + j] = -INFINITY;
}

/* y (D) += the sum of p[j] v_j over n values; of G queries, whose weights are `width` apart and y D. soon: what lies
 * like these values and is read next. */
static inline __attribute__((always_inline)) void values_of(const long G, float *y, const float *p, long width,
                                                            const float *v, long stride, long n, long D,
                                                            const float *soon)
{
    for (long d = 0; d < D; d += L) {
        vec acc[MOST_QUERIES][4];
        for (long g = 0; g < G; g++)
            acc[g][0] = load(y + g * D + d), acc[g][1] = acc[g][2] = acc[g][3] = (vec){0};
        long j = 0;
        for (; j + 4 <= n; j += 4) {
            prefetch(soon + j * stride + 4 * d, 4 * L);
            for (int i = 0; i < 4; i++) {
                vec value = load(v + (j + i) * stride + d);
                for (long g = 0; g < G; g++)
                    acc[g][i] += p[g * width + j + i] * value;
            }
        }
        for (; j < n; j++)
            for (long g = 0; g < G; g++)
                acc[g][0] += p[g * width + j] * load(v + j * stride + d);
        for (long g = 0; g < G; g++)
            store(y + g * D + d, acc[g][0] + acc[g][1] + acc[g][2] + acc[g][3]);
    }
}

/* Calls `of` with a G that the compiler knows. */
#define BY_QUERIES(of, G, ...) \
    switch (G) { \
    case 1: of(1, __VA_ARGS__); break; \
    case 2: of(2, __VA_ARGS__); break; \
    case 3: of(3, __VA_ARGS__); break; \
    default: of(4, __VA_ARGS__); \
    }
#define DOTS_32(G, ...) dots_of(32, G, __VA_ARGS__)
#define DOTS_64(G, ...) dots_of(64, G, __VA_ARGS__)
#define DOTS_128(G, ...) dots_of(128, G, __VA_ARGS__)
#define DOTS(G, ...) dots_of(D, G, __VA_ARGS__)

static void dots(long G, float *out, long width, const float *q, const float *k, long stride, long n, long D,
                 const float *soon)
{
    switch (D) {
    case 32: BY_QUERIES(DOTS_32, G, out, width, q, k, stride, n, soon) break;
    case 64: BY_QUERIES(DOTS_64, G, out, width, q, k, stride, n, soon) break;
    case 128: BY_QUERIES(DOTS_128, G, out, width, q, k, stride, n, soon) break;
    default: BY_QUERIES(DOTS, G, out, width, q, k, stride, n, soon)
    }
}

static void add_values(long G, float *y, const float *p, long width, const float *v, long stride, long n, long D,
                       const float *soon)
{
    BY_QUERIES(values_of, G, y, p, width, v, stride, n, D, soon)
}

/* Scores of a row's own keys behind those of its prompt; then weights. Of G queries, which see `window` positions
 * before their own; inverse (G): 1 / the sum of the weights. */
static inline void row_weights(const Decoding *s, long G, float *row, long width, const float *q, const float *k,
                               const float *v, const float *prefix_k, const float *prefix_v, long length, long Tp,
                               float *inverse)
{
    long D = s->D, Tpp = up(Tp), sees = length - 1 - s->window; /* own column from which the query sees */
    float highest;
    if (!s->transposed)
        dots(G, row, width, q, prefix_k, D, Tp, D, prefix_v);
    dots(G, row + Tpp, width, q, k, D, length, D, v);
    for (long g = 0; g < G; g++, row += width) {
        for (long j = Tp; j < Tpp; j++)
            row[j] = -INFINITY;
        for (long j = 0; j < Tp && j < Tp + sees; j++)
            row[j] = -INFINITY;
        for (long j = 0; j < sees; j++)
            row[Tpp + j] = -INFINITY;
        inverse[g] = 1 / softmax(row, Tpp + up(length), &highest);
    }
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
                for (long i = 0, some; i < m; i += some) { /* queries of one row */
                    float *row = scores + i * width, *o = out + i * D;
                    long place = s->places[(first + i) / G], at = (place * H + h) * own, length = s->lengths[place];
                    some = G - (first + i) % G;
                    some = some > MOST_QUERIES ? MOST_QUERIES : some;
                    some = some > m - i ? m - i : some;
                    /* The next row's keys, or those of the next head. */
                    long next = i + some < m ? (s->places[(first + i + some) / G] * H + h) * own
                                             : (s->places[first / G] * H + h + (h + 1 < H)) * own;
                    row_weights(s, some, row, width, q + i * D, s->k + at, s->v + at, prefix_k, prefix_v, length, Tp,
                                inverse + i);
                    memset(o, 0, some * D * sizeof(float));
                    if (!s->transposed)
                        add_values(some, o, row, width, prefix_v, D, Tp, D,
                                   prefix_k + (i + some == m && h + 1 < H) * s->Tp * D);
                    add_values(some, o, row + up(Tp), width, s->v + at, D, length, D, s->k + next);
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

/* A layer of a GPT: _Layer of decode_step.py. Weights are panels (pack_weight), but for the gate's; embedding: the
 * value embeddings (vocabulary, H * D). The last two may be NULL. */
typedef struct {
    const float *a, *b, *weights, *o, *up, *down;
    float *k, *v; /* these four as in Decoding */
    const float *prefix_k, *prefix_v, *gate, *embedding;
    long window;
} Layer;

/* What layers have in common: _Trunk of decode_step.py. */
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
 * and values that go behind the rows' own are those of this token: s gets them here, and each layer's cache. work:
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
        behind_forward(mixed, y, l->o, l->up, l->down, added, inverse, inner, x, n, C, F, heads->epsilon, threads);
        if (l - layers == t->middle)
            memcpy(middle, x, n * C * sizeof(float));
    }
    mix_forward(x, middle, &one, &minus_backout, mixed, n * C, threads);
    norm_forward(mixed, NULL, NULL, out, inverse, n, C, heads->epsilon, threads);
}
