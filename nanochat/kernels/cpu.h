/* What the CPU kernels share: vectors of L floats, sums and e^x.
 *
 * The vectors are GCC's and Clang's, as long as the machine's or, without AVX-512, twice NEON's. Compilers keep longer
 * ones in memory, which makes products eight times slower.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef __AVX512F__
#define L 16     /* floats in a vector */
#else
#define L 8
#endif

typedef float vec __attribute__((vector_size(4 * L)));
typedef float loose __attribute__((vector_size(4 * L), aligned(4), may_alias));
typedef int ivec __attribute__((vector_size(4 * L)));

static inline vec load(const float *p) { return *(const loose *)p; }
static inline void store(float *p, vec x) { *(loose *)p = x; }
static inline vec splat(float x) { return x - (vec){0}; }
static inline vec choose(ivec mask, vec a, vec b) { return (vec)(((ivec)a & mask) | ((ivec)b & ~mask)); }
static inline vec larger(vec a, vec b) { return choose(a > b, a, b); } /* b where one is NaN */
static inline long least(long a, long b) { return a < b ? a : b; }
static inline long up(long n) { return (n + L - 1) / L * L; }

/* Room for n floats. Without memory the process ends: there is no one to tell. */
static float *floats(long n)
{
    float *x = aligned_alloc(64, ((size_t)n * sizeof(float) + 64) / 64 * 64); /* macOS wants a multiple */
    if (!x) {
        fprintf(stderr, "CPU kernels: no memory for %ld floats\n", n);
        abort();
    }
    return x;
}

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif
#if L == 16
#define EVEN(a, b) SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODD(a, b) SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
#define ZIP_LOW(a, b) SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define ZIP_HIGH(a, b) SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define SWAP_8(x) SHUFFLE(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7) /* groups of 8 change places */
#define SWAP_4(x) SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
#define SWAP_2(x) SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
#define SWAP_1(x) SHUFFLE(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)
#else
#define EVEN(a, b) SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14)
#define ODD(a, b) SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15)
#define ZIP_LOW(a, b) SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define ZIP_HIGH(a, b) SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#define SWAP_4(x) SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3)
#define SWAP_2(x) SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5)
#define SWAP_1(x) SHUFFLE(x, x, 1, 0, 3, 2, 5, 4, 7, 6)
#endif

/* By halves: L additions would wait for one another. */
static inline float sum(vec x)
{
#if L == 16
    x += SWAP_8(x);
#endif
    x += SWAP_4(x), x += SWAP_2(x), x += SWAP_1(x);
    return x[0];
}

static inline float maximum(vec x)
{
#if L == 16
    x = larger(x, SWAP_8(x));
#endif
    x = larger(x, SWAP_4(x)), x = larger(x, SWAP_2(x)), x = larger(x, SWAP_1(x));
    return x[0];
}

/* e^x to 2 units in the last place, x below 88; 0 below -87, NaN of NaN.
 * x = n ln 2 + f, |f| <= ln 2 / 2, and a polynomial for e^f. */
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

/* The logit of z with a softcap S and a temperature T: S tanh(z / S) / T + S / T = c / (1 + e^(-2 z / S)), c = 2 S / T.
 * A softmax does not see the constant S / T. S = 0: z / T. */
static inline vec logit(vec z, float S, float T)
{
    vec power = z * (-2 / S);
    return S ? 2 * S / T / (1 + exponential(choose(power > 80, splat(80), power))) : T == 1 ? z : z / T;
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

static inline void prefetch(const float *x, long n)
{
    for (long i = 0; i < n; i += L)
        __builtin_prefetch(x + i, 0, 2);
}

static inline void zip(vec *y, const vec *x)
{
    for (int i = 0; i < L / 2; i++) {
        y[2 * i] = ZIP_LOW(x[i], x[i + L / 2]);
        y[2 * i + 1] = ZIP_HIGH(x[i], x[i + L / 2]);
    }
}

/* out (L, L), rows ld apart, = scale * x^T of the first n rows of x, 0 for others.
 * Zipping L vectors log2(L) times transposes them. */
static inline void transpose_tile(float *out, long ld, const float *x, long stride, long n, float scale)
{
    vec a[L], b[L];
    for (int i = 0; i < L; i++)
        a[i] = i < n ? load(x + i * stride) * scale : (vec){0};
    zip(b, a), zip(a, b), zip(b, a);
#if L == 16
    zip(a, b);
#endif
    for (int i = 0; i < L; i++)
        store(out + i * ld, L == 16 ? a[i] : b[i]);
}
