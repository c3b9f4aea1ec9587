/* Swapping blocks between the device and the host pool, on a copy stream, so that steps
 * go on meanwhile.
 *
 * Dependencies:
 *     a block is swapped out   after the last step that writes it (most of a group's blocks
 *                              were written long ago and go at once)
 *     a step runs              after the blocks that it reads are swapped in, and after the
 *                              blocks that it overwrites are swapped out; no other step waits
 *     a block is swapped in    after the last step that wrote its place: a sequence that
 *                              ended may be computed once more by a step in flight; with
 *                              several KV groups after all steps, because a step in
 *                              flight may read a block that has left its window since
 * The copy stream's order covers host blocks: swap-out, swap-in, and the next use of
 * one. The token ids of host blocks are few bytes and stay on the device, where the
 * compute stream copies them.
 */
#include <stdlib.h>

#include "kernels/cuda/cuda.h"

/* Steps are numbered from 1 here; 0: never. */
struct swap {
    cudaStream_t stream;       /* the copy stream */
    cudaEvent_t moved;         /* after all copies enqueued so far */
    cudaEvent_t needed;        /* after the copies that the current step waits for */
    int64_t *written;          /* [n_blocks] last step before this one that writes the block */
    int64_t *writes;           /* [n_blocks] the current step's number if it writes the block */
    int64_t *swapped_out;      /* [n_blocks] last step that swapped the block out */
    int64_t n_done;            /* swap-outs of steps up to this one are complete */
    int64_t last_copied;       /* last step with copies */
    struct block_copy *chosen; /* [n_blocks] scratch */
    int32_t *pair; /* on the device: [2 * n_host_blocks] struct block_copy, the step's swaps */
};

int cuda_swap_init(struct cuda_backend *c, struct err *e)
{
    struct swap *w = calloc(1, sizeof(*w));

    if (!w) {
        return err_nomem(e, "swapping");
    }
    c->swap = w;
    w->written = calloc((size_t)c->n_blocks, sizeof(*w->written));
    w->writes = calloc((size_t)c->n_blocks, sizeof(*w->writes));
    w->swapped_out = calloc((size_t)c->n_blocks, sizeof(*w->swapped_out));
    w->chosen = malloc((size_t)c->n_blocks * sizeof(*w->chosen));
    if (!w->written || !w->writes || !w->swapped_out || !w->chosen) {
        return err_nomem(e, "swapping");
    }
    w->pair =
        cuda_alloc(c, (size_t)c->n_host_blocks * 2 * sizeof(struct block_copy), "swapping", e);
    if (!w->pair) {
        return ERR_NOMEM;
    }
    cudaError_t rc = cudaStreamCreateWithFlags(&w->stream, cudaStreamNonBlocking);
    rc = rc == cudaSuccess ? cudaEventCreateWithFlags(&w->moved, cudaEventDisableTiming) : rc;
    rc = rc == cudaSuccess ? cudaEventCreateWithFlags(&w->needed, cudaEventDisableTiming) : rc;
    return rc == cudaSuccess ? 0 : cuda_error(e, rc, "swapping");
}

void cuda_swap_release(struct cuda_backend *c)
{
    struct swap *w = c->swap;

    if (!w) {
        return;
    }
    if (w->stream) {
        cudaStreamSynchronize(w->stream);
        cudaStreamDestroy(w->stream);
    }
    if (w->moved) {
        cudaEventDestroy(w->moved);
    }
    if (w->needed) {
        cudaEventDestroy(w->needed);
    }
    free(w->written);
    free(w->writes);
    free(w->swapped_out);
    free(w->chosen);
    free(w);
    c->swap = NULL;
}

/* Copies blocks; neighbouring ones go as one copy, but never across two pinned
 * slices. */
static void copy_blocks(struct cuda_backend *c, const struct block_copy *copy, int32_t n, bool out)
{
    size_t bytes = (size_t)kv_layout_block_bytes(&c->kv);
    int32_t slice = cuda_kv_slice_blocks(c);

    for (int32_t i = 0; i < n;) {
        int32_t run = 1;
        while (i + run < n && copy[i + run].src == copy[i].src + run &&
               copy[i + run].dst == copy[i].dst + run &&
               (out ? copy[i + run].dst : copy[i + run].src) % slice != 0) {
            run++;
        }
        const char *from = (out ? c->kv_data : c->kv_host) + bytes * (size_t)copy[i].src;
        char *to = (out ? c->kv_host : c->kv_data) + bytes * (size_t)copy[i].dst;
        cuda_kv_swaps(c, (out ? copy[i].dst : copy[i].src) + run - 1);
        enum cudaMemcpyKind kind = out ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice;
        cuda_check(c, cudaMemcpyAsync(to, from, bytes * (size_t)run, kind, c->swap->stream),
                   "swapping");
        i += run;
    }
}

/* Sets mark[b] = step for each block b that the step writes, by tokens or block
 * copies. */
static void mark_blocks(const struct cuda_backend *c, const struct batch *b, int64_t *mark,
                        int64_t step)
{
    for (int32_t i = 0; i < b->n_tokens; i++) {
        if (b->slot[i] >= 0) {
            mark[b->slot[i] / c->kv.block_size] = step;
        }
    }
    for (int32_t i = 0; i < b->n_group_slots; i++) {
        if (b->group_slot[i] >= 0) {
            mark[b->group_slot[i] / c->kv.block_size] = step;
        }
    }
    for (int32_t i = 0; i < b->n_copy; i++) {
        mark[b->copy[i].dst] = step;
    }
}

/* Whether this step writes a block whose swap-out by an earlier step may be
 * incomplete. */
static bool overwrites_leaving(const struct cuda_backend *c, const struct batch *b)
{
    const struct swap *w = c->swap;

    for (int32_t i = 0; i < b->n_tokens; i++) {
        if (b->slot[i] >= 0 && w->swapped_out[b->slot[i] / c->kv.block_size] > w->n_done) {
            return true;
        }
    }
    for (int32_t i = 0; i < b->n_group_slots; i++) {
        int32_t slot = b->group_slot[i];
        if (slot >= 0 && w->swapped_out[slot / c->kv.block_size] > w->n_done) {
            return true;
        }
    }
    for (int32_t i = 0; i < b->n_copy; i++) {
        if (w->swapped_out[b->copy[i].dst] > w->n_done) {
            return true;
        }
    }
    return false;
}

/* Selects the step's swap-outs whose blocks are (in_flight) or are not written by a
 * step in flight, and are (overwritten) or are not written by this step. Returns how
 * many. */
static int32_t choose(const struct cuda_backend *c, const struct batch *b, bool in_flight,
                      bool overwritten)
{
    const struct swap *w = c->swap;
    int32_t n = 0;

    for (int32_t i = 0; i < b->n_swap_out; i++) {
        int32_t src = b->swap_out[i].src;
        if ((w->written[src] > c->n_waited) == in_flight &&
            (w->writes[src] == c->n_begun + 1) == overwritten) {
            w->chosen[n++] = b->swap_out[i];
        }
    }
    return n;
}

/* The copy stream waits for all steps enqueued so far. */
static void wait_for_steps(struct cuda_backend *c)
{
    if (c->n_begun > 0) {
        cuda_check(
            c, cudaStreamWaitEvent(c->swap->stream, c->step[(c->n_begun - 1) % STEP_RING].done, 0),
            "swapping");
    }
}

static void copy_out(struct cuda_backend *c, const struct batch *b, bool in_flight,
                     bool overwritten)
{
    int32_t n = choose(c, b, in_flight, overwritten);

    if (n > 0 && in_flight) {
        wait_for_steps(c);
    }
    copy_blocks(c, c->swap->chosen, n, true);
    for (int32_t i = 0; i < n; i++) {
        c->swap->swapped_out[c->swap->chosen[i].src] = c->n_begun + 1;
    }
}

/* Blocks that this step overwrites go first, so it waits for nothing else. */
static void swap_out(struct cuda_backend *c, const struct batch *b)
{
    copy_out(c, b, false, true);
    copy_out(c, b, true, true);
    if (overwrites_leaving(c, b)) { /* by this step's swaps or earlier ones */
        cuda_check(c, cudaEventRecord(c->swap->needed, c->swap->stream), "swapping");
        cuda_check(c, cudaStreamWaitEvent(c->stream, c->swap->needed, 0), "swapping");
    }
    copy_out(c, b, false, false);
    copy_out(c, b, true, false);
}

static void swap_in(struct cuda_backend *c, const struct batch *b)
{
    for (int32_t i = 0; i < b->n_swap_in; i++) {
        if (backend_kv_groups(&c->config) > 1 ||
            c->swap->written[b->swap_in[i].dst] > c->n_waited) {
            wait_for_steps(c);
            break;
        }
    }
    copy_blocks(c, b->swap_in, b->n_swap_in, false);
}

void cuda_swap(struct cuda_backend *c, const struct batch *b)
{
    struct swap *w = c->swap;

    if (!w) {
        return;
    }
    int64_t step = c->n_begun + 1;
    if (w->last_copied > w->n_done) {
        if (cudaEventQuery(w->moved) == cudaSuccess) {
            w->n_done = w->last_copied;
        } else {
            cudaGetLastError(); /* cudaErrorNotReady is no failure */
        }
    }
    if (b->n_swap_out > 0 || w->last_copied > w->n_done) {
        mark_blocks(c, b, w->writes, step);
        swap_out(c, b);
    }
    swap_in(c, b);
    if (b->n_swap_out > 0 || b->n_swap_in > 0) {
        cuda_check(c, cudaEventRecord(w->moved, w->stream), "swapping");
        w->last_copied = step;
    }
    if (b->n_swap_in > 0) {
        cuda_check(c, cudaStreamWaitEvent(c->stream, w->moved, 0), "swapping");
    }
    mark_blocks(c, b, w->written, step);
}

/* Sends n swaps to `pair` on the device. The source is ordinary memory, so it has been
 * read on return. */
static void send_pairs(struct cuda_backend *c, int32_t *pair, const struct block_copy *copy,
                       int32_t n)
{
    cuda_check(
        c,
        cudaMemcpyAsync(pair, copy, (size_t)n * sizeof(*copy), cudaMemcpyHostToDevice, c->stream),
        "swapping");
}

void cuda_swap_tokens(struct cuda_backend *c, const struct batch *b)
{
    if (b->n_swap_out == 0 && b->n_swap_in == 0) {
        return;
    }
    if (!c->swap || b->n_swap_out > c->n_host_blocks || b->n_swap_in > c->n_host_blocks) {
        err_set(&c->failed, ERR_INVALID, "cuda: more blocks are swapped than the host pool has");
        return;
    }
    int32_t *out = c->swap->pair, *in = out + 2 * (int64_t)b->n_swap_out;
    send_pairs(c, out, b->swap_out, b->n_swap_out);
    send_pairs(c, in, b->swap_in, b->n_swap_in);
    launch_token_copy(&c->arrays, out, b->n_swap_out, 0, c->n_blocks, c->stream);
    launch_token_copy(&c->arrays, in, b->n_swap_in, c->n_blocks, 0, c->stream);
}
