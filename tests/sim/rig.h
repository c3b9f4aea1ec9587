/* The scheduler under manual control: requests are added in one line, steps run one by
 * one, and the test provides their results. */
#ifndef QUIRE_TESTS_SIM_RIG_H
#define QUIRE_TESTS_SIM_RIG_H

#include "engine/sched/decode/decode.h"
#include "engine/sched/decode/pack.h"

enum { RIG_REQUESTS = 64, RIG_DELTAS = 4096, RIG_TOPS = 16 };

struct rig_request {
    struct request request;
    struct stop_set *stops;                 /* of its stop strings; NULL: none */
    _Atomic int32_t stop_at[LIMIT_CHOICES]; /* request.stop_at */
    struct group *group;                    /* NULL after DELTA_END */
    bool ended;                             /* DELTA_END has come */
};

struct rig {
    struct sched_config config;
    struct sched *sched;
    struct packer *packer;
    struct plan plan[2];          /* by step, in turn */
    struct batch batch;           /* of the step planned last */
    uint64_t launched, committed; /* steps */
    int64_t now_us;               /* time of the next call; rig_step adds 1 ms */
    int32_t tenant;               /* of requests added from now on */
    float weight;                 /* likewise */
    struct rig_request *request;  /* [RIG_REQUESTS] */
    int32_t n_requests;           /* of these */
    struct delta_out out;         /* appends to `delta` */
    struct delta *delta;          /* [RIG_DELTAS]; pointers inside are not valid */
    int32_t n_deltas;             /* of these */
    int32_t token;                /* the result of every sampling row, if `answer` is NULL */
    int32_t (*answer)(struct rig *r, const struct sample_row *row); /* the result of a row */
    /* Fills the best tokens after a sequence, best first, for beams; NULL: the row's
     * token and those with the next ids. */
    void (*tops)(struct rig *r, const struct seq *q, int32_t *top, float *top_logprob);
};

/* 64 blocks of 4 tokens, 8 sequences, 32 tokens a step, vocabulary 100, end of sequence
 * 99, no prefix cache, preemption by recomputation, no time-outs. */
void rig_config(struct sched_config *ret);
void rig_open(struct rig *r, const struct sched_config *c);
void rig_close(struct rig *r);
/* Parameters with API defaults: greedy, one choice, max_tokens 16. */
struct gen_params rig_params(void);
/* The same with another max_tokens. */
struct gen_params rig_tokens(int32_t n);
/* Submit a request with the prompt tokens first, first + 1, ... (mod 90). Aborts if
 * group_new or sched_add fails. */
struct rig_request *rig_add(struct rig *r, struct gen_params p, int32_t first, int32_t n_prompt);
/* Plan and pack a step. Returns the number of items. */
int32_t rig_plan(struct rig *r);
/* Commit the planned step with its results, reap, and check all invariants. */
void rig_commit(struct rig *r);
/* rig_plan and rig_commit; false: there was nothing to run. */
bool rig_step(struct rig *r);
/* Run steps until nothing is left, at most `most`. Returns how many. */
int32_t rig_run(struct rig *r, int32_t most);
/* Run to the end and close; -1: the scheduler still held something. */
int rig_close_empty(struct rig *r);
/* The item of a request's choice in the step planned last; NULL: none. */
const struct plan_item *rig_item(const struct rig *r, const struct rig_request *q, int32_t choice);
/* The number of deltas of one kind for one choice. */
int32_t rig_count(const struct rig *r, const struct rig_request *q, int32_t kind, int32_t choice);
/* The DELTA_FINISH of a choice; NULL: none yet. */
const struct delta *rig_finish(const struct rig *r, const struct rig_request *q, int32_t choice);

#endif
