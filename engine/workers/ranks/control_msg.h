/* What ranks tell rank 0, over a socket: who they are, that they are ready, why they
 * cannot go on. Rare, of one size; but the rank that draws for a pipeline tells the
 * results of every step, which follow their msg. */
#ifndef QUIRE_ENGINE_WORKERS_RANKS_CONTROL_MSG_H
#define QUIRE_ENGINE_WORKERS_RANKS_CONTROL_MSG_H

#include "engine/workers/executor.h"
#include "engine/workers/microbatch.h"
#include "models/model.h"

enum control_msg_kind { CONTROL_HELLO = 1, CONTROL_READY, CONTROL_FAILED, CONTROL_RESULTS };

/* What must be the same on all ranks, and what their memory holds. */
struct rank_hello {
    char version[32];
    uint64_t checkpoint; /* model_digest */
    int64_t n_ranks, n_stages, vocab, block_size, max_num_seqs, max_num_batched_tokens, max_samples,
        deterministic;
    char dtype[16];
    int64_t n_blocks, n_host_blocks, max_len; /* what there is room for: the least counts */
};

struct control_msg {
    uint32_t magic, kind;
    int32_t rank;
    struct rank_hello hello; /* CONTROL_HELLO */
    char text[464];          /* CONTROL_FAILED */
    uint64_t step;           /* CONTROL_RESULTS */
    int32_t n_samples, top_stride;
};

/* Rank 0's answer to all hellos, as message RANK_POOLS. */
struct rank_pools {
    int32_t n_blocks, n_host_blocks, max_len;
};

void rank_hello_fill(struct rank_hello *ret, const struct executor_info *x, const struct model *m,
                     bool deterministic);
/* ERR_INVALID, naming what differs: a rank that would compute something else. */
int rank_hello_compare(const struct rank_hello *first, const struct rank_hello *other, int32_t rank,
                       struct err *e);

int control_msg_send(int fd, const struct control_msg *n, struct err *e);
/* 1; 0 when the other end is closed; ERR_INVALID or ERR_IO for what is not a msg.
 * Blocks, but not for the rest of what began. */
int control_msg_receive(int fd, struct control_msg *ret, struct err *e);
/* A CONTROL_RESULTS with all its rows. */
int rank_results_send(int fd, int32_t rank, const struct results *r, struct err *e);
/* What follows a CONTROL_RESULTS, of at most max_samples rows, into `g`. As
 * control_msg_receive. */
int rank_results_receive(int fd, const struct control_msg *msg, struct gathered *g,
                         int32_t max_samples, struct err *e);

#endif
