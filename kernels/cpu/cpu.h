/* The CPU backend's inside: its state, and which file holds which operation.
 *
 *     cpu.c        open, free, the table of operations
 *     memory.c     arena, weights, scratch, the cache
 *     hugepages.c     weights read in their mapped file
 *     step.c       the batch's copy, block tables, block copies, results
 *     ops.c        embed, norm, add, activation, gather
 *     rope.c       rotation and cache write
 *     linear.c     products with weights, as plain loops; linear_tiled.c by tiles,
 *                  linear_stream.c of one tile, linear_panels.c of many
 *     attention.c  over the block table, as plain loops; attention_tiled.c by parts
 *     kernels.c    the inner loops, plain; rows_*.c, tile_*.c, attention_*.c by
 *                  instruction set
 *     ranks.c      sums and exchanges with other ranks
 *     stages.c     what goes from stage to stage of a pipeline
 *     sample.c     sampling, the specification of all backends; select.c its threshold
 *                  selection
 *     pool.c       threads
 *     isa.c        choice of instruction set
 *
 * Activations are float32 whatever the weights are; the cache has its layout's type.
 */
#ifndef QUIRE_KERNELS_CPU_CPU_H
#define QUIRE_KERNELS_CPU_CPU_H

#include "config/base/limits.h"
#include "kernels/backend.h"
#include "kernels/comm/stage_tokens.h"
#include "kernels/cpu/pool.h"
#include "kernels/cpu/simd/kernels.h"

/* Memory that lives as long as the backend, cut from large regions of 2 MiB pages. */
struct cpu_region {
    struct cpu_region *next;
    char *base;
    size_t n_bytes, used_bytes;
};

/* A weight that linear reads; mat.priv of it. */
struct cpu_weight {
    struct mat m;
    struct cpu_weight *next; /* read after it the last time; NULL: not known yet */
};

/* Results of one step; a ring of them, because two steps may be in flight and answers
 * outlive the next wait. */
enum { CPU_RESULTS = 4 };
struct cpu_results {
    uint64_t step;
    int32_t n_samples;
    int32_t top_stride;
    int64_t device_us;
    int32_t *token;     /* [max_samples] */
    float *logprob;     /* [max_samples] */
    int32_t *top_token; /* [n_samples, top_stride], top_cap entries */
    float *top_logprob;
    int64_t top_cap;
};

struct cpu_backend {
    struct backend base;
    struct backend_config config;
    struct cpu_kernels k;
    struct cpu_pool *pool;
    struct cpu_region *region;
    struct cpu_hugepages *settle; /* of weights read in their file; NULL: there are none */
    uint64_t n_dummies;           /* dummy weights made so far: each gets other numbers */

    struct kv_layout kv;
    int32_t n_blocks, n_host_blocks;
    char *kv_data, *kv_host;
    int32_t *
        /* [n_blocks + n_host_blocks, block_size] token ids of the device's blocks, then
         * of the host's */
        slot_token;
    int32_t *table; /* [max_seqs, max_blocks_per_seq] block ids */

    char *packed; /* activations packed for linear's tiles; grows to the largest seen */
    size_t packed_bytes;
    float *panel; /* [threads] panels of weights, of linear_panels.c; grows alike */
    int64_t panel_floats;
    struct cpu_weight *last_weight; /* read last by a product of few rows */

    /* Scratch of the threads. */
    float *attention_scratch; /* [threads, attention_scratch_floats] */
    int64_t attention_scratch_floats;
    struct attention_unit *attention_unit; /* work list of attention_tiled.c */
    int64_t attention_unit_cap;
    float *attention_partial;
    int64_t attention_partial_floats;
    float *scores; /* [threads, scores_cap] attention weights of one query head */
    int64_t scores_cap;
    float *sample_logits;   /* [threads, sample_vocab] processed logits */
    uint32_t *sample_count; /* [threads, sample_vocab] occurrences by token, 0 between rows */
    struct cpu_survivor *survivor; /* [threads, sample_vocab] */
    int32_t sample_vocab;

    /* The step under way. */
    struct batch batch; /* arrays in `arena` */
    char *arena;
    size_t arena_bytes;
    bool in_step;
    int64_t step_start_us;
    struct cpu_results results[CPU_RESULTS];
    /* parts of steps; results of part i are results[i % CPU_RESULTS] */
    uint64_t n_begun, n_waited;
    struct stage_tokens tokens; /* of the step before */
    struct err failed;          /* sticky; code 0: none */
};

static inline struct cpu_backend *cpu_of(struct backend *b)
{
    return CONTAINER_OF(b, struct cpu_backend, base);
}

/* Remember the first error of an operation; step_end reports it. */
void cpu_fail(struct cpu_backend *c, int code, const char *what);

#define CPU_HUGE_BYTES ((size_t)2 << 20)

/* memory.c: fresh memory of large pages, n_bytes a multiple of CPU_HUGE_BYTES and so is
 * the address; munmap frees it. NULL: none. */
char *cpu_map_huge(size_t n_bytes);
/* Zeroed (fresh pages), aligned to 64 bytes, freed with the backend. NULL: no
 * memory. */
void *cpu_alloc(struct cpu_backend *c, size_t n_bytes);
void cpu_memory_release(struct cpu_backend *c);
int cpu_memory(struct backend *b, struct backend_memory *ret, struct err *e);
int cpu_weight(struct backend *b, const struct weight_desc *d, struct mat *ret, struct err *e);
int cpu_scratch(struct backend *b, int32_t rows, int32_t cols, enum dtype t, struct mat *ret,
                struct err *e);
int cpu_kv_create(struct backend *b, const struct kv_layout *l, int32_t n_blocks,
                  int32_t n_host_blocks, struct err *e);
int cpu_download(struct backend *b, struct mat m, float *out, struct err *e);
int cpu_upload(struct backend *b, struct mat m, const float *in, struct err *e);

/* hugepages.c: whether a weight's rows, `stride` elements apart, may be read where its
 * pieces lie. */
bool cpu_reads_in_place(const struct weight_desc *d, int64_t stride);
/* The weight is read at `data`: move it into large pages once cpu_hugepages_start was
 * called. */
int cpu_hugepages_later(struct cpu_backend *c, const void *data, int64_t n_bytes, struct err *e);
/* Memory that the move will take yet. */
int64_t cpu_hugepages_waiting_bytes(const struct cpu_backend *c);
int cpu_hugepages_start(struct cpu_backend *c, struct err *e);
/* Ends the move where it is. Takes NULL. */
void cpu_hugepages_free(struct cpu_hugepages *s);

/* step.c */
int cpu_steps_init(struct cpu_backend *c, struct err *e);
void cpu_steps_release(struct cpu_backend *c);
int cpu_step_begin(struct backend *b, const struct batch *batch, struct err *e);
int cpu_step_end(struct backend *b, struct err *e);
int cpu_step_wait(struct backend *b, struct results *ret, struct err *e);
/* Results being written. */
struct cpu_results *cpu_results_now(struct cpu_backend *c);
/* The id of token i of the step; a token that could not be drawn (NaN) counts as 0. */
int32_t cpu_input_token(const struct cpu_backend *c, int32_t i);

/* operations */
void cpu_embed(struct backend *b, struct mat out, struct mat table, float scale);
/* Rows of out with a token of [first, first + table.rows), zeros in the others. */
void cpu_embed_range(struct cpu_backend *c, struct mat out, struct mat table, int32_t first,
                     float scale);
void cpu_embed_position(struct backend *b, struct mat x, struct mat table, int32_t offset);
void cpu_norm(struct backend *b, struct mat out, struct mat x, const struct norm *n);
void cpu_add_norm(struct backend *b, struct mat out, struct mat x, struct mat y,
                  const struct norm *n, bool partial);
void cpu_linear(struct backend *b, struct mat out, struct mat x, struct mat w,
                const struct epilogue *ep);
void cpu_rope_kv(struct backend *b, struct mat qkv, const struct rope *r,
                 const struct attention *a);
void cpu_attention(struct backend *b, struct mat out, struct mat qkv, const struct attention *a);
void cpu_linear_gated(struct backend *b, struct mat out, struct mat room, struct mat x,
                      struct mat w, struct mat bias, enum activation act);
void cpu_soft_cap(struct backend *b, struct mat x, float cap);
void cpu_add(struct backend *b, struct mat x, struct mat y, bool partial);
void cpu_gather(struct backend *b, struct mat out, struct mat x, int32_t first);
void cpu_sample(struct backend *b, struct mat logits, int32_t first);

/* ranks.c: with one rank they do nothing. */
void cpu_all_reduce(struct backend *b, struct mat x);
void cpu_embed_part(struct backend *b, struct mat out, struct mat table, int32_t first,
                    float scale);
void cpu_gather_logits(struct backend *b, struct mat logits, struct mat part);
/* Whether this rank draws tokens. */
bool cpu_draws(const struct cpu_backend *c);
/* The drawing rank's tokens of sampling rows [first, end) to all. */
void cpu_share_tokens(struct cpu_backend *c, int32_t first, int32_t end);

/* stages.c: with one stage they do nothing. */
void cpu_stage_receive(struct backend *b, struct mat x);
void cpu_stage_send(struct backend *b, struct mat x);

/* The same two by tiles; needs c->k.dots. */
void cpu_linear_tiled(struct cpu_backend *c, struct mat out, struct mat x, struct mat w,
                      const struct epilogue *ep);
/* For x of many rows; needs c->k.panels. */
void cpu_linear_panels(struct cpu_backend *c, struct mat out, struct mat x, struct mat w,
                       const struct epilogue *ep);
/* c->packed holds n_bytes. 0 or ERR_NOMEM. */
int cpu_packed_room(struct cpu_backend *c, int64_t n_bytes);
/* For x of at most TILE_ROWS rows, packed at c->packed. */
void cpu_linear_stream(struct cpu_backend *c, struct mat out, struct mat x, struct mat w,
                       const struct epilogue *ep);
void cpu_attention_tiled(struct cpu_backend *c, struct mat out, struct mat qkv,
                         const struct attention *a);

static inline const float *mat_row_const(struct mat m, int64_t r)
{
    return (const float *)m.data + r * m.stride;
}
static inline float *mat_row(struct mat m, int64_t r)
{
    return (float *)m.data + r * m.stride;
}

#endif
