/* What a tile fetches while it computes: all its rows `stream` bytes ahead, or (0) up
 * to two others, into the second-level cache, a line a chunk. */
#ifndef QUIRE_KERNELS_CPU_SIMD_FETCH_H
#define QUIRE_KERNELS_CPU_SIMD_FETCH_H

#include <stddef.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

/* A line that will be written: the other cores give it up at once. Where the
 * instruction is not known it does nothing. */
INLINE void fetch_to_write(const void *line)
{
#if defined(__x86_64__)
    __asm__ volatile("prefetchw %0" : : "m"(*(const char *)line));
#else
    __builtin_prefetch(line, 1, 3);
#endif
}

struct fetch {
    int64_t stream;
    const char *row[2];
};

/* Once a chunk; n_lines of a chunk of a stored row. */
INLINE void fetch_chunk(struct fetch *f, const char *const *row, const int n_w, const int n_lines)
{
    if (f->stream != 0) {
#pragma GCC unroll 8
        for (int i = 0; i < n_w; i++) {
            for (int l = 0; l < n_lines; l++) {
                __builtin_prefetch(row[i] + f->stream + 64 * l, 0, 3);
            }
        }
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
