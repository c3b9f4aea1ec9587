/* The masks of sequences under a grammar, computed on threads of their own while the
 * device runs: the engine's thread never computes one. The order of the calls is that
 * of engine/sched/decode/constrained.h.
 *
 * At most one step's masks are under way: those of step N are begun when N-1 was
 * committed, and N is committed when they are done. */
#ifndef QUIRE_ENGINE_LOOP_MASKS_H
#define QUIRE_ENGINE_LOOP_MASKS_H

#include "config/base/hist.h"
#include "engine/sched/decode/constrained.h"
#include "engine/sched/sched.h"
#include "engine/workers/executor.h"

enum { MASKS_THREADS = 8, MASKS_SETS = 8 };

struct masks {
    struct executor *executor; /* borrowed */
    struct sched_config config;
    int32_t n_sets, words;           /* of `set`; of a mask */
    struct mask_set set[MASKS_SETS]; /* launch i uses set[i % n_sets] */
    uint64_t n_planned, n_begun;     /* launches; the engine's thread */
    uint32_t *word;                  /* [max_num_seqs * words] of the set under way */
    struct late_mask *late;          /* [max_num_seqs] likewise, for the executor */
    struct hist *took_s;             /* seconds from begin_set to deliver; borrowed */
    int64_t begun_us;                /* when the set under way was begun */
    pthread_t thread[MASKS_THREADS];
    int32_t n_threads;
    /* Of the set under way: its jobs (the upper half) and the next of them (the lower
     * one, which may pass the former). A job that was taken keeps the set under way. */
    _Atomic(uint64_t) jobs;
    _Atomic(int32_t) n_left;    /* its jobs that are not done */
    _Atomic(int64_t) work_left; /* that its jobs may do; below 0: steps that took more */
    /* Sets so far: another job is first in every n_sets of them, for a sequence whose
     * mask was late samples in vain in the steps that were launched by then. */
    uint32_t turn;
    pthread_mutex_t lock;   /* guards the rest */
    pthread_cond_t changed; /* work, or an end of it */
    struct mask_set *work;  /* the set under way; NULL: none */
    bool stopping;
    struct constraint_node *dropped; /* to be freed */
};

/* A share of the state, at the grammar's start, that one sequence holds; takes over
 * `state`, also if it fails. 0 or ERR_NOMEM. */
int constraint_node_new(struct constraint_node **ret, const struct constraint_ops *ops,
                        struct constraint *state, struct err *e);
/* Nothing holds it, or only a group that the scheduler never had. NULL: nothing. */
void constraint_node_free(struct constraint_node *n);
/* Compute a job's masks into word[n * words], on any thread, with so much work at most
 * unless the job is awaited. Returns what it took. */
int64_t mask_job_run(struct mask_job *j, const struct sched_config *c, int64_t work,
                     uint32_t *word);

/* Starts the threads; `x` must outlive it. `forced`: jobs also find the tokens that a
 * grammar forces (forced.h). `took_s` gets the seconds of each step's masks. ERR_NOMEM,
 * ERR_IO. */
int masks_open(struct masks **ret, struct executor *x, const struct sched_config *c, bool forced,
               struct hist *took_s, struct err *e);
/* Ends the threads, and frees what was dropped. NULL: nothing. */
void masks_free(struct masks *m);

/* All on the engine's thread. */

/* Before the launch of a step; NULL: it has no late masks. */
void masks_planned(struct masks *m, const struct plan *p);
/* So many launches are committed: begins the next set, if its tokens are known now. */
void masks_begin(struct masks *m, uint64_t n_committed);
/* Launch number n (from 0) has its results. */
void masks_collect(struct masks *m, uint64_t n, struct sched *s);
/* Launches [n, n_planned) are given up. No step waits for masks any more. */
void masks_abandon(struct masks *m, uint64_t n, struct sched *s);
/* Hands on what the scheduler has dropped, to be freed by a thread. */
void masks_reap(struct masks *m, struct sched *s);

#endif
