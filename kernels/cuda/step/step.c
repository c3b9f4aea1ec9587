/* A step on the device: packing its inputs, the prologue, graphs of decode steps,
 * results.
 *
 * Order on the stream: staging copy, swaps, block copies, then either a graph
 * (prologue, forward, sampling) or the same kernel by kernel. All calls but step_wait
 * return at once; that waits for the step's last event.
 */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "config/base/limits.h"
#include "kernels/batch_check.h"
#include "kernels/cuda/attention/latent_expanded.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/heuristics.h"
#include "kernels/cuda/step/heuristics_verify.h"

static struct cuda_step *step_at(struct cuda_backend *c, int64_t i)
{
    return &c->step[i % STEP_RING];
}
static struct cuda_step *step_now(struct cuda_backend *c)
{
    return step_at(c, c->n_begun);
}

/* ---- packing ---- */

/* Packs arrays into a staging buffer. */
struct staging_writer {
    char *base;
    int64_t at;
};

/* Appends n bytes, 16-byte aligned; data NULL: unset. Returns their offset. With `base`
 * NULL only the size is computed. */
static int32_t pack(struct staging_writer *p, const void *data, int64_t n_bytes)
{
    int64_t at = p->at;

    if (p->base && data && n_bytes > 0) {
        memcpy(p->base + at, data, (size_t)n_bytes);
    }
    p->at += div_ceil(n_bytes, 16) * 16;
    return (int32_t)at;
}

/* Computes the first sample of every logits row, [n_logits + 1]. */
static void fill_groups(int32_t *group, const struct batch *b)
{
    int32_t i = 0;

    for (int32_t row = 0; row <= b->n_logits; row++) {
        while (i < b->n_samples && b->sample[i].logits_row < row) {
            i++;
        }
        group[row] = i;
    }
}

struct split_kv_plan cuda_split_kv(const struct cuda_backend *c, const int32_t *start, int32_t n)
{
    int32_t tiles = (int32_t)div_ceil(MAX(c->q_heads, 1), 16);

    return attn_split_kv(start, n, c->kv_view.n_kv_heads * tiles, c->attn.blocks,
                         MAX(c->attn.shape.warps, 1));
}

/* Packs the runs of sequences with a shared prefix, if the kernels can use them: the 16
 * rows of a matrix tile must hold the query heads of at least two. */
static void pack_shared(struct cuda_backend *c, struct staging_writer *p, struct step_header *h,
                        const struct batch *b)
{
    h->off_shared = pack(p, NULL, (b->n_decode / 2 + 1) * (int64_t)sizeof(struct shared_run));
    h->off_shared_start = pack(p, NULL, (b->n_decode / 2 + 2) * (int64_t)sizeof(int32_t));
    h->off_skip = pack(p, NULL, MAX(b->n_decode, 1) * (int64_t)sizeof(int32_t));
    if (!p->base) {
        return;
    }
    int32_t most = c->q_heads > 0 && c->kv_view.panel_log2 > 0 && !c->config.deterministic
                       ? 16 / c->q_heads
                       : 0;
    int64_t chunk_bytes =
        2ll * ATTN_CHUNK * c->kv_view.head_dim * c->kv_view.n_kv_heads * dtype_bytes(c->kv.dtype);
    int32_t *start = (int32_t *)(p->base + h->off_shared_start);
    struct shared_run *run = (struct shared_run *)(p->base + h->off_shared);
    int64_t worth = shared_worth_bytes(b->n_decode, c->speed.memory_gbs) / MAX(chunk_bytes, 1) + 1;
    h->n_shared = shared_runs(b, c->kv.block_size, ATTN_CHUNK, most, worth, run, start,
                              (int32_t *)(p->base + h->off_skip));
    h->shared_split_kv = cuda_split_kv(c, start, h->n_shared);
    c->shared = h->n_shared > 0;
}

/* Packs what the step widens for prefill; c->panel_step gets its sizes. */
static void pack_widened(struct cuda_backend *c, struct staging_writer *p, const struct batch *b,
                         int32_t *ret_seq, int32_t *ret_tile)
{
    int32_t n = c->panel.data ? b->n_seqs - b->n_decode : 0;
    int32_t seq = pack(p, NULL, n * (int64_t)sizeof(struct widened_seq));
    int32_t first = pack(p, NULL, n > 0 ? b->n_seqs * (int64_t)sizeof(int32_t) : 0);
    struct batch in_panel = *b; /* whose table rows are first blocks */

    c->panel_step = (struct widened_step){.n_seqs = n, .n_tiles = n > 0 ? c->n_tiles : 0};
    *ret_seq = seq;
    *ret_tile = (int32_t)p->at;
    p->at += c->panel_step.n_tiles * (int64_t)sizeof(struct query_tile);
    if (p->base && n > 0) {
        in_panel.row = (int32_t *)(p->base + first);
        c->panel_step.n_blocks =
            widened_seqs(b, c->kv.block_size, MAX(c->q_heads, 1), &c->speed,
                         (struct widened_seq *)(p->base + seq), (int32_t *)(p->base + first));
        prefill_tiles(&in_panel, ATTN_PREFILL_ROWS, (struct query_tile *)(p->base + *ret_tile));
    }
}

/* Packs what the step expands for prefill. A cache of latents has no panel, so the room
 * of what is widened is free for it. */
static void pack_expanded(struct cuda_backend *c, struct staging_writer *p, const struct batch *b,
                          int32_t *ret_seq, int32_t *ret_tile)
{
    int32_t most = c->expanded.most_rows, n = most > 0 ? b->n_seqs - b->n_decode : 0;

    *ret_seq = pack(p, NULL, n * (int64_t)sizeof(struct expanded_seq));
    *ret_tile = (int32_t)p->at;
    p->at += (n > 0 ? c->n_tiles : 0) * (int64_t)sizeof(struct query_tile);
    if (p->base && n > 0) {
        struct expanded_portion portion = {.next = b->n_decode};
        while (expanded_next(b, most, (struct expanded_seq *)(p->base + *ret_seq),
                             (struct query_tile *)(p->base + *ret_tile), &portion)) {
        }
    }
}

/* Offsets that, unlike the header's, only the host needs. */
struct host_offsets {
    int32_t off_copy, off_tiles, off_widened_seq, off_widened_tile;
    int32_t off_expanded_seq, off_expanded_tile;
};

static void pack_step(struct cuda_backend *c, struct staging_writer *p, struct step_header *h,
                      const struct batch *b, struct host_offsets *ret)
{
    const int64_t I = sizeof(int32_t);

    p->at = div_ceil((int64_t)sizeof(*h), 16) * 16;
    h->off_token = pack(p, b->token, b->n_tokens * I);
    h->off_token_src = pack(p, b->token_src, b->n_tokens * I);
    h->off_position = pack(p, b->position, b->n_tokens * I);
    h->off_slot = pack(p, b->slot, b->n_tokens * I);
    h->off_group_slot = pack(p, b->group_slot, b->n_group_slots * I);
    h->off_q_start = pack(p, b->q_start, (b->n_seqs + 1) * I);
    h->off_kv_len = pack(p, b->kv_len, b->n_seqs * I);
    h->off_row = pack(p, b->row, b->n_seqs * I);
    h->off_update = pack(p, b->table_update, b->n_table_update * (int64_t)sizeof(*b->table_update));
    h->off_table_block = pack(p, b->table_block, b->n_table_block * I);
    h->off_logits_token = pack(p, b->logits_token, b->n_logits * I);
    h->off_sample = pack(p, b->sample, b->n_samples * (int64_t)sizeof(*b->sample));
    h->off_bias = pack(p, b->token_bias, b->n_token_bias * (int64_t)sizeof(*b->token_bias));
    h->off_mask = pack(p, b->mask_word, b->n_mask_word * (int64_t)sizeof(*b->mask_word));
    h->off_group = (int32_t)p->at;
    if (p->base) {
        fill_groups((int32_t *)(p->base + p->at), b);
    }
    p->at += div_ceil((b->n_logits + 1) * I, 16) * 16;
    pack_shared(c, p, h, b);
    const int32_t *skip = p->base ? (const int32_t *)(p->base + h->off_skip) : NULL;
    h->off_chunk_start = (int32_t)p->at;
    for (int32_t w = 0; w < c->n_windows && p->base != NULL; w++) {
        int32_t *start = (int32_t *)(p->base + p->at) + (int64_t)w * (b->n_decode + 1);
        attn_chunk_starts(b, c->window[w], ATTN_CHUNK, c->window[w] == 0 ? skip : NULL, start);
        h->split_kv[w] = cuda_split_kv(c, start, b->n_decode);
    }
    p->at += div_ceil(c->n_windows * (int64_t)(b->n_decode + 1) * I, 16) * 16;
    ret->off_copy = pack(p, b->copy, b->n_copy * (int64_t)sizeof(*b->copy));
    ret->off_tiles = (int32_t)p->at;
    c->n_tiles = prefill_tiles(b, ATTN_PREFILL_ROWS,
                               p->base != NULL ? (struct query_tile *)(p->base + p->at) : NULL);
    p->at += c->n_tiles * (int64_t)sizeof(struct query_tile);
    pack_widened(c, p, b, &ret->off_widened_seq, &ret->off_widened_tile);
    pack_expanded(c, p, b, &ret->off_expanded_seq, &ret->off_expanded_tile);
}

/* Checks the batch's sizes and indices, those of late masks included. token_src may be
 * NULL in a batch without look-ahead. */
static int check_batch(const struct cuda_backend *c, const struct batch *b, struct err *e)
{
    int64_t noted_tokens =
        c->arrays.slot_token ? (int64_t)c->config.max_blocks_per_seq * c->kv.block_size : 0;
    int rc = batch_check(&c->config, "cuda", noted_tokens, b, e);

    if (rc == 0 &&
        (b->n_late_mask < 0 || (c->late.flags ? b->n_late_mask > c->late.most
                                              : b->n_late_mask > 0 && !c->config.pipeline))) {
        rc = err_set(e, ERR_INVALID, "cuda: step %llu has %d late masks; there is room for %d",
                     (unsigned long long)b->step, b->n_late_mask, c->late.most);
    }
    for (int32_t i = 0; rc == 0 && i < b->n_samples; i++) {
        if (b->sample[i].late_mask < 0 || b->sample[i].late_mask > b->n_late_mask) {
            rc = err_set(e, ERR_INVALID, "cuda: step %llu: a late mask out of range",
                         (unsigned long long)b->step);
        }
    }
    return rc;
}

/* Number of leading sequences with exactly one token. */
static int32_t count_decodes(const struct batch *b)
{
    int32_t n = 0;

    while (n < b->n_seqs && b->q_start[n + 1] - b->q_start[n] == 1) {
        n++;
    }
    return n;
}

static int32_t top_stride(const struct batch *b)
{
    int32_t stride = 0;

    for (int32_t i = 0; i < b->n_samples; i++) {
        const struct sample_row *s = &b->sample[i];
        stride = MAX(stride, s->kind == SAMPLE_CANDIDATES ? s->n_candidates : s->n_logprobs);
    }
    return stride;
}

static void fill_header(struct cuda_backend *c, struct step_header *h, const struct cuda_step *s,
                        const struct batch *b)
{
    h->n_tokens = b->n_tokens;
    h->n_padded = c->padded;
    h->n_seqs = b->n_seqs;
    h->n_decode = b->n_decode;
    h->n_logits = b->n_logits;
    h->n_samples = b->n_samples;
    h->n_table_update = b->n_table_update;
    h->n_windows = c->n_windows;
    h->n_kv_groups = backend_kv_groups(&c->config);
    h->top_stride = s->top_stride;
    h->step = b->step;
    h->n_late_mask = b->n_late_mask;
    h->result_token = s->token;
    h->result_logprob = s->logprob;
    h->result_top_token = s->top_token;
    h->result_top_logprob = s->top_logprob;
    cuda_rank_results(c, h);
}

/* Enqueues what precedes the step's kernels; the inputs are in p->base. */
static void send_step(struct cuda_backend *c, const struct cuda_step *s,
                      const struct staging_writer *p, const struct host_offsets *off)
{
    const struct batch *b = &c->batch;

    cuda_check(c, cudaEventRecord(s->begun, c->stream), "starting a step");
    cuda_check(c,
               cudaMemcpyAsync(c->staging_device, p->base, (size_t)p->at, cudaMemcpyHostToDevice,
                               c->stream),
               "starting a step");
    cuda_swap(c, b);
    cuda_swap_tokens(c, b);
    if (b->n_copy > 0) {
        launch_block_copy(&c->arrays, c->kv_data, kv_layout_block_bytes(&c->kv),
                          (int32_t *)(c->staging_device + off->off_copy), b->n_copy, c->stream);
    }
}

/* The batch, as the device gets it: `h` is its header, which the writer began. */
static void pack_into(struct cuda_backend *c, struct cuda_step *s, struct staging_writer *p,
                      const struct batch *b, struct host_offsets *off)
{
    struct step_header *h = (struct step_header *)p->base;

    memset(h, 0, sizeof(*h));
    pack_step(c, p, h, b, off);
    if (!b->token_src && b->n_tokens > 0) {
        memset(p->base + h->off_token_src, 0xFF, (size_t)b->n_tokens * sizeof(int32_t));
    }
    fill_header(c, h, s, b);
    c->header = h;
    c->tile_device = (struct query_tile *)(c->staging_device + off->off_tiles);
    c->panel_step.seq = (struct widened_seq *)(c->staging_device + off->off_widened_seq);
    c->panel_step.tile = (struct query_tile *)(c->staging_device + off->off_widened_tile);
    c->expanded.seq = (struct expanded_seq *)(c->staging_device + off->off_expanded_seq);
    c->expanded.tile = (struct query_tile *)(c->staging_device + off->off_expanded_tile);
}

/* Rows of the graph of a step of n rows: no part of the logits gets more than fit. Less
 * than n: it has none. */
static int32_t rows_of_graph(const struct cuda_backend *c, int32_t n)
{
    int32_t rows = MIN(graph_rows(n), c->max_graph_rows), part = c->logits_rows;

    return part > 0 ? MIN(rows, (int32_t)div_ceil(n, part) * part) : rows;
}

/* What operations of this step ask. */
static void note_batch(struct cuda_backend *c, const struct batch *b)
{
    c->batch = *b;
    c->greedy = batch_greedy(b) && !c->config.deterministic;
    c->late_mask = b->n_late_mask > 0;
    c->feeds = c->is_head && b->n_tokens > 0 && b->token_src && b->token_src[0] >= 0;
    c->late_waited = false;
    cuda_rank_choose(c, b);
    c->logits_first = -1;
    c->padded = graph_eligible(b) ? rows_of_graph(c, b->n_tokens) : 0;
    c->padded = MAX(c->padded, b->n_tokens);
}

int cuda_step_begin(struct backend *backend, const struct batch *batch, struct err *e)
{
    struct cuda_backend *c = cuda_of(backend);
    int rc = check_batch(c, batch, e);

    if (rc < 0) {
        return rc;
    }
    struct batch b = *batch;
    bool verifies =
        b.n_seqs > 0 && b.lcp_blocks &&
        split_verified(&b, &c->verify_rows, c->config.max_seqs, MAX(c->kv.block_size, 1));
    b.n_decode = count_decodes(&b);
    struct step_header measured;
    struct staging_writer size = {0};
    struct host_offsets off;
    pack_step(c, &size, &measured, &b, &off);
    struct cuda_step *s = step_now(c);
    s->top_stride = top_stride(&b);
    if (s->in_flight && !cuda_check(c, cuda_wait_event(c, s->done), "an earlier step")) {
        return err_set(e, c->failed.code, "%s", c->failed.text);
    }
    if (size.at > c->staging_cap || (int64_t)s->top_stride * b.n_samples > s->top_cap) {
        return err_set(e, ERR_INVALID,
                       "cuda: step %llu is larger than its limits: %lld bytes of %lld",
                       (unsigned long long)b.step, (long long)size.at, (long long)c->staging_cap);
    }
    rc = cuda_stage_begin(c, &b, e);
    if (rc < 0) {
        return rc;
    }
    note_batch(c, &b);
    c->verifies = verifies && c->states.n_layers > 0;
    struct staging_writer p = {.base =
                                   size.at <= c->staging_pinned ? s->staging : c->staging_large};
    pack_into(c, s, &p, &b, &off);
    send_step(c, s, &p, &off);
    s->step = b.step;
    s->n_samples = b.n_samples;
    c->in_step = true;
    c->handed_us = clock_us();
    c->started = false;
    c->recording = NULL;
    return 0;
}

/* Called between operations. Handing one to the device takes the host a fraction of
 * LAUNCH_WAIT_US; a longer time was spent waiting in the driver. */
static void note_wait(struct cuda_backend *c)
{
    enum { LAUNCH_WAIT_US = 100 };
    int64_t now_us = clock_us(), us = now_us - c->handed_us;

    c->launch_waits_us += us > LAUNCH_WAIT_US ? us : 0;
    c->handed_us = now_us;
}

int64_t cuda_launch_waits_us(struct backend *b)
{
    return cuda_of(b)->launch_waits_us;
}

void cuda_start_step(struct cuda_backend *c)
{
    if (!c->started) {
        c->started = true;
        launch_prologue(&c->arrays, MAX(c->padded, 256), c->stream);
    }
}

void cuda_start(struct cuda_backend *c)
{
    note_wait(c);
    cuda_start_step(c);
    cuda_fused_flush(c);
}

/* ---- graphs ---- */

static struct cuda_graph *graph_of(struct cuda_backend *c, int32_t rows)
{
    for (int32_t i = 0; i < c->n_graphs; i++) {
        if (c->graph[i].rows == rows && c->graph[i].greedy == c->greedy &&
            c->graph[i].topk_merge == c->topk_merge && c->graph[i].shared == c->shared &&
            c->graph[i].late_mask == c->late_mask && c->graph[i].feeds == c->feeds &&
            c->graph[i].verifies == c->verifies) {
            return &c->graph[i];
        }
    }
    if (c->n_graphs == c->graphs_cap) {
        int32_t cap = c->graphs_cap * 2 + 32;
        struct cuda_graph *grown = realloc(c->graph, (size_t)cap * sizeof(*grown));
        if (!grown) {
            return NULL;
        }
        c->graph = grown;
        c->graphs_cap = cap;
    }
    c->graph[c->n_graphs] = (struct cuda_graph){.rows = rows,
                                                .greedy = c->greedy,
                                                .topk_merge = c->topk_merge,
                                                .shared = c->shared,
                                                .late_mask = c->late_mask,
                                                .feeds = c->feeds,
                                                .verifies = c->verifies};
    return &c->graph[c->n_graphs++];
}

/* Whether there is memory for another graph. A captured step that fails for lack of
 * memory is lost, and the engine with it; so nothing is captured on a nearly full
 * device, and steps go kernel by kernel. The check is repeated now and then. Ranks
 * capture together or not at all: a graph sums padded rows over them, which a step
 * without one has not, and what one rank sends the others must wait for. */
static bool memory_for_graph(struct cuda_backend *c, struct cuda_graph *g)
{
    enum { SPARE_BYTES = 64 << 20, RETRY_EVERY = 256 };
    size_t free_bytes = 0;
    size_t total_bytes = 0;

    if (g->n_seen % RETRY_EVERY != 2) {
        return false;
    }
    bool room = cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess;
    return cuda_ranks_all(c, room && free_bytes >= SPARE_BYTES);
}

/* The first decode step of a size runs kernel by kernel, which makes everything that is
 * made on demand; the second is captured, padded, and launched by step_end; later ones
 * are replayed. */
bool cuda_replay(struct backend *backend, const struct batch *batch)
{
    struct cuda_backend *c = cuda_of(backend);

    (void)batch; /* c->batch has the drafts that it verifies as decodes */
    if (!cuda_usable(c) || c->started || c->recording || !graph_eligible(&c->batch)) {
        return false;
    }
    int32_t rows = rows_of_graph(c, c->batch.n_tokens);
    if (rows < c->batch.n_tokens || rows != c->padded) {
        return false;
    }
    struct cuda_graph *g = graph_of(c, rows);
    if (!g) {
        return false;
    }
    /* a replay finds sums that another step left, and leaves its own */
    c->small_squares.zero[0] = c->small_squares.zero[1] = false;
    if (g->exec) {
        c->started = true;
        bool ok = cuda_check(c, cudaGraphLaunch(g->exec, c->stream), "launching a step");
        note_wait(c);
        return ok;
    }
    c->recording = g;
    if (g->n_seen++ > 0 && memory_for_graph(c, g)) {
        c->capturing =
            cuda_check(c, cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal),
                       "capturing a step");
    }
    return false;
}

static void finish_capture(struct cuda_backend *c)
{
    cudaGraph_t graph = NULL;

    c->capturing = false;
    if (!cuda_check(c, cudaStreamEndCapture(c->stream, &graph), "capturing a step")) {
        return;
    }
    if (cuda_check(c, cudaGraphInstantiate(&c->recording->exec, graph, 0), "capturing a step")) {
        cuda_check(c, cudaGraphLaunch(c->recording->exec, c->stream), "launching a step");
    }
    cudaGraphDestroy(graph);
    /* save now: the timings survive however this process ends */
    product_store_save(&c->products);
}

int cuda_step_end(struct backend *backend, struct err *e)
{
    struct cuda_backend *c = cuda_of(backend);
    struct cuda_step *s = step_now(c);

    cuda_start(c);
    cuda_expert_load_end(c);
    if (c->capturing) {
        finish_capture(c);
    }
    c->recording = NULL;
    c->in_step = false;
    cuda_check(c, cudaGetLastError(), "a kernel of the step");
    cuda_stage_end(c);
    cuda_check(c, cudaEventRecord(s->done, c->stream), "ending a step");
    s->in_flight = true;
    c->n_begun++;
    return cuda_usable(c) ? 0 : err_set(e, c->failed.code, "%s", c->failed.text);
}

int cuda_step_wait(struct backend *backend, struct results *ret, struct err *e)
{
    struct cuda_backend *c = cuda_of(backend);

    if (c->n_waited == c->n_begun) {
        return err_set(e, ERR_INVALID, "cuda: no step to wait for");
    }
    struct cuda_step *s = step_at(c, c->n_waited++);
    cuda_check(c, cuda_wait_event(c, s->done), "a step");
    s->in_flight = false;
    if (!cuda_usable(c)) {
        return err_set(e, c->failed.code, "%s", c->failed.text);
    }
    float ms = 0;
    cuda_check(c, cudaEventElapsedTime(&ms, s->begun, s->done), "a step");
    cuda_stage_tokens_sampled(c, s->token);
    *ret = (struct results){.step = s->step,
                            .n_samples = s->n_samples,
                            .top_stride = s->top_stride,
                            .token = s->token,
                            .logprob = s->logprob,
                            .top_token = s->top_token,
                            .top_logprob = s->top_logprob,
                            .device_us = MAX((int64_t)(ms * 1000.0f), 1),
                            .experts = cuda_expert_load(c)};
    return 0;
}
