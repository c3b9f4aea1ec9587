/* Shared by bench_*.c. The first failure is recorded in bench_timer.rc; calls after it
 * do nothing. */
#ifndef QUIRE_KERNELS_BENCH_BENCH_IMPL_H
#define QUIRE_KERNELS_BENCH_BENCH_IMPL_H

#include <math.h>
#include <stdlib.h>

#include "kernels/backend.h"
#include "kernels/bench/bench_ops.h"

/* A model's shape, and the sizes up to which its operations are measured. */
struct bench_shape {
    /* of the model; dim: of a head, inner: of the gated MLP */
    int32_t hidden, heads, kv_heads, dim, inner, vocab, layers;
    int32_t block_size, n_blocks, cache_layers; /* of the cache that attention reads */
    int32_t max_tokens, max_seqs;               /* of a step */
    int32_t context_over; /* contexts and prompts are divided by it; 1: a GPU's full sizes */
};

/* Times of a decode step's operations, each NAN until it is measured. */
enum { BENCH_STEP_ROWS = 3 }; /* batch sizes for which they are kept */
struct bench_layer {
    int32_t rows;                            /* sequences of one token in the step */
    double products, attention, norms, rope; /* us, of one layer */
    double ends; /* us, once per step: embedding, last norm, gather, greedy sampling */
    double head; /* us, once per step: the product with the output head */
};

/* Operands of a product that measures a ceiling. */
struct bench_ceiling {
    struct mat w, x, out; /* [out, in], [rows, in], [rows, out] */
};

struct bench_timer {
    struct backend *b;            /* what is measured */
    struct bench_shape shape;     /* of the operations */
    enum dtype cache;             /* of keys and values, of 8 bits; DTYPE_F32: the activations' */
    FILE *out;                    /* for lines */
    struct err *e;                /* text of the first failure */
    int rc;                       /* of the first failure; 0: none */
    uint64_t step, rng;           /* steps begun; state of bench_random */
    int32_t *zero, *none, *count; /* [max_tokens + 1]: 0, -1, 0 1 2 ... */
    double read, copy, product;   /* ceilings: bytes and flops per us; NAN: not measured */
    /* The product that measures reading, on a GPU about 1 ms long; us of a step with it
     * alone, 0: `queued` has no effect. */
    struct bench_ceiling ahead;
    double ahead_us;
    struct bench_layer layer[BENCH_STEP_ROWS]; /* by batch size */
};

static inline enum dtype bench_cache(const struct bench_timer *t)
{
    return t->cache == DTYPE_F32 ? backend_act_dtype(t->b, DTYPE_BF16) : t->cache;
}

/* One kind of step to be timed: `calls` calls of call(t, i, arg). */
struct bench_job {
    struct batch batch; /* the step's inputs */
    int calls;          /* i counts them */
    /* The calls are enqueued behind a long product, whose time is subtracted: the
     * host's launch times then do not show, just as they do not where a decode step is
     * a graph. */
    bool queued;
    void (*call)(struct bench_timer *t, int i, void *arg); /* NULL: the batch alone */
    void *arg;                                             /* of call */
    const struct late_mask *late; /* [batch.n_late_mask] given before each step */
};

/* us per call, the median; NAN after a failure. */
double bench_us(struct bench_timer *t, struct bench_job *j);
/* Print one line: the time, bytes moved and flops done (0: negligible), and their
 * fractions of the ceilings. */
void bench_line(struct bench_timer *t, double us, double bytes, double flops, const char *format,
                ...) __attribute__((format(printf, 5, 6)));
/* Record rc if it is the first failure; whether there was one. */
bool bench_failed(struct bench_timer *t, int rc);
/* Uninitialised activations for weights of `type`, and a dummy weight. Both live as
 * long as the backend. */
struct mat bench_mat(struct bench_timer *t, int32_t rows, int32_t cols, enum dtype type);
struct mat bench_weight(struct bench_timer *t, enum weight_kind kind, int32_t rows, int32_t cols,
                        enum dtype type);
/* A step of n tokens of one sequence, none written to the cache. Its arrays are valid
 * until the next call. */
struct batch bench_batch(struct bench_timer *t, int32_t n);
/* 31 random bits. */
uint64_t bench_random(struct bench_timer *t);
/* Where times of steps of so many rows are kept; NULL: nowhere. */
struct bench_layer *bench_layer_of(struct bench_timer *t, int32_t rows);

void bench_linear(struct bench_timer *t);                               /* bench_rows.c */
void bench_glue(struct bench_timer *t);                                 /* bench_rows.c */
void bench_sample(struct bench_timer *t);                               /* bench_rows.c */
void bench_attention(struct bench_timer *t, bool decode, bool prefill); /* bench_attention.c */

#endif
