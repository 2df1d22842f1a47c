/* Products of matrices on CPU in fp32, for operands that lie in the caches. */
#include "cpu.h"

#define TILE (L == 16 ? 8 : 6) /* rows of a tile, whose vectors fill the registers */

/* A tile of a product: `rows` x `vecs` vectors of c, plus or equal to a @ b over k; a is read at a[i * ra + p * ca]. */
static inline __attribute__((always_inline)) void tile(const int rows, const int vecs, float *c, long ldc,
                                                       const float *a, const long ra, const long ca,
                                                       const float *b, long ldb, long k, int add)
{
    vec acc[8][2];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vecs; j++)
            acc[i][j] = add ? load(c + i * ldc + j * L) : (vec){0};
    for (long p = 0; p < k; p++) {
        vec b0 = load(b + p * ldb), b1 = vecs == 2 ? load(b + p * ldb + L) : (vec){0};
        for (int i = 0; i < rows; i++) {
            vec x = splat(a[i * ra + p * ca]);
            acc[i][0] += x * b0;
            if (vecs == 2)
                acc[i][1] += x * b1;
        }
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vecs; j++)
            store(c + i * ldc + j * L, acc[i][j]);
}

static inline __attribute__((always_inline)) void columns(const int vecs, float *c, long ldc,
                                                          const float *a, const long ra, const long ca,
                                                          const float *b, long ldb, long m, long k, int add)
{
    long i = 0;
    for (; i + TILE <= m; i += TILE)
        tile(TILE, vecs, c + i * ldc, ldc, a + i * ra, ra, ca, b, ldb, k, add);
    for (; i + 2 <= m; i += 2)
        tile(2, vecs, c + i * ldc, ldc, a + i * ra, ra, ca, b, ldb, k, add);
    for (; i < m; i++)
        tile(1, vecs, c + i * ldc, ldc, a + i * ra, ra, ca, b, ldb, k, add);
}

/* c (m, n) = or += a (m, k) @ b (k, n), n a multiple of L. */
static void product(float *c, long ldc, const float *a, long lda, const float *b, long ldb,
                    long m, long n, long k, int add)
{
    for (long j = 0; j < n; j += 2 * L)
        if (n - j > L)
            columns(2, c + j, ldc, a, lda, 1, b + j, ldb, m, k, add);
        else
            columns(1, c + j, ldc, a, lda, 1, b + j, ldb, m, k, add);
}

/* c (m, n) = or += a^T @ b, a (k, m). */
static void product_t(float *c, long ldc, const float *a, long lda, const float *b, long ldb,
                      long m, long n, long k, int add)
{
    for (long j = 0; j < n; j += 2 * L)
        if (n - j > L)
            columns(2, c + j, ldc, a, 1, lda, b + j, ldb, m, k, add);
        else
            columns(1, c + j, ldc, a, 1, lda, b + j, ldb, m, k, add);
}

/* Weights are packed once for many rows: panels of PANEL columns, (n / PANEL, k, PANEL), so that a tile reads them in
 * order whatever the width. n is a multiple of PANEL. */
#define PANEL (2 * L)

/* The panels of b = w^T from row `from` of k on, where w is (n, k) and b (all, n). */
static void pack_transposed(float *panels, const float *w, long n, long k)
{
    for (long j = 0; j < n; j += L)
        for (long p = 0; p < k; p += L)
            transpose_tile(panels + j / PANEL * k * PANEL + p * PANEL + j % PANEL, PANEL, w + j * k + p, k, L, 1);
}

/* The panels' rows [from, from + m) of `k`, from w (m, n). */
static void pack_rows(float *panels, const float *w, long m, long n, long k, long from)
{
    for (long j = 0; j < n; j += PANEL)
        for (long p = 0; p < m; p++)
            for (long i = 0; i < PANEL; i += L)
                store(panels + j * k + (from + p) * PANEL + i, load(w + p * n + j + i));
}

/* c (m, n) = or += a (m, k) @ b, b in panels. */
static void product_packed(float *c, long ldc, const float *a, long lda, const float *panels,
                           long m, long n, long k, int add)
{
    for (long j = 0; j < n; j += PANEL)
        columns(2, c + j, ldc, a, lda, 1, panels + j * k, PANEL, m, k, add);
}
