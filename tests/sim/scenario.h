/* One random run as data, so that it can be printed, replayed from its seed, and
 * shrunk. */
#ifndef QUIRE_TESTS_SIM_SCENARIO_H
#define QUIRE_TESTS_SIM_SCENARIO_H

#include <stdio.h>

#include "engine/sched/sched.h"
#include "tests/sim/oracle.h"

enum {
    SIM_REQUESTS = 12,
    SIM_PROMPT = 40,
    SIM_OUTPUT = 24,
    SIM_WIDTH = 5,
    SIM_DEPTH = 2, /* deepest executor */
    SIM_TENANTS = 4,
    SIM_IDS = 3,   /* entries of each short list */
    SIM_STOPS = 2, /* stop strings */
};

struct sim_request {
    bool absent;                          /* removed by the shrinker */
    int32_t prompt[SIM_PROMPT], n_prompt; /* token ids */

    /* As in struct gen_params: */
    int32_t max_tokens, min_tokens, n, best_of, beam_width;
    bool yields; /* max_tokens_yields */
    float length_penalty;
    int8_t early_stopping;
    float temperature, top_p, min_p;
    int32_t top_k;
    float presence, frequency, repetition; /* penalties */
    uint64_t seed;
    int32_t n_logprobs, n_prompt_logprobs;
    bool echo, ignore_eos, include_stop;
    int32_t priority, salt; /* salt 0: none */
    int32_t tenant;         /* under policy: fair */
    float weight;           /* of the tenant */

    int32_t stop_token[SIM_IDS], n_stop_token;
    struct gen_bias bias[SIM_IDS]; /* [n_bias] logit_bias */
    int32_t n_bias;
    int32_t allowed[SIM_IDS], n_allowed;                     /* allowed_token_ids; 0: all */
    int32_t word[SIM_IDS], word_first[SIM_IDS + 1], n_words; /* bad words, encoded */
    /* Stop strings of a beam search; a token's text is the character of its id. */
    char stop[SIM_STOPS][3];
    int32_t n_stop;
    uint64_t language;     /* its text is of this one (language.h); 0: of none */
    bool language_fails;   /* where some places of it are too costly */
    int32_t draft_quality; /* of its drafts, so many in a hundred are right */

    /* Events: */
    int32_t arrival;              /* turn of submission */
    int32_t cancel;               /* turns after arrival; 0: never */
    int32_t text_stop[SIM_WIDTH]; /* choice i has a stop string after so many tokens; 0: never */
    int32_t text_lag;             /* turns until the engine is told */
    /* Turns after arrival when its reader falls behind, and how many; 0: never. */
    int32_t park, park_turns;
    int32_t park_how; /* enum request_parking */
};

struct scenario {
    uint64_t seed;              /* that it was made from */
    struct sched_config config; /* of the scheduler */
    int32_t depth;              /* of the executor */
    int32_t n_ranks;            /* above 1: so many oracles must agree (many.h) */
    int32_t n_stages;           /* of a pipeline, with n_ranks above 1 */
    uint64_t fail_at;           /* step from which the model answers NaN; 0: never */
    struct sim_request request[SIM_REQUESTS];
    int32_t n_requests; /* of these */
    /* Leading tokens of the first prompt that are computed and pinned before the first
     * turn. */
    int32_t n_pin;
    bool late_delivery; /* masks come just before a step is waited for */
    int32_t max_draft;  /* of a sequence in a step; 0: no drafts */
    bool only_forced;   /* drafts are those that languages force */
    bool timed;         /* the scheduler is told what steps took */
    /* Tokens of a step of the draft model, which is the model itself; 0: there is
     * none. */
    int32_t draft_model;
    bool draft_head; /* with one rank it is a head */
    bool draft_once; /* it drafts all tokens in one step, behind the first at random */
    int32_t portion; /* deltas that delta_out.take grants in a turn; 0: any number */
};

void scenario_random(struct scenario *ret, uint64_t seed);
void scenario_print(const struct scenario *s, FILE *out);
void scenario_oracle(const struct scenario *s, struct oracle_config *ret);
/* The request's parameters; lists point into `r`, and the stop strings are listed in
 * stop[SIM_STOPS]. */
void sim_request_params(const struct sim_request *r, char **stop, struct gen_params *ret);

/* The expected result of one choice, or the engine's. */
struct sim_choice {
    int32_t token[SIM_OUTPUT];
    float logprob[SIM_OUTPUT];
    int32_t n;                  /* tokens */
    int32_t finish, stop_token; /* as in struct delta */
};
/* How `token`, as the n-th, ends a choice by itself: FINISH_STOP, FINISH_LENGTH or
 * FINISH_NONE. */
int reference_finish(const struct scenario *s, const struct sim_request *r, int32_t token,
                     int32_t n, int32_t *stop_token);
/* The longest stop string that the choice's tokens end in; NULL: none, or fewer than
 * min_tokens. */
const char *reference_stop(const struct sim_request *r, const struct sim_choice *c);
/* Whether the request bans every first token. */
bool reference_impossible(const struct scenario *s, const struct sim_request *r);
/* What the request gives if it runs alone, computed without the engine: ret[choices].
 * False: two beams tie, so there is more than one right result. */
bool reference_run(const struct scenario *s, const struct sim_request *r, struct sim_choice *ret);
/* The number of choices that the engine reports for a request. */
int32_t sim_choices(const struct sim_request *r);
/* The log-probability of prompt token `position` (>= 1). */
float reference_score(const struct scenario *s, const struct sim_request *r, int32_t position);

/* Totals over runs, for the report at the end. */
struct sim_totals {
    /* counters only: oracle_runs adds them up as an array */
    int64_t runs, beams, steps, tokens, requests, refused, yielded, pin_hits, cancelled,
        preempt_swap, preempt_recompute, cached_tokens, copies, swap_in_copied, swap_in_found,
        constrained, sentences, late_masks, drafted, accepted, forced, forced_accepted,
        model_drafted,
        /* runs with groups of states, requests that went on from states in the cache,
         * and of these from states behind a tail, not at a snapshot's distance */
        state_runs, state_hits, state_tails,
        /* runs whose windows are chunks, and requests in them that read the cache */
        chunk_runs, chunk_hits;
};
/* Run a scenario: 0, or -1 with the reason in `why`. */
int world_run(const struct scenario *s, struct sim_totals *t, char *why, size_t why_size);
/* Remove requests and features while the run still fails. */
void scenario_shrink(struct scenario *s, char *why, size_t why_size);

#endif
