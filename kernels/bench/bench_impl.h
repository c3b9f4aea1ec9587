/* What the files of bench_ops.c share. A failure is remembered, and every call after it
 * does nothing. */
#ifndef QUIRE_KERNELS_BENCH_BENCH_IMPL_H
#define QUIRE_KERNELS_BENCH_BENCH_IMPL_H

#include <math.h>
#include <stdlib.h>

#include "kernels/backend.h"
#include "kernels/bench/bench_ops.h"

/* A model's shape, and how far what is measured of it goes. */
struct bench_shape {
    int32_t hidden, heads, kv_heads, dim, inner, vocab, layers;
    int32_t block_size, n_blocks, cache_layers; /* of the cache that attention reads */
    int32_t max_tokens, max_seqs, context_over; /* contexts and prompts are divided by the last */
};

/* What one layer takes, by rows of the step: filled as parts are measured, NAN until
 * then. */
enum { TIMES_GLUE_ROWS = 3 };
struct bench_layer {
    int32_t rows;
    double products, attention, norms, rope, ends,
        head; /* us; ends: embedding, last norm, gather, greedy sampling: once a step */
};

struct bench_ceiling {
    struct mat w, x, out;
};

struct times {
    struct backend *b;
    struct bench_shape shape;
    FILE *out;
    struct err *e;
    int rc; /* of the first failure */
    uint64_t step, rng;
    int32_t *zero, *none, *count; /* [max_tokens + 1]: 0, -1, 0 1 2 ... */
    double read, copy, product;   /* ceilings: bytes and flops a us; NAN: not measured */
    /* the product that measured reading: on a GPU some 1 ms; and a step of it alone */
    struct bench_ceiling ahead;
    double ahead_us;
    struct bench_layer layer[TIMES_GLUE_ROWS];
};

/* `calls` calls of call(t, i, arg) are one step. `queued`: they stand behind a long
 * product whose time is taken off again, so that what the host takes to launch short
 * kernels does not show, as it does not where a decode step is a graph. */
struct bench_job {
    struct batch batch;
    int calls;
    bool queued;
    void (*call)(struct times *t, int i, void *arg);
    void *arg;
};

/* us a call, the median; NAN after a failure. */
double bench_us(struct times *t, struct bench_job *j);
/* One line: what it moves (bytes) and does (flops; 0: none to speak of), and what share
 * of the ceilings that is. */
void bench_line(struct times *t, double us, double bytes, double flops, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
bool bench_failed(struct times *t, int rc);
/* Activations, unset; a weight, noise. Both live as long as the backend. */
struct mat bench_mat(struct times *t, int32_t rows, int32_t cols, enum dtype type);
struct mat bench_weight(struct times *t, enum weight_kind kind, int32_t rows, int32_t cols,
                        enum dtype type);
/* A step of n tokens of one sequence that are written nowhere. The arrays it shows live
 * until the next call. */
struct batch bench_batch(struct times *t, int32_t n);
uint64_t bench_random(struct times *t);
/* Where the parts of a step of so many rows are kept; NULL: nobody asks. */
struct bench_layer *bench_layer_of(struct times *t, int32_t rows);

void bench_linear(struct times *t);                               /* bench_rows.c */
void bench_glue(struct times *t);                                 /* bench_rows.c */
void bench_sample(struct times *t);                               /* bench_rows.c */
void bench_attention(struct times *t, bool decode, bool prefill); /* bench_attention.c */

#endif
