/* Software prefetch of the tiles, and the INLINE macro of all inner loops. */
#ifndef QUIRE_KERNELS_CPU_SIMD_FETCH_H
#define QUIRE_KERNELS_CPU_SIMD_FETCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

/* Prefetch a cache line for writing, taking it from the other cores' caches. A no-op on
 * processors that do not know the instruction. */
INLINE void fetch_to_write(const void *line)
{
#if defined(__x86_64__)
    __asm__ volatile("prefetchw %0" : : "m"(*(const char *)line));
#else
    __builtin_prefetch(line, 1, 3);
#endif
}

/* What a loop over a row's bytes prefetches. */
struct row_fetch {
    int64_t distance; /* bytes ahead of those that it reads; 0: nothing */
    bool far;         /* into the second-level cache, not the first */
};

/* To be called for each `n` bytes of a row, a constant, with where they begin. */
INLINE void fetch_row(struct row_fetch f, const uint8_t *at, const int n)
{
    if (f.distance == 0) {
        return;
    }
    if (f.far) {
        for (int line = 0; line < n; line += 64) {
            __builtin_prefetch(at + f.distance + line, 0, 2);
        }
        return;
    }
    for (int line = 0; line < n; line += 64) {
        __builtin_prefetch(at + f.distance + line, 0, 3);
    }
}

/* What a tile prefetches while it computes. */
struct fetch {
    int64_t stream;     /* bytes ahead of the tile's own rows; 0: `row` instead */
    bool far;           /* these into the second-level cache, not the first */
    const char *row[2]; /* up to two rows that a later tile reads; NULL: none */
};

INLINE void fetch_stream(const char *const *row, const int n_w, const int n_lines, int64_t ahead,
                         const bool far)
{
#pragma GCC unroll 8
    for (int i = 0; i < n_w; i++) {
        for (int l = 0; l < n_lines; l++) {
            const char *at = row[i] + ahead + 64 * l;
            if (far) {
                __builtin_prefetch(at, 0, 2);
            } else {
                __builtin_prefetch(at, 0, 3);
            }
        }
    }
}

/* To be called once per chunk; n_lines: cache lines of a chunk of a stored row. */
INLINE void fetch_chunk(struct fetch *f, const char *const *row, const int n_w, const int n_lines)
{
    if (f->stream != 0 && f->far) {
        fetch_stream(row, n_w, n_lines, f->stream, true);
    } else if (f->stream != 0) {
        fetch_stream(row, n_w, n_lines, f->stream, false);
    } else if (f->row[0]) {
        for (int l = 0; l < n_lines; l++) {
            __builtin_prefetch(f->row[0], 0, 2);
            __builtin_prefetch(f->row[1], 0, 2);
            f->row[0] += 64;
            f->row[1] += f->row[1] ? 64 : 0;
        }
    }
}

#endif
