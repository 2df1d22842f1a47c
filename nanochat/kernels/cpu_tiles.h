/* Products of matrices on CPU whose operands are rounded to bf16 and whose sums are fp32: by AMX's tiles, by AVX-512's
 * dot products of pairs, or by what every compiler has. All three read the same layouts.
 *
 * A tile of the left operand has SIDE rows of DEEP numbers; one of the right operand has DEEP rows and SIDE columns, of
 * which two rows lie zipped: (DEEP / 2, SIDE, 2). A panel of the right operand has STRIP columns: for each DEEP rows
 * two tiles side by side. All numbers of rows and columns are multiples of 32, but for the left operand's rows.
 */
#include <stdint.h>
#include <string.h>

#include "cpu.h"
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define SIDE 16
#define DEEP 32
#define STRIP 32
#define TILE_SIZE (SIDE * DEEP)
#define AT_A_TIME 32 /* blocks of DEEP tokens that a weight's gradient takes in at once, */
#define PANELS 20    /* and panels: together 1.25 MiB of bf16 */
#define FEW 128 /* rows up to which a panel is not yet in the caches when it is needed */

typedef uint16_t bf16;

static inline float widen(bf16 x)
{
    union { uint32_t bits; float value; } y = {(uint32_t)x << 16};
    return y.value;
}

static inline bf16 narrow(float x)
{
    union { float value; uint32_t bits; } y = {x};
    return x != x ? y.bits >> 16 | 64 : (y.bits + 0x7fff + (y.bits >> 16 & 1)) >> 16;
}

/* out = n numbers rounded to bf16, n a multiple of 32. */
static inline void narrow_row(bf16 *out, const float *x, long n)
{
#ifdef __AVX512BF16__
    for (long i = 0; i < n; i += 32)
        _mm512_storeu_si512(out + i, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + i + 16), _mm512_loadu_ps(x + i)));
#else
    for (long i = 0; i < n; i++)
        out[i] = narrow(x[i]);
#endif
}

/* Puts a vector where it will not be read soon: past the caches, at a multiple of its size. Before another thread reads
 * it, the one that wrote must say `arrive`: a barrier does not wait for such writes. */
static inline void put_away(float *p, vec x)
{
#ifdef __AVX512F__
    _mm512_stream_ps(p, (__m512)x);
#else
    store(p, x);
#endif
}

static inline void arrive(void)
{
#ifdef __AVX512F__
    _mm_sfence();
#endif
}

static bf16 *halves(long n) { return (bf16 *)floats((n + 1) / 2); }

/* A weight as Python has it: fp32, or bf16 already. */
typedef struct {
    const void *numbers;
    long is_wide;
} Weight;

static inline float weight_at(const Weight *w, long i)
{
    return w->is_wide ? ((const float *)w->numbers)[i] : widen(((const bf16 *)w->numbers)[i]);
}

static inline void narrow_weight(bf16 *out, const Weight *w, long from, long n)
{
    if (w->is_wide)
        narrow_row(out, (const float *)w->numbers + from, n);
    else
        memcpy(out, (const bf16 *)w->numbers + from, n * sizeof(bf16));
}

/* A tile of DEEP rows and SIDE columns, zipped, is that of the transpose, (SIDE, DEEP), with pairs for numbers. */
static inline __attribute__((always_inline)) void turn_tile(bf16 *out, const bf16 *x, long stride, const int far)
{
#if L == 16
    vec a[16], b[16];
    for (int i = 0; i < 16; i++)
        memcpy(a + i, x + i * stride, sizeof(vec));
    zip(b, a), zip(a, b), zip(b, a), zip(a, b);
    for (int i = 0; i < 16; i++)
        if (far)
            put_away((float *)(out + i * DEEP), a[i]);
        else
            store((float *)(out + i * DEEP), a[i]);
#else
    for (int i = 0; i < SIDE; i++)
        for (int p = 0; p < DEEP; p += 2)
            memcpy(out + p * SIDE + 2 * i, x + i * stride + p, 2 * sizeof(bf16));
#endif
}

/* Two rows of 32 numbers, zipped: those of the first 16 columns go to `out`, the others TILE_SIZE after. */
static inline __attribute__((always_inline)) void zip_rows(bf16 *out, const bf16 *a, const bf16 *b, const int far)
{
#if defined(__AVX512BW__)
    static const uint16_t low[32] = {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
                                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b), first = _mm512_loadu_si512(low);
    __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    vec u = (vec)_mm512_permutex2var_epi16(x, first, y), v = (vec)_mm512_permutex2var_epi16(x, second, y);
    if (far)
        put_away((float *)out, u), put_away((float *)(out + TILE_SIZE), v);
    else
        store((float *)out, u), store((float *)(out + TILE_SIZE), v);
#else
    for (int c = 0; c < 32; c++) {
        bf16 *to = out + (c / 16) * TILE_SIZE + 2 * (c % 16);
        to[0] = a[c], to[1] = b[c];
    }
#endif
}

/* The panel of rows [j, j + STRIP) of w (n, k): the right operand of y = x @ w^T. */
static void pack_panel(bf16 *panel, const Weight *w, long j, long k)
{
    bf16 *rows = halves(STRIP * k);
    for (long i = 0; i < STRIP; i++)
        narrow_weight(rows + i * k, w, (j + i) * k, k);
    for (long p = 0; p < k; p += DEEP)
        for (int half = 0; half < 2; half++)
            turn_tile(panel + p * STRIP + half * TILE_SIZE, rows + half * SIDE * k + p, k, 0);
    free(rows);
}

/* Rows [p, p + DEEP) of bf16 numbers (.., n) of the panels that make the right operand itself: (n / STRIP, deep, STRIP).
 * far: they are put away. */
static inline __attribute__((always_inline)) void pack_block(bf16 *panels, const bf16 *rows, long stride, long n, long p,
                                                             long deep, const int far)
{
    for (long j = 0; j < n; j += STRIP)
        for (long i = 0; i < DEEP; i += 2)
            zip_rows(panels + j * deep + p * STRIP + i * SIDE, rows + i * stride + j, rows + (i + 1) * stride + j, far);
}

#ifdef __AMX_BF16__
static const struct {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} TILES = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
#define begin_tiles() _tile_loadconfig(&TILES)
#define end_tiles() _tile_release()

/* c (16 * sides, 32) = or += a @ a panel. a: its tile (i, p) is at a + i * side + p / DEEP * deep, with rows `stride`
 * numbers apart. soon: what is read next, of which each DEEP rows fetch `fetched` lines of 64 bytes. */
static inline __attribute__((always_inline)) void multiply(const int sides, float *c, long ldc, const bf16 *a, long side,
                                                           long deep, long stride, const bf16 *panel, long k, int add,
                                                           const bf16 *soon, long fetched)
{
    long bytes = ldc * sizeof(float);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (add) {
        _tile_loadd(0, c, bytes);
        _tile_loadd(1, c + SIDE, bytes);
    }
    if (add && sides == 2) {
        _tile_loadd(2, c + SIDE * ldc, bytes);
        _tile_loadd(3, c + SIDE * ldc + SIDE, bytes);
    }
    for (long p = 0; p < k; p += DEEP, a += deep, panel += 2 * TILE_SIZE) {
        for (long i = 0; i < fetched; i++, soon += DEEP)
            __builtin_prefetch(soon, 0, 2);
        _tile_loadd(4, a, stride * sizeof(bf16));
        _tile_loadd(6, panel, 64);
        _tile_loadd(7, panel + TILE_SIZE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (sides == 2) {
            _tile_loadd(5, a + side, stride * sizeof(bf16));
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, bytes);
    _tile_stored(1, c + SIDE, bytes);
    if (sides == 2) {
        _tile_stored(2, c + SIDE * ldc, bytes);
        _tile_stored(3, c + SIDE * ldc + SIDE, bytes);
    }
}
#else
#define begin_tiles() ((void)0)
#define end_tiles() ((void)0)
#define AT_ONCE 8 /* rows whose sums are held */

static inline vec add_pairs(vec total, int32_t pair, ivec pairs)
{
#if defined(__AVX512BF16__) && L == 16
    return (vec)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)pairs);
#else
    union { int32_t bits; float value; } low = {pair << 16}, high = {pair & (int32_t)0xffff0000};
    return total + low.value * (vec)(pairs << 16) + high.value * (vec)(pairs & (int)0xffff0000);
#endif
}

static inline void multiply(const int sides, float *c, long ldc, const bf16 *a, long side, long deep, long stride,
                            const bf16 *panel, long k, int add, const bf16 *soon, long fetched)
{
    for (int i = 0; i < sides * SIDE; i += AT_ONCE)
        for (int j = 0; j < STRIP; j += L) {
            vec total[AT_ONCE];
            float *to = c + i * ldc + j;
            const bf16 *rows = a + i / SIDE * side + i % SIDE * stride, *b = panel + j / SIDE * TILE_SIZE + j % SIDE * 2;
            for (int r = 0; r < AT_ONCE; r++)
                total[r] = add ? load(to + r * ldc) : (vec){0};
            for (long p = 0; p < k; p += DEEP, rows += deep, b += 2 * TILE_SIZE)
                for (int q = 0; q < DEEP; q += 2) {
                    ivec pairs;
                    memcpy(&pairs, b + q * SIDE, sizeof(ivec));
                    for (int r = 0; r < AT_ONCE; r++) {
                        int32_t pair;
                        memcpy(&pair, rows + r * stride + q, sizeof(pair));
                        total[r] = add_pairs(total[r], pair, pairs);
                    }
                }
            for (int r = 0; r < AT_ONCE; r++)
                store(to + r * ldc, total[r]);
        }
}
#endif

/* c (m, 32) = or += a (m, k) @ a panel. a: bf16 rows, of which there are as many as tiles read. The panel after it is
 * fetched meanwhile: decoding reads each once, from memory. */
static void strip(float *c, long ldc, const bf16 *a, long stride, const bf16 *panel, long m, long k, int add)
{
    const bf16 *soon = panel + STRIP * k;
    long i = 0, fetched = m <= FEW ? 2 * STRIP * SIDE / (m > SIDE ? m : SIDE) : 0;
    for (; i + 2 * SIDE <= m; i += 2 * SIDE, soon += fetched * k)
        multiply(2, c + i * ldc, ldc, a + i * stride, SIDE * stride, DEEP, stride, panel, k, add, soon, fetched);
    for (; i < m; i += SIDE, soon += fetched * k) {
        float rest[SIDE * STRIP] = {0};
        long rows = m - i < SIDE ? m - i : SIDE;
        for (long r = 0; add && r < rows; r++)
            memcpy(rest + r * STRIP, c + (i + r) * ldc, STRIP * sizeof(float));
        multiply(1, rest, STRIP, a + i * stride, SIDE * stride, DEEP, stride, panel, k, add, soon, fetched);
        for (long r = 0; r < rows; r++)
            memcpy(c + (i + r) * ldc, rest + r * STRIP, STRIP * sizeof(float));
    }
}

/* c (m, n) = or += a (m, k) @ b, b in panels. */
static void product_tiles(float *c, long ldc, const bf16 *a, long stride, const bf16 *panels, long m, long n, long k,
                          int add)
{
    for (long j = 0; j < n; j += STRIP)
        strip(c + j, ldc, a, stride, panels + j * k, m, k, add);
}

/* The two operands of a^T @ b over N tokens, as they are met: blocks of DEEP tokens of each. left (n / SIDE, blocks)
 * tiles of a^T, right: panels of b. */
static void put_left(bf16 *left, const bf16 *rows, long n, long block, long blocks)
{
    bf16 zipped[2 * TILE_SIZE];
    for (long j = 0; j < n; j += STRIP) {
        for (long i = 0; i < DEEP; i += 2)
            zip_rows(zipped + i * SIDE, rows + i * n + j, rows + (i + 1) * n + j, 0);
        for (int half = 0; half < 2; half++)
            turn_tile(left + ((j / SIDE + half) * blocks + block) * TILE_SIZE, zipped + half * TILE_SIZE, DEEP, 1);
    }
}

/* grad (n, k) = or += a^T @ b. To be called by all threads of a team. */
static void weight_gradient(float *grad, const bf16 *left, const bf16 *right, long n, long k, long blocks, int add)
{
    if (!blocks && !add) {
#pragma omp single
        memset(grad, 0, n * k * sizeof(float));
    }
    for (long from = 0; from < blocks; from += AT_A_TIME)
        for (long begin = 0; begin < k; begin += PANELS * STRIP) {
            long deep = least(AT_A_TIME, blocks - from), end = least(k, begin + PANELS * STRIP);
#pragma omp for schedule(dynamic)
            for (long i = 0; i < n; i += 2 * SIDE)
                for (long j = begin; j < end; j += STRIP)
                    multiply(2, grad + i * k + j, k, left + (i / SIDE * blocks + from) * TILE_SIZE, blocks * TILE_SIZE,
                             TILE_SIZE, DEEP, right + j * blocks * DEEP + from * DEEP * STRIP, deep * DEEP,
                             add || from > 0, right, 0);
        }
}
