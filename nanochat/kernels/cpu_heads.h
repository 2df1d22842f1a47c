/* The heads of queries, keys and values, on CPU in fp32: rotated, normed, and laid out as attention wants them. */

typedef struct {
    long U, R, T, Hq, Hkv, D; /* D a multiple of 32 */
    float scale, epsilon;
} Heads;

/* The tensors of decoding (DecodeCache.spec). Each row has one query, and a place where its own keys and
 * values are; rows of one slot continue the same prompt, whose keys come transposed where many rows read them. */
typedef struct {
    const float *q, *new_k, *new_v; /* (n, H, G, D), (n, H, D) twice */
    float *k, *v;                   /* (places, H, capacity, D) */
    const float *prefix_k, *prefix_v; /* (slots, H, Tp, D), or keys (slots, H, D, Tp) */
    const long *places, *lengths, *slots, *prefix_lengths; /* (n), (places), (places), (slots) */
    long n, H, G, D, capacity, Tp, transposed, window;
    long q_row, q_head, q_group, kv_row, kv_head; /* strides of q, new_k and new_v */
} Decoding;

/* Called from other files than their own: cpu_layer.c, cpu_block.c and cpu_decode.c. */
void before_forward(const Heads *s, long C, long channels, const float *x, const float *x0, const float *a,
                    const float *b, const float *weights, const float *w_gate, const float *embedding,
                    const float *cosine, const float *sine, float *mixed, float *inverse, float *gate, float *q,
                    float *k, float *v, float *factors, long threads);
void after_forward(const float *x, const float *y, const float *o, const float *in, const float *down, float *added,
                    float *inverse, float *up, float *out, long N, long C, long F, float epsilon, long threads);
void norm_forward(const float *x, const float *delta, float *added, float *y, float *inverse, long rows, long C,
                  float epsilon, long threads);
void mix_forward(const float *x, const float *x0, const float *a, const float *b, float *y, long n, long threads);
void smear_forward(const float *x, const float *first, const float *w, const float *strength, float *y, float *gates,
                   long B, long T, long C, long channels, long threads);
void decode(const Decoding *s, float *y, long threads);

/* One head: out = scale * y / rms(y), y = x rotated by minus the angle. Returns scale / rms. */
static inline float rotate(const Heads *s, float *out, const float *x, const float *cosine, const float *sine)
{
    long half = s->D / 2;
    vec squares = {0};
    for (long d = 0; d < half; d += L) {
        vec a = load(x + d), b = load(x + half + d), c = load(cosine + d), e = load(sine + d);
        vec ya = a * c + b * e, yb = b * c - a * e;
        store(out + d, ya), store(out + half + d, yb);
        squares += ya * ya + yb * yb;
    }
    float factor = s->scale / sqrtf(sum(squares) / s->D + s->epsilon);
    for (long d = 0; d < s->D; d += L)
        store(out + d, load(out + d) * factor);
    return factor;
}

static inline void rotate_back(const Heads *s, float *grad_x, const float *grad, const float *out, float factor,
                               const float *cosine, const float *sine)
{
    long half = s->D / 2;
    vec products = {0};
    for (long d = 0; d < s->D; d += L)
        products += load(grad + d) * load(out + d);
    float mean = sum(products) / (s->D * s->scale * s->scale);
    for (long d = 0; d < half; d += L) {
        vec a = (load(grad + d) - load(out + d) * mean) * factor;
        vec b = (load(grad + half + d) - load(out + half + d) * mean) * factor;
        vec c = load(cosine + d), e = load(sine + d);
        store(grad_x + d, a * c - b * e), store(grad_x + half + d, b * c + a * e);
    }
}

/* One row x ((Hq + 2 Hkv) D) of token n -> its places in q (U*R, T, Hq, D) and k (U, Hkv, R, T, D), both rotated and
 * normed, and in v, which lies like k, plus gate (U*R*T, Hkv) * embedding (U*R*T, Hkv * D) where there is one.
 * cosine, sine (U*R*T, D/2); factors (U*R*T, Hq + Hkv) for the backward pass. */
static inline void split_row(const Heads *s, long n, const float *row, const float *cosine, const float *sine,
                             const float *gate, const float *embedding, float *q, float *k, float *v, float *factors)
{
    long D = s->D, Hq = s->Hq, Hkv = s->Hkv, T = s->T, R = s->R, t = n % T, r = n / T % R, u = n / T / R;
    const float *c = cosine + n * D / 2, *e = sine + n * D / 2;
    float *factor = factors + n * (Hq + Hkv);
    for (long h = 0; h < Hq; h++)
        factor[h] = rotate(s, q + (n * Hq + h) * D, row + h * D, c, e);
    for (long h = 0; h < Hkv; h++) {
        long at = (((u * Hkv + h) * R + r) * T + t) * D;
        const float *value = row + (Hq + Hkv + h) * D;
        factor[Hq + h] = rotate(s, k + at, row + (Hq + h) * D, c, e);
        for (long d = 0; d < D; d += L)
            store(v + at + d, gate ? load(value + d) + gate[n * Hkv + h] * load(embedding + (n * Hkv + h) * D + d)
                                   : load(value + d));
    }
}

/* The gradients of the row, of its gates (Hkv) and of its embedding, from those of q, k and v, which lie like these. */
static inline void split_row_back(const Heads *s, long n, const float *grad_q, const float *grad_k,
                                  const float *grad_v, const float *q, const float *k, const float *factors,
                                  const float *cosine, const float *sine, const float *gate, const float *embedding,
                                  float *row, float *grad_gate, float *grad_embedding)
{
    long D = s->D, Hq = s->Hq, Hkv = s->Hkv, T = s->T, R = s->R, t = n % T, r = n / T % R, u = n / T / R;
    const float *c = cosine + n * D / 2, *e = sine + n * D / 2, *factor = factors + n * (Hq + Hkv);
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
            grad_gate[h] = sum(products);
    }
}
