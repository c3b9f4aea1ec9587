/* Times the product of a panel of bfloat16 rows with many rows of x in pairs and in
 * floats. All of it lies in the second-level cache, so that the time is that of the
 * arithmetic, which is what the ways differ in: a product that waits for memory takes
 * the same either way. */
#include <string.h>
#include <sys/mman.h>

#include "kernels/cpu/simd/fetch.h"
#include "kernels/cpu/simd/kernels.h"
#include "kernels/cpu/ways/bf16_way.h"

enum {
    COLS = 512,
    X_ROWS = 128,
    X_TILES = X_ROWS / TILE_ROWS,
    REPEATS = 12, /* the least time counts: others are those of interruptions */
};

/* Every value is an ordinary number; rows of w repeat one. */
struct timed_product {
    _Alignas(64) uint16_t w[COLS];
    _Alignas(64) float x[COLS];
    _Alignas(64) float panel[COLS * PANEL_MAX_ROWS + PANEL_SLACK];
    _Alignas(64) float packed[COLS * X_ROWS + PANEL_SLACK];
    _Alignas(64) float sum[PANEL_TILES * TILE_ROWS * PANEL_MAX_ROWS];
};

static void pack_x(struct timed_product *p, const struct cpu_panels *k)
{
    const float *row[TILE_ROWS] = {p->x, p->x, p->x, p->x};

    for (int32_t tile = 0; tile < X_TILES; tile++) {
        k->pack_x(p->packed, tile, X_TILES, row, TILE_ROWS, COLS, COLS, DTYPE_BF16);
    }
}

/* Microseconds; as linear_panels.c does a task. */
static int64_t run(struct timed_product *p, const struct cpu_panels *k)
{
    const void *row[PANEL_MAX_ROWS];
    struct line_prefetch none = {0};

    for (int32_t i = 0; i < k->rows; i++) {
        row[i] = p->w;
    }
    pack_x(p, k);
    int64_t began = clock_us();
    for (int i = 0; i < 2; i++) {
        k->pack_rows(p->panel, row, 0, COLS, DTYPE_BF16);
        for (int32_t tile = 0; tile < X_TILES; tile += PANEL_TILES) {
            k->dots(p->sum, p->panel, p->packed, tile, PANEL_TILES, X_TILES, COLS, DTYPE_BF16,
                    &none);
        }
    }
    return clock_us() - began;
}

bool cpu_bf16_time(enum cpu_bf16 *ret)
{
    struct cpu_kernels pairs, floats;
    int64_t least[2] = {INT64_MAX, INT64_MAX};
    struct timed_product *p =
        mmap(NULL, sizeof(*p), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (p == MAP_FAILED) {
        return false;
    }
    memset(p, 0x3f, sizeof(*p));
    cpu_kernels_for(&pairs, CPU_AVX512_BF16, CPU_BF16_PAIRS);
    cpu_kernels_for(&floats, CPU_AVX512_BF16, CPU_BF16_FLOATS);
    for (int i = 0; i < REPEATS; i++) { /* in turns: the clock rate rises meanwhile */
        least[0] = MIN(least[0], run(p, &pairs.panels_bf16));
        least[1] = MIN(least[1], run(p, &floats.panels_bf16));
    }
    munmap(p, sizeof(*p));
    *ret = cpu_bf16_faster((double)least[0], (double)least[1]);
    return true;
}
