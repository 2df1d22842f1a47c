/* Products of matrices on CPU with operands in bf16 and sums in fp32, and their weights' panels. Called from tiles.py. */
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include "cpu_tiles.h"

/* 1: this processor multiplies bf16 faster than fp32. Where it does so in tiles, Linux lets this process do it (asked
 * once: threads to come have it); -1: it does not, and the kernels must not be called. 0: they do without. */
long has_bf16(long threads)
{
    (void)threads;
#if defined(__AMX_BF16__) && defined(SYS_arch_prctl)
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0 ? 1 : -1;
#elif defined(__AMX_BF16__)
    return -1;
#elif defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

/* panels of w (n, k), for x @ w^T. every: a panel goes to each such place, from `first` on, so that two weights'
 * panels can alternate. */
void pack_tiles(const Weight *w, bf16 *panels, long n, long k, long first, long every, long threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long j = 0; j < n; j += STRIP)
        pack_panel(panels + (first + j / STRIP * every) * STRIP * k, w, j, k);
}

/* The panels' rows [from, from + n) of `deep`, from w (n, k), for x @ w. */
void pack_tiles_back(const Weight *w, bf16 *panels, long n, long k, long from, long deep, long threads)
{
#pragma omp parallel num_threads(threads)
    {
        bf16 *rows = halves(DEEP * k);
#pragma omp for schedule(dynamic)
        for (long p = 0; p < n; p += DEEP) {
            narrow_weight(rows, w, p * k, DEEP * k);
            pack_block(panels, rows, k, k, from + p, deep, 0);
        }
        free(rows);
    }
}

/* c (m, STRIP) = a (m, k) @ a panel, where c is wide and its rows lie far apart: they are written in whole lines, which
 * need not be read before. */
static void strip_out(float *c, long ldc, const bf16 *a, long stride, const bf16 *panel, long m, long k)
{
    float sums[2 * SIDE * STRIP] __attribute__((aligned(64)));
    for (long i = 0; i < m; i += 2 * SIDE) {
        long rows = least(2 * SIDE, m - i);
        multiply(rows > SIDE ? 2 : 1, sums, STRIP, a + i * stride, SIDE * stride, DEEP, stride, panel, k, 0,
                 panel, 0);
        for (long r = 0; r < rows; r++)
            for (long j = 0; j < STRIP; j += L)
                put_away(c + (i + r) * ldc + j, load(sums + r * STRIP + j));
    }
}

/* c (m, n) = a (m, k) @ panels. c begins at a multiple of 64 bytes. */
void tiles_product(const float *a, const bf16 *panels, float *c, long m, long n, long k, long threads)
{
    long rows = least(512, (m + SIDE - 1) / SIDE * SIDE), pieces = (m + rows - 1) / rows;
    long strips = pieces >= threads ? n / STRIP : 64; /* of a unit of work */
    long parts = (n / STRIP + strips - 1) / strips;
    bf16 *narrowed = halves(pieces * rows * k);
#pragma omp parallel num_threads(threads)
    {
        begin_tiles();
#pragma omp for schedule(dynamic, 16)
        for (long i = 0; i < pieces * rows; i++)
            if (i < m)
                narrow_row(narrowed + i * k, a + i * k, k);
            else
                memset(narrowed + i * k, 0, k * sizeof(bf16));
#pragma omp for schedule(dynamic)
        for (long unit = 0; unit < pieces * parts; unit++) {
            long i = unit / parts * rows, j = unit % parts * strips * STRIP;
            for (long end = least(n, j + strips * STRIP); j < end; j += STRIP)
                strip_out(c + i * n + j, n, narrowed + i * k, k, panels + j * k, least(rows, m - i), k);
            arrive();
        }
        end_tiles();
    }
    free(narrowed);
}

/* grad (n, k) += a^T @ b, a (N, n), b (N, k). */
void tiles_gradient(const float *a, const float *b, float *grad, long N, long n, long k, long threads)
{
    long blocks = (N + DEEP - 1) / DEEP;
    bf16 *left = halves(blocks * DEEP * n), *right = halves(blocks * DEEP * k);
#pragma omp parallel num_threads(threads)
    {
        bf16 *rows = halves(DEEP * (n > k ? n : k));
        begin_tiles();
#pragma omp for schedule(dynamic)
        for (long block = 0; block < blocks; block++) {
            long m = least(DEEP, N - block * DEEP);
            narrow_row(rows, a + block * DEEP * n, m * n);
            memset(rows + m * n, 0, (DEEP - m) * n * sizeof(bf16));
            put_left(left, rows, n, block, blocks);
            narrow_row(rows, b + block * DEEP * k, m * k);
            memset(rows + m * k, 0, (DEEP - m) * k * sizeof(bf16));
            pack_block(right, rows, k, k, block * DEEP, blocks * DEEP, 1);
            arrive();
        }
        weight_gradient(grad, left, right, n, k, blocks, 1);
        end_tiles();
        free(rows);
    }
    free(left), free(right);
}
