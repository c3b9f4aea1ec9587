/* Sequences under a grammar: which state each has, and what its next mask is computed
 * from. Pure; the states are changed by threads of engine/loop/masks.c.
 *
 * A sequence holds a constraint_node: the state of its grammar after the tokens that it
 * had generated when its last mask was begun. Forked sequences share a node until they
 * go on; a node that others hold is copied by the job that goes on, as a block is at
 * the first write. Nodes are in host memory, and neither swapping nor recomputation
 * touches them.
 *
 * A step in which sequences under a grammar sample has a mask_set, with a job for each
 * late mask of its batch. In the order of the loop (N is the step):
 *
 *     mask_set_plan      step N was planned; its sampling rows name late masks
 *     pack, launch
 *     commit             of step N-1: the tokens before the masks are known
 *     mask_set_begin     each job gets a node and the tokens that it has not read
 *     mask_job_run       on other threads, while the device computes step N
 *     executor.masks     once all jobs of N are done
 *     wait               for step N
 *     mask_set_collect   nodes go back to the sequences
 *     commit             of step N; texts that are complete end
 *
 * A job whose grammar takes too much work stops and goes on in a later step (late). The
 * sequence then samples again from its last known token, in the step after those that
 * were launched with it.
 *
 * So a choice whose grammar admits nothing more ends, with FINISH_STOP, when the step
 * behind its last token is committed, whatever that step sampled: as with an
 * end-of-sequence token, but also where min_tokens, ignore_eos or a ban forbid that. */
#ifndef QUIRE_ENGINE_SCHED_DECODE_CONSTRAINED_H
#define QUIRE_ENGINE_SCHED_DECODE_CONSTRAINED_H

#include <pthread.h>

#include "engine/sched/sched.h"

struct constraint;

/* Work of grammars, in units of ten to thirty nanoseconds. */
enum {
    /* What a job may do in one step. A step that waits for masks delays all its
     * sequences, so one whose mask takes more is left out: what it samples is void, and
     * its job goes on with the next step that it is in. */
    MASK_WORK_STEP = 150000,
    /* What all jobs of a step may do together, by thread, before each is left
     * MASK_WORK_LEAST. */
    MASK_WORK_SET = 2 * MASK_WORK_STEP,
    MASK_WORK_LEAST = 15000,
    /* What the mask of one token may take in all; a choice that needs more ends. */
    MASK_WORK_MOST = 10000000,
};

/* The functions of engine/constrain/constrain.h that jobs call; tests have others. */
enum { MASK_UNFINISHED = 2 }; /* CONSTRAINT_UNFINISHED there */
struct constraint_ops {
    int (*fork)(struct constraint **ret, const struct constraint *c, struct err *e);
    void (*free)(struct constraint *c);
    int (*mask)(struct constraint *c, uint32_t *mask, int64_t *work);
    int (*accept)(struct constraint *c, int32_t token, int64_t *work);
    void (*settle)(struct constraint *c);
    int (*ended)(struct constraint *c, int64_t *work);
    int32_t (*forced)(struct constraint *c, int32_t *ret, int32_t max); /* NULL: none ever */
};

struct constraint_node {
    const struct constraint_ops *ops; /* of `state` */
    struct constraint *state;         /* owned */
    pthread_mutex_t lock;             /* held by a job that reads or changes `state` */
    int64_t work;                     /* done for the next mask, in jobs so far; under lock */
    /* The engine's thread: */
    int32_t n_read; /* generated tokens that the state has taken */
    int32_t n_held; /* sequences that hold it */
    int32_t n_jobs; /* begun and not collected */
    /* Tokens that the grammar forces behind those; [n_forced] */
    int32_t n_forced, forced[LIMIT_DRAFT];
    struct constraint_node *next; /* in a list of dropped ones */
};

enum { MASK_JOB_TOKENS = LIMIT_DRAFT + 4 };

/* The late mask of a sequence; with drafts one more behind each of them, as far as the
 * grammar admits them. */
struct mask_job {
    struct seq *seq;  /* whose row it is for; several rows of one prompt share one */
    int32_t first, n; /* numbers of its masks in the step, from 0, and how many */
    /* The step cannot do without it: what it samples cannot be sampled again. */
    bool awaited;
    /* Set by mask_set_begin: */
    struct constraint_node *node; /* NULL: the sequence has ended, nothing is computed */
    bool in_place;                /* no other sequence holds the node: it may go on */
    bool ends_ignored;            /* ignore_eos */
    int32_t n_tokens, token[MASK_JOB_TOKENS]; /* what the state has not read */
    int32_t draft[LIMIT_DRAFT];               /* [n - 1] */
    bool wants_forced;                        /* forced tokens are drafted */
    /* Set by mask_job_run: */
    struct constraint_node *made; /* the state behind the tokens: `node`, or a new one */
    int32_t n_taken;              /* tokens that it has taken */
    /* It had to stop. There is no mask, and what the sequence's rows sample is void. */
    bool late;
    /* Masks that were computed; behind them every id is allowed, and what rows sample
     * is void, except by the first. */
    int32_t n_masked;
    bool ended; /* the text is complete, and nothing may follow */
    /* What must follow `token`, by the model\'s own encoding: [n_forced] */
    int32_t n_forced, forced[LIMIT_DRAFT];
    int rc; /* why the state cannot go on; 0: it can */
};

struct mask_set {
    uint64_t step;
    struct mask_job *job; /* [max_num_seqs] */
    int32_t n;            /* of these */
    int32_t n_masks;      /* of all jobs */
    bool wants_forced;    /* kept from step to step; see forced.h */
    /* kept likewise: all masks are awaited, since what a window or a recurrent state
     * has left behind is not there to compute a token again */
    bool all_awaited;
};

/* List the late masks of a step that was just planned, as pack_batch numbers them.
 * Returns their number. */
int32_t mask_set_plan(struct mask_set *set, const struct plan *p);
/* The step before was committed. Returns the number of jobs to run. */
int32_t mask_set_begin(struct mask_set *set);
/* All jobs were run and the step's results are there: called before decode_commit. */
void mask_set_collect(struct sched *s, struct mask_set *set);
/* The step was abandoned: jobs that were begun have been run. */
void mask_set_drop(struct sched *s, struct mask_set *set);

/* Why a sequence with a constraint_end has to end, for its client; NULL: its text is
 * complete. */
const char *constraint_error(const struct seq *q);
/* The sequence no longer holds a node. */
void seq_drop_constraint(struct sched *s, struct seq *q);
/* Nodes that no sequence holds any more, for the caller to free. */
struct constraint_node *sched_take_dropped(struct sched *s);

#endif
