/* Private to the CPU backend: its state, and which file holds which operation.
 *
 *     cpu.c        open, free, the table of operations
 *     memory/      arena, weights, scratch, the cache; hugepages.c moves weights that are
 *                  read from their mapped file into 2 MiB pages
 *     step.c       the batch's copy, block tables, block copies, results
 *     ops.c        embed, norm, add, activation, gather
 *     rope.c       rotation and cache write
 *     linear.c     products with weights, as plain loops; linear_tiled.c by tiles,
 *                  linear_stream.c for a single tile of x, linear_panels.c for many;
 *                  linear_blocks.c for weights in blocks, which the first two multiply,
 *                  and linear_codes.c of many rows
 *     attention/   over the block table: attention.c as plain loops, units.c by units of
 *                  rows, with vectors.c or tiles.c for what is in them
 *     hidden.c     hidden states of draft heads
 *     latent/      the cache of latents and attention over it
 *     ranks.c      collectives of tensor parallelism
 *     stages.c     activations between pipeline stages
 *     sample.c     sampling, the specification of all backends; select.c its selection
 *                  by threshold
 *     pool.c       threads
 *     blocks/      the inner loops of products with weights in blocks, by instruction set
 *     simd/        the other inner loops: kernels.c plain, rows_*.c, tile_*.c, panel_*.c and
 *                  attention_*.c by instruction set; isa.c chooses
 *     ways/        what timing chooses: bf16_way.c between two ways of one instruction set,
 *                  block_ways.c among those that multiply weights in blocks
 *
 * Activations are float32 whatever the weights are; the cache has its layout's type.
 * / */
#ifndef QUIRE_KERNELS_CPU_CPU_H
#define QUIRE_KERNELS_CPU_CPU_H

#include "config/base/limits.h"
#include "kernels/backend.h"
#include "kernels/comm/stage_tokens.h"
#include "kernels/cpu/late_masks.h"
#include "kernels/cpu/pool.h"
#include "kernels/cpu/simd/kernels.h"
#include "kernels/cpu/ways/block_ways.h"
#include "kernels/cpu/ways/read_way.h"

/* A bump allocator's region of 2 MiB pages, which lives as long as the backend. */
struct cpu_region {
    struct cpu_region *next;    /* of the list; the head has the most memory left */
    char *base;                 /* multiple of CPU_HUGE_BYTES */
    size_t n_bytes, used_bytes; /* used_bytes is a multiple of 64 */
};

/* A piece of a weight that is kept in blocks. */
struct cpu_part {
    const char *data;    /* in the mapped file, or a copy of the backend's */
    int32_t first, rows; /* of the rows of its struct cpu_weight */
    int32_t head_rows;   /* as in weight_piece */
    /* as in weight_piece, where the rows begin; read in place or in the backend's
     * copy */
    struct weight_scales scales;
};

/* mat.priv of every weight. One whose pieces have several formats is a list, a run of
 * neighbouring pieces of one format each. */
struct cpu_weight {
    struct mat m;             /* the weight itself, or its run of rows */
    struct cpu_weight *next;  /* the weight that was read after it last time; NULL: unknown */
    struct cpu_weight *below; /* the run that follows; NULL: none */
    struct cpu_part *part;    /* [n_parts], with m.format */
    int32_t n_parts;
    int32_t planes; /* ACT_PLANES_MAX where the inputs of its products keep 15 bits, else 1 */
    /* Inputs are first rounded to codes of m.format times this (ACT_SCALE_TENSOR); 0:
     * they are not. */
    float act_scale;
    bool view; /* of a cpu_view, which ends with its product: nothing may point to it */
};

/* Rows of codes that a row of x becomes for products with w: planes, or 1 of floats. */
static inline int32_t cpu_planes(const struct mat *w)
{
    return w->format ? ((const struct cpu_weight *)w->priv)->planes : 1;
}

/* Some rows of a weight, as a weight of their own. */
enum { CPU_VIEW_PARTS = 4 };
struct cpu_view {
    struct cpu_weight run[CPU_VIEW_PARTS]; /* linked by `below` */
    struct cpu_part part[CPU_VIEW_PARTS];
};

/* Rows [first, first + n) of w, in blocks or not, which lie in at most CPU_VIEW_PARTS
 * of its pieces. The result points into *v. */
struct mat cpu_weight_rows(struct mat w, int32_t first, int32_t n, struct cpu_view *v);

/* Bytes from one stored row to the next of the same piece. */
static inline int64_t cpu_row_bytes(const struct mat *w)
{
    return w->format ? weight_format_bytes(w->format, w->stride)
                     : w->stride * dtype_bytes(w->dtype);
}

/* Where row r of a part lies in it; in_head: r modulo head_rows. */
static inline int32_t cpu_part_row(const struct cpu_part *p, int32_t r, int32_t in_head)
{
    int32_t half = p->head_rows / 2;

    return r + (p->head_rows == 0 ? 0 : in_head < half ? in_head : in_head - p->head_rows + 1);
}

/* Row r of a weight, or of a run of one. */
static inline const char *cpu_row(const struct mat *w, int32_t r)
{
    if (!w->format) {
        return (const char *)w->data + r * cpu_row_bytes(w);
    }
    const struct cpu_part *p = ((const struct cpu_weight *)w->priv)->part;
    while (r >= p->first + p->rows) {
        p++;
    }
    int32_t at = r - p->first, in_head = p->head_rows > 0 ? at % p->head_rows : 0;
    return p->data + cpu_part_row(p, at, in_head) * cpu_row_bytes(w);
}

/* Whether rows of a run in blocks are stored in another order than theirs: the two
 * halves of a head in pairs. */
static inline bool cpu_rows_paired(const struct mat *w)
{
    const struct cpu_weight *run = w->priv;
    bool paired = false;

    for (int32_t i = 0; w->format && i < run->n_parts; i++) {
        paired |= run->part[i].head_rows > 0;
    }
    return paired;
}

/* row[k * step] = the row that is stored as number first + k, of n rows of a run in
 * blocks. */
static inline void cpu_stored_rows(const struct mat *w, int32_t first, int32_t n, const void **row,
                                   int32_t step)
{
    const struct cpu_part *p = ((const struct cpu_weight *)w->priv)->part;
    int64_t bytes = cpu_row_bytes(w);

    for (int32_t k = 0; k < n; p++) {
        int32_t end = MIN(p->first + p->rows - first, n);
        const char *at = p->data + (first + k - p->first) * bytes;
        for (; k < end; k++, at += bytes) {
            row[(int64_t)k * step] = at;
        }
    }
}

/* at[k] = which row is stored as number first + k, of n rows of a run in blocks. */
static inline void cpu_stored_places(const struct mat *w, int32_t first, int32_t n, int32_t *at)
{
    const struct cpu_part *p = ((const struct cpu_weight *)w->priv)->part;

    for (int32_t k = 0; k < n; p++) {
        int32_t end = MIN(p->first + p->rows - first, n), half = p->head_rows / 2;
        int32_t in_head = half > 0 ? (first + k - p->first) % p->head_rows : 0;
        for (; k < end; k++) {
            at[k] = first + k - in_head + in_head / 2 + in_head % 2 * half;
            in_head = half == 0 || in_head + 1 == p->head_rows ? 0 : in_head + 1;
        }
    }
}

/* The scales of row r of a weight, or of a run of one, of codes whose scales are
 * apart. */
static inline struct row_scales cpu_row_scales(const struct mat *w, int32_t r)
{
    const struct cpu_part *p = ((const struct cpu_weight *)w->priv)->part;

    while (r >= p->first + p->rows) {
        p++;
    }
    return (struct row_scales){.of = &p->scales, .row = r - p->first};
}

/* The format whose panels multiply a run, FORMAT_F32 if there are none: that of blocks,
 * or what the scales of the pieces say, which all say the same. */
static inline enum weight_format_id cpu_panels_as(const struct cpu_weight *run)
{
    const struct weight_format *f = run->m.format;

    return weight_format_has_scales(f) ? codes_panels_of(f->id, &run->part[0].scales) : f->id;
}

/* An x packed for products with weights in blocks: two that are equal have the same
 * bytes, if x did not change. */
struct cpu_packed {
    const void *x;                        /* NULL: unknown */
    const struct cpu_code_panels *panels; /* whose tiles it is in; NULL: act_blocks */
    const struct cpu_blocks *blocks;      /* whose act_blocks it is in; NULL: panels */
    int32_t format;                       /* enum weight_format_id, with panels */
    int32_t rows, planes;
};

/* An x rounded by a fixed scale. */
struct cpu_rounded {
    const void *x; /* what it was made of; NULL: unknown */
    int32_t rows, format;
    float scale;
    float *data; /* [rows, its cols], owned */
    int64_t cap; /* floats allocated */
};

/* Results of one step, as struct results of batch.h, in a ring: two steps may be in
 * flight, and results outlive the next wait. */
enum { CPU_RESULTS = 4 };
enum { CPU_LATE_TABLES = 4 }; /* of a backend */
struct cpu_results {
    uint64_t step;      /* of the batch */
    int32_t n_samples;  /* of the batch */
    int32_t top_stride; /* columns of top_token and top_logprob */
    int64_t device_us;  /* between step_begin and step_end */
    struct expert_load experts;
    int32_t *token;     /* [max_samples] */
    float *logprob;     /* [max_samples] */
    int32_t *top_token; /* [n_samples, top_stride] */
    float *top_logprob; /* [n_samples, top_stride] */
    int64_t top_cap;    /* elements allocated of top_token and of top_logprob */
};

struct cpu_backend {
    struct backend base;             /* what the runner sees */
    struct backend_config config;    /* as given to cpu_backend_open */
    struct cpu_kernels k;            /* inner loops for this machine */
    struct cpu_block_ways ways;      /* how k's for weights in blocks are chosen */
    struct cpu_read_ways reads;      /* how products of few rows read weights */
    bool from_known[2];              /* cpu_panels_from was called: of floats, of bfloat16 */
    struct cpu_pool *pool;           /* threads; the caller is one of them */
    struct cpu_region *region;       /* list of all; allocations come from its head */
    struct cpu_hugepages *hugepages; /* of weights read in their file; NULL: none */
    uint64_t n_dummies;              /* dummy weights made so far, the salt of their values */

    /* The cache; kv_data is NULL before kv_create. */
    struct kv_layout kv[LIMIT_KV_GROUPS]; /* of each KV group */
    int32_t n_blocks, n_host_blocks;      /* of kv_data, of kv_host */
    char *kv_data, *kv_host;              /* blocks that attention reads; blocks swapped out */
    /* [n_blocks + n_host_blocks, block_size] ids of the tokens in kv_data's blocks,
     * then in kv_host's */
    int32_t *slot_token;
    int32_t *table; /* [n_kv_groups, max_seqs, max_blocks_per_seq] block ids */

    /* Scratch of linear; grows to the largest seen. */
    char *packed;                   /* x packed for tiles, or for panels */
    size_t packed_bytes;            /* allocated */
    struct cpu_packed packed_x;     /* what `packed` holds, while x stays the same */
    bool keeps_x;                   /* products in a row have the same x, whose packing is kept */
    struct cpu_rounded rounded;     /* the x that packed_x is of, where that was rounded */
    float *panel;                   /* panels of weights, of linear_panels.c and linear_codes.c */
    int64_t panel_floats;           /* allocated, of all threads */
    struct cpu_weight *last_weight; /* read last by linear_stream.c; NULL: none yet */

    struct table_rows late_rows[CPU_LATE_TABLES]; /* [n_late] of tables read in place */
    int32_t n_late;

    /* Scratch of the other operations. */
    float *attention_scratch; /* [threads, attention_scratch_floats] */
    int64_t attention_scratch_floats;
    struct attention_unit *attention_unit; /* [attention_unit_cap] work list, attention/ */
    int64_t attention_unit_cap;
    float *attention_partial; /* [attention_partial_floats] results of KV splits, to be merged */
    int64_t attention_partial_floats;
    float *scores;          /* [threads, scores_cap] of one query head, attention.c */
    int64_t scores_cap;     /* tokens of the longest sequence */
    float *sample_logits;   /* [threads, sample_vocab] processed logits */
    uint32_t *sample_count; /* [threads, sample_vocab] occurrences by token, 0 between rows */
    struct cpu_survivor *survivor; /* [threads, sample_vocab] */
    int32_t sample_vocab;          /* widest vocabulary seen; 0: scratch not allocated yet */

    /* The step under way. */
    struct batch batch;    /* arrays in `arena` */
    char *arena;           /* grows to the largest step seen */
    size_t arena_bytes;    /* allocated */
    bool in_step;          /* between step_begin and step_end */
    int64_t step_start_us; /* when step_begin was called */
    struct cpu_results results[CPU_RESULTS];
    /* batches begun and waited for; those of number i use results[i % CPU_RESULTS] */
    uint64_t n_begun, n_waited;
    struct stage_tokens tokens; /* sampled in this step and in the one before */
    struct late_masks late;     /* of this step and of the next one */
    struct err failed;          /* first failure, sticky; code 0: none */
};

static inline struct cpu_backend *cpu_of(struct backend *b)
{
    return CONTAINER_OF(b, struct cpu_backend, base);
}

/* The row of a KV group's block tables. */
static inline int32_t *cpu_table(const struct cpu_backend *c, int32_t group, int32_t row)
{
    return c->table + ((int64_t)group * c->config.max_seqs + row) * c->config.max_blocks_per_seq;
}

/* The slot of token t of the step in a KV group. */
static inline int32_t cpu_slot(const struct cpu_backend *c, int32_t group, int32_t t)
{
    const struct batch *b = &c->batch;

    return group == 0 ? b->slot[t]
                      : b->group_slot[(int64_t)t * (backend_kv_groups(&c->config) - 1) + group - 1];
}

/* Record the first failure of an operation, and abort the other ranks' calls; step_end
 * reports it. */
void cpu_fail(struct cpu_backend *c, int code, const char *what);

#define CPU_HUGE_BYTES ((size_t)2 << 20)

/* memory/memory.c: zeroed memory of huge pages, n_bytes and the address multiples of
 * CPU_HUGE_BYTES; munmap frees it. NULL: out of memory. */
char *cpu_map_huge(size_t n_bytes);
/* Zeroed, aligned to 64 bytes, freed with the backend. NULL: out of memory. */
void *cpu_alloc(struct cpu_backend *c, size_t n_bytes);
/* The same for a weight that is filled at once. NULL, with the error set: the machine
 * does not have the memory, and the kernel would end the process that takes it. */
void *cpu_alloc_weight(struct cpu_backend *c, size_t n_bytes, const char *name, struct err *e);
void cpu_memory_release(struct cpu_backend *c);
int cpu_memory(struct backend *b, struct backend_memory *ret, struct err *e);
struct weight_support cpu_supports(const struct backend *b, const struct weight_format *f);
int cpu_weight(struct backend *b, const struct weight_desc *d, struct mat *ret, struct err *e);
int cpu_scratch(struct backend *b, int32_t rows, int32_t cols, enum dtype t, struct mat *ret,
                struct err *e);
int cpu_scratch_in_turns(struct backend *b, const struct turn_scratch *s, int32_t n, struct err *e);
int cpu_kv_create(struct backend *b, const struct kv_layout *l, int32_t n_blocks,
                  int32_t n_host_blocks, struct err *e);
int cpu_download(struct backend *b, struct mat m, float *out, struct err *e);
int cpu_upload(struct backend *b, struct mat m, const float *in, struct err *e);

/* memory/weight_blocks.c: a weight of which some pieces are stored in blocks. */
int cpu_weight_blocks(struct cpu_backend *c, const struct weight_desc *d, struct mat *ret,
                      struct err *e);
/* Row r of such a weight as floats, [w->cols]. */
void cpu_decode_row(const struct mat *w, int32_t r, float *out);

/* memory/hugepages.c: whether a weight of rows `stride` elements apart can be read in
 * its mapped file. */
bool cpu_reads_in_place(const struct weight_desc *d, int64_t stride);
/* Register a weight that is read in its file at `data`, for the thread that
 * cpu_hugepages_start starts. */
int cpu_hugepages_add(struct cpu_backend *c, const void *data, int64_t n_bytes, struct err *e);
/* Memory that the move will still take. */
int64_t cpu_hugepages_pending_bytes(const struct cpu_backend *c);
/* Start moving the registered weights into huge pages, on a thread of its own. */
int cpu_hugepages_start(struct cpu_backend *c, struct err *e);
/* Stop the move, whose weights may be moved in part. Takes NULL. */
void cpu_hugepages_free(struct cpu_hugepages *s);

/* step.c */
int cpu_steps_init(struct cpu_backend *c, struct err *e);
void cpu_steps_release(struct cpu_backend *c);
int cpu_step_begin(struct backend *b, const struct batch *batch, struct err *e);
int cpu_step_end(struct backend *b, struct err *e);
int cpu_masks(struct backend *b, uint64_t step, const struct late_mask *mask, int32_t n,
              struct err *e);
int cpu_step_wait(struct backend *b, struct results *ret, struct err *e);
/* Where the step under way writes its results. */
struct cpu_results *cpu_results_now(struct cpu_backend *c);
/* The id of token i of the step; one that could not be sampled counts as 0. */
int32_t cpu_input_token(const struct cpu_backend *c, int32_t i);

/* ops.c, experts.c, linear.c, rope.c, attention.c, latent.c, sample.c: operations of
 * backend_ops */
void cpu_embed(struct backend *b, struct mat out, struct mat table, float scale);
/* embed for the ids [first, first + table.rows); rows of other ids become 0. */
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
void cpu_latent_kv(struct backend *b, struct mat q, struct mat kv,
                   const struct latent_attention *a);
void cpu_latent_attention(struct backend *b, struct mat out, struct mat q,
                          const struct latent_attention *a, const struct latent_scratch *s);
void cpu_linear_gated(struct backend *b, struct mat out, struct mat workspace, struct mat x,
                      struct mat w, struct mat bias, enum activation act);
void cpu_experts(struct backend *b, struct mat y, struct mat x, const struct experts *e,
                 const struct expert_scratch *s);
void cpu_soft_cap(struct backend *b, struct mat x, float cap);
void cpu_xielu(struct backend *b, struct mat x, struct mat factors);
void cpu_scale_by_score(struct backend *b, struct mat out, struct mat x, struct mat scores);
void cpu_add(struct backend *b, struct mat x, struct mat y, bool partial);
void cpu_gather(struct backend *b, struct mat out, struct mat x, int32_t first);
void cpu_sample(struct backend *b, struct mat logits, int32_t first);

/* hidden.c: operations of draft heads. */
void cpu_hidden_store(struct backend *b, struct mat x, int32_t first);
struct hidden_pool cpu_hidden_pool(struct backend *b);
void cpu_hidden_load(struct backend *b, struct mat out, const struct hidden_pool *p);
void cpu_hidden_own(struct backend *b, struct mat out, struct mat own);
void cpu_hidden_masked(struct backend *b, struct mat out, struct mat row);
void cpu_spread(struct backend *b, struct mat out, struct mat x, struct mat id);

/* attention.c: the sequence of token t, the last whose first token is <= t. */
int32_t cpu_sequence_of(const struct batch *b, int32_t t);
/* rope.c: rotate the first r->rot_dim dims of a head by the angles of its position.
 * cos_sin: rot_dim / 2 cosines, then as many sines. */
void cpu_rotate(const struct cpu_kernels *k, float *head, const float *cos_sin,
                const struct rope *r);

/* states/: operations of layers with recurrent states. */
void cpu_recurrence(struct backend *b, struct mat out, struct mat x, struct mat gates,
                    const struct recurrence *r, const struct output_norm *after);
/* x = the gated norm of x, by gate of the same shape. */
void cpu_norm_gated(struct backend *b, struct mat x, struct mat gate, const struct gated_norm *n);
void cpu_gate_sigmoid(struct backend *b, struct mat x, struct mat gate);
void cpu_multiply(struct backend *b, struct mat x, struct mat y, enum activation act);

/* ranks.c: with one rank these communicate nothing. */
void cpu_all_reduce(struct backend *b, struct mat x);
void cpu_square_sums(struct backend *b, struct mat sums, struct mat x);
void cpu_norm_by_sums(struct backend *b, struct mat x, struct mat sums, int32_t width,
                      const struct norm *n);
void cpu_embed_part(struct backend *b, struct mat out, struct mat table, int32_t first,
                    float scale);
void cpu_gather_logits(struct backend *b, struct mat logits, struct mat part);
/* Whether this rank samples: rank 0 does. */
bool cpu_samples_tokens(const struct cpu_backend *c);
/* Rank 0's tokens of sampling rows [first, end) to all ranks. */
void cpu_broadcast_tokens(struct cpu_backend *c, int32_t first, int32_t end);

/* stages.c: with one stage these do nothing. */
void cpu_stage_receive(struct backend *b, struct mat x);
void cpu_stage_send(struct backend *b, struct mat x);

/* linear_tiled.c: linear by tiles. Needs c->k.linear, or one run of a weight in
 * blocks. */
void cpu_linear_tiled(struct cpu_backend *c, struct mat out, struct mat x, struct mat w,
                      const struct epilogue *ep);
/* linear_panels.c: linear for many rows of x. Needs c->k.panels. */
void cpu_linear_panels(struct cpu_backend *c, struct mat out, struct mat x, struct mat w,
                       const struct epilogue *ep);
/* panels_from.c: sets cpu_panels.from, for weights of type t, to what suits the
 * machine, by timing the first time. */
void cpu_panels_from(struct cpu_backend *c, enum dtype t);
/* The choice by the times of tiles and panels with half of the rows from which panels
 * are taken as they are built, and with as many. */
enum cpu_from { CPU_FROM_HALF, CPU_FROM_BUILT, CPU_FROM_TWICE };
enum cpu_from cpu_from_choice(const double tiles_us[2], const double panels_us[2]);
/* linear_codes.c: linear for many rows of x. Needs c->k.code_panels of w's format, one
 * run of a weight in blocks. */
void cpu_linear_codes(struct cpu_backend *c, struct mat out, struct mat x, struct mat w,
                      const struct epilogue *ep);
/* linear_blocks.c: linear with a weight kept in blocks. */
void cpu_linear_blocks(struct cpu_backend *c, struct mat out, struct mat x, struct mat w,
                       const struct epilogue *ep);
/* Makes out of the factors [rows, 2 * out.cols] of linear_gated. */
struct cpu_gate {
    struct cpu_backend *c;
    enum activation act;
    void (*run)(const struct cpu_gate *g, struct mat out, struct mat factors);
};
/* linear_gated with a weight kept in blocks: of many rows of x, the factors of some
 * columns at a time. */
void cpu_linear_gated_blocks(struct cpu_backend *c, struct mat out, struct mat workspace,
                             struct mat x, struct mat w, struct mat bias,
                             const struct cpu_gate *gate);
/* act_fixed.c: x [rows, cols] as products with `run` take it, where the file has a
 * scale for its activations; the result is x itself, or in c->rounded until the next
 * such call. A matrix without data: out of memory, which cpu_fail was told. */
struct mat cpu_rounded_x(struct cpu_backend *c, struct mat x, const struct cpu_weight *run);
/* Whether `packed` holds x as it is to be; if not, it is taken to from now on. */
bool cpu_packed_already(struct cpu_backend *c, struct cpu_packed want);
/* linear_tiled.c: make c->packed hold n_bytes. 0 or ERR_NOMEM. */
int cpu_reserve_packed(struct cpu_backend *c, int64_t n_bytes);
void cpu_free_packed(struct cpu_backend *c);
/* linear_tiled.c: sum [n][planes] becomes [n], the sums of each result's planes. */
void cpu_add_planes(float *sum, int32_t n, int32_t planes);
/* linear_stream.c: linear for one tile of x, at most TILE_ROWS rows of codes or floats,
 * packed at c->packed. */
void cpu_linear_stream(struct cpu_backend *c, struct mat out, struct mat x, struct mat w,
                       const struct epilogue *ep);
/* linear_stream.c: n products in one job, of which none reads what another writes. w is
 * one run of a weight in blocks without a scale for its inputs, and x has few rows:
 * with planes at most TILE_ROWS. */
struct cpu_product {
    struct mat out, x, w;
    struct epilogue ep;
};
void cpu_linear_products(struct cpu_backend *c, const struct cpu_product *p, int32_t n);
/* linear_tiled.c: x as codes for products with w, by which its rows with planes are at
 * most TILE_ROWS, at `to`, which has cpu_codes_bytes(x.cols). */
int64_t cpu_codes_bytes(int32_t cols);
void cpu_pack_codes(struct cpu_backend *c, char *to, struct mat x, const struct mat *w);
/* attention/units.c. Needs c->k.scores and its fellows. */
void cpu_attention_units(struct cpu_backend *c, struct mat out, struct mat qkv,
                         const struct attention *a);
/* Make each thread's part of c->attention_scratch hold the scores of a tile's keys for
 * ATTENTION_ROWS rows, and behind them the tile itself, keys of head_dim elements. 0 or
 * ERR_NOMEM. */
enum { ATTENTION_ROWS = 32 };
int cpu_attention_prepare(struct cpu_backend *c, int32_t head_dim);

static inline const float *mat_row_const(struct mat m, int64_t r)
{
    return (const float *)m.data + r * m.stride;
}
static inline float *mat_row(struct mat m, int64_t r)
{
    return (float *)m.data + r * m.stride;
}

#endif
