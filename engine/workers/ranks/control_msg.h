/* Control messages, which ranks send to rank 0 over a socket: their configuration, that
 * they are ready, why they failed. All have one size and are rare, except that in a
 * pipeline the rank that samples sends the results of every step, whose rows follow the
 * message. In the other direction rank 0 sends late masks to ranks that sample. */
#ifndef QUIRE_ENGINE_WORKERS_RANKS_CONTROL_MSG_H
#define QUIRE_ENGINE_WORKERS_RANKS_CONTROL_MSG_H

#include "engine/workers/executor.h"
#include "engine/workers/microbatch.h"
#include "models/model.h"

enum control_msg_kind {
    CONTROL_HELLO = 1,
    CONTROL_READY,
    CONTROL_FAILED,
    CONTROL_RESULTS,
    CONTROL_MASKS
};

/* What must be equal on all ranks, and the pools that a rank's memory allows. */
struct rank_hello {
    char version[32];    /* QUIRE_VERSION */
    uint64_t checkpoint; /* model_digest: configuration and tensors */
    uint64_t draft;      /* the same of the draft model; 0: there is none */
    /* n_ranks: of each stage; the others as the settings and executor_info */
    int64_t n_ranks, n_stages, vocab, block_size, n_kv_groups, max_num_seqs, max_num_batched_tokens,
        max_samples, deterministic, expert_parallel;
    char dtype[16];    /* of the weights */
    char kv_dtype[16]; /* of cached keys and values */
    /* pools that this rank has memory for; the smallest of all ranks are used */
    int64_t n_blocks, n_host_blocks, max_len;
};

struct control_msg {
    uint32_t magic, kind;    /* magic is set by control_msg_send; kind: enum control_msg_kind */
    int32_t rank;            /* the sender */
    struct rank_hello hello; /* CONTROL_HELLO */
    char text[464];          /* CONTROL_FAILED: the reason */
    uint64_t step;           /* CONTROL_RESULTS, CONTROL_MASKS: the step that they belong to */
    int32_t n_samples, top_stride; /* CONTROL_RESULTS: sizes of the arrays that follow */
    /* CONTROL_MASKS: masks, -1: no more will come; words of each. What follows is for
     * each mask whether it has words, then the words. */
    int32_t n_masks, mask_words;
};

/* Rank 0's answer to all hellos, sent as message STEP_CHANNEL_POOLS. */
struct rank_pools {
    int32_t n_blocks, n_host_blocks, max_len; /* see executor_info */
};

/* draft: as in struct rank_hello. */
void rank_hello_fill(struct rank_hello *ret, const struct executor_info *x, const struct model *m,
                     uint64_t draft, bool deterministic);
/* Checks that two ranks would compute the same. ERR_INVALID names what differs. */
int rank_hello_compare(const struct rank_hello *first, const struct rank_hello *other, int32_t rank,
                       struct err *e);

int control_msg_send(int fd, const struct control_msg *n, struct err *e);
/* Receives a message. 1; 0: the other end closed the connection; ERR_INVALID or ERR_IO:
 * malformed. Blocks until a message begins, but not for the rest of one that has
 * begun. */
int control_msg_receive(int fd, struct control_msg *ret, struct err *e);
/* Sends a CONTROL_RESULTS message with its rows. */
int rank_results_send(int fd, int32_t rank, const struct results *r, struct err *e);
/* Receives the rows that follow a CONTROL_RESULTS message, at most max_samples, into
 * `g`. Returns as control_msg_receive. */
int rank_results_receive(int fd, const struct control_msg *msg, struct gathered *g,
                         int32_t max_samples, struct err *e);

/* Late masks that were received, with memory of their own. Zeroed: empty. */
struct rank_masks {
    struct late_mask *mask; /* [n] owned */
    uint32_t *word;         /* [n * words] owned */
    int32_t n, words;       /* masks it has room for; words of each */
};
/* Sends a CONTROL_MASKS message with its masks, as executor.masks has them. */
int rank_masks_send(int fd, uint64_t step, const struct late_mask *mask, int32_t n, int32_t words,
                    struct err *e);
/* Receives what follows a CONTROL_MASKS message, at most max_masks of so many words,
 * into m->mask. Returns as control_msg_receive. */
int rank_masks_receive(int fd, const struct control_msg *msg, struct rank_masks *m,
                       int32_t max_masks, int32_t words, struct err *e);
void rank_masks_release(struct rank_masks *m);

#endif
