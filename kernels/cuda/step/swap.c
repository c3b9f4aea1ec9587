/* Blocks between the device and the host pool, on a stream of their own, so that steps
 * go on beside it.
 *
 * What must wait for what:
 *     a block leaves       after the last step that writes it (most of a group's blocks
 *                          were written long ago: they leave at once)
 *     a step               after what it reads has come back, and after blocks that it
 *                          overwrites have left; no other step waits
 *     a block comes back   after the last step that wrote its place: a sequence that
 *                          ended is computed once more by a step in flight
 * The stream's own order sees to the host blocks: what leaves and comes back through
 * the same one, and its next user. The ids of a block's tokens are few bytes: those of
 * host blocks lie on the device too, where the compute stream copies them.
 */
#include <stdlib.h>

#include "kernels/cuda/cuda.h"

/* Steps are numbered from 1 here. */
struct swap {
    cudaStream_t stream;
    cudaEvent_t moved;         /* all copies enqueued so far */
    cudaEvent_t needed;        /* those that the step at hand waits for */
    int64_t *written;          /* [n_blocks] the last step before this one that writes the block */
    int64_t *writes;           /* [n_blocks] this step's number: it writes the block */
    int64_t *swapped_out;      /* [n_blocks] the last step that the block left with */
    int64_t n_done;            /* blocks that left with steps up to this one are away */
    int64_t last_copied;       /* the last step with copies */
    struct block_copy *chosen; /* [n_blocks] scratch */
    int32_t *pair; /* [2 * n_host_blocks] of block_copy, on the device: the step's swaps */
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

/* Neighbouring blocks go as one copy, but never across two slices of pinned memory. */
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

/* Sets the mark of each block that the step writes: its tokens' and those made by
 * copies. */
static void mark_blocks(const struct cuda_backend *c, const struct batch *b, int64_t *mark,
                        int64_t step)
{
    for (int32_t i = 0; i < b->n_tokens; i++) {
        if (b->slot[i] >= 0) {
            mark[b->slot[i] / c->kv.block_size] = step;
        }
    }
    for (int32_t i = 0; i < b->n_copy; i++) {
        mark[b->copy[i].dst] = step;
    }
}

/* Whether a block that this step writes was told to leave by an earlier one and may not
 * be away yet. */
static bool overwrites_leaving(const struct cuda_backend *c, const struct batch *b)
{
    const struct swap *w = c->swap;

    for (int32_t i = 0; i < b->n_tokens; i++) {
        if (b->slot[i] >= 0 && w->swapped_out[b->slot[i] / c->kv.block_size] > w->n_done) {
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

/* Those of the step's blocks that leave which are written by a step in flight or not,
 * and by this step or not. */
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

/* What this step overwrites goes first: it waits for nothing else. */
static void swap_out(struct cuda_backend *c, const struct batch *b)
{
    copy_out(c, b, false, true);
    copy_out(c, b, true, true);
    if (overwrites_leaving(c, b)) { /* of this step or an earlier one */
        cuda_check(c, cudaEventRecord(c->swap->needed, c->swap->stream), "swapping");
        cuda_check(c, cudaStreamWaitEvent(c->stream, c->swap->needed, 0), "swapping");
    }
    copy_out(c, b, false, false);
    copy_out(c, b, true, false);
}

static void swap_in(struct cuda_backend *c, const struct batch *b)
{
    for (int32_t i = 0; i < b->n_swap_in; i++) {
        if (c->swap->written[b->swap_in[i].dst] > c->n_waited) {
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
            cudaGetLastError(); /* not ready is no failure */
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

/* n swaps to the device at `pair`; the arrays are ordinary memory, which has been
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
