/* The engine's heart by hand: a scheduler, requests made in one line, steps whose
 * results the test gives. */
#ifndef QUIRE_TESTS_SIM_RIG_H
#define QUIRE_TESTS_SIM_RIG_H

#include "engine/sched/decode/decode.h"
#include "engine/sched/decode/pack.h"

enum { RIG_REQUESTS = 64, RIG_DELTAS = 4096, RIG_TOPS = 16 };

struct rig_request {
    struct request request;
    struct stop_set *stops;
    _Atomic int32_t stop_at[LIMIT_CHOICES];
    struct group *group; /* gone after DELTA_END */
    bool ended;
};

struct rig {
    struct sched_config config;
    struct sched *sched;
    struct packer *packer;
    struct plan plan[2];
    struct batch batch;
    uint64_t launched, committed;
    int64_t now_us;
    int32_t tenant; /* of requests added from now on */
    float weight;
    struct rig_request *request; /* [RIG_REQUESTS] */
    int32_t n_requests;
    struct delta_out out;
    struct delta *delta; /* [n_deltas], pointers inside them void */
    int32_t n_deltas;
    /* What every sampling row answers, unless `answer` says otherwise. */
    int32_t token;
    int32_t (*answer)(struct rig *r, const struct sample_row *row);
    /* Fills a row's best tokens, best first, for beams; NULL: the tokens that
     * follow. */
    void (*tops)(struct rig *r, const struct seq *q, int32_t *top, float *top_logprob);
};

/* 64 blocks of 4, 8 sequences, 32 tokens a step, vocabulary 100, end of sequence 99, no
 * prefix cache, recompute, no time-outs. */
void rig_config(struct sched_config *ret);
void rig_open(struct rig *r, const struct sched_config *c);
void rig_close(struct rig *r);
/* Parameters with API defaults: greedy, one choice, max_tokens 16. */
struct gen_params rig_params(void);
/* A request over the prompt tokens first, first + 1, ... (mod 90); submitted now. Fails
 * the test where group_new or sched_add does. */
struct rig_request *rig_add(struct rig *r, struct gen_params p, int32_t first, int32_t n_prompt);
/* Plan and pack; the number of items. */
int32_t rig_plan(struct rig *r);
/* Answer and commit the step planned, reap, check all invariants. */
void rig_commit(struct rig *r);
/* Both; false when there was nothing to run. */
bool rig_step(struct rig *r);
/* Steps until nothing is left to run, at most `most`: how many. */
int32_t rig_run(struct rig *r, int32_t most);
/* The item of a request's choice in the step planned last; NULL: not in it. */
const struct plan_item *rig_item(const struct rig *r, const struct rig_request *q, int32_t choice);
/* Deltas of one kind for one choice. */
int32_t rig_count(const struct rig *r, const struct rig_request *q, int32_t kind, int32_t choice);
/* The DELTA_FINISH of a choice; NULL: none yet. */
const struct delta *rig_finish(const struct rig *r, const struct rig_request *q, int32_t choice);

#endif
