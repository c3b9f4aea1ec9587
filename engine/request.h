/* A request as the engine takes it: what is asked for, and the marks that its maker and
 * the engine leave on it.
 */
#ifndef QUIRE_ENGINE_REQUEST_H
#define QUIRE_ENGINE_REQUEST_H

#include <stdatomic.h>

#include "config/base/base.h"

struct stop_set;
struct word_list;

/* What is asked for: the fields of API.md that shape generation, validated, defaults
 * filled in. */
struct gen_params {
    int32_t max_tokens;     /* >= 1; 0 only with echo */
    bool max_tokens_yields; /* a default: it yields to what the KV pool holds */
    int32_t min_tokens;
    int32_t n;          /* choices returned */
    int32_t best_of;    /* >= n; sequences sampled */
    int32_t beam_width; /* 0: no beam search */
    float length_penalty;
    int8_t early_stopping; /* 0 false, 1 true, 2 "never" */
    float temperature;     /* 0: greedy */
    float top_p, min_p;
    int32_t top_k; /* 0: off */
    float presence_penalty, frequency_penalty, repetition_penalty;
    uint64_t seed;
    int32_t n_logprobs;        /* -1: none */
    int32_t n_prompt_logprobs; /* -1: none */
    bool echo, ignore_eos, include_stop_str, skip_special, spaces_between_special, stream;
    int32_t priority;

    /* Owned; see gen_params_release. */
    char **stop;       /* [n_stop], UTF-8, none empty */
    int32_t *stop_len; /* [n_stop] their bytes; NULL: each ends at its NUL */
    int32_t n_stop;
    int32_t *stop_token; /* [n_stop_token] */
    int32_t n_stop_token;
    struct gen_bias {
        int32_t token;
        float bias;
    } *bias; /* [n_bias] */
    int32_t n_bias;
    int32_t *allowed_token; /* [n_allowed] */
    int32_t n_allowed;
    char **bad_word;       /* [n_bad_words], UTF-8; encoded at submit */
    int32_t *bad_word_len; /* [n_bad_words] as stop_len */
    int32_t n_bad_words;
    char *cache_salt; /* or NULL */
};
/* Parameters that requests share, as the prompts of one HTTP request do, with what is
 * made of them once for all. Immutable but for the words, which the first engine_submit
 * encodes; so requests that share one are submitted by one thread.
 * Reference-counted. */
struct shared_params {
    atomic_int refs;
    struct gen_params params; /* owned */
    struct stop_set *stops;   /* compiled stop strings; NULL: none */
    struct word_list *words;  /* encoded bad words; NULL: none, or not yet */
    bool checked;             /* an engine has found their token ids inside its vocabulary */
};
/* Takes over `params` (zeroed in the caller's hands). ERR_INVALID names a stop string
 * that cannot be one; ERR_NOMEM. */
int shared_params_new(struct shared_params **ret, struct gen_params *params, struct err *e);
void shared_params_unref(struct shared_params *p);

void gen_params_release(struct gen_params *p);

/* Immutable once submitted, but for the marks at its end. */
struct request {
    char id[136];             /* "cmpl-…": for logs */
    struct gen_params params; /* its lists belong to `shared` */
    /* holds a reference; NULL in a request that was not made by request_new */
    struct shared_params *shared;
    const struct stop_set *stops; /* of `shared`; NULL: no stop strings */
    uint64_t seed;                /* of its samples: params.seed unless it was given its own */
    int32_t *prompt;              /* [n_prompt] owned */
    int32_t n_prompt;
    int32_t index;      /* of the prompt in its HTTP request */
    int32_t tenant;     /* whom it counts for, < LIMIT_TENANTS; used with policy: fair */
    float weight;       /* the tenant's share; 0: 1 */
    int64_t arrival_us; /* clock_us when it was accepted */
    void *user;         /* the caller's: handed back with every output */

    struct output_state *output_state; /* the output side's own, from submit to `last` */
    struct prompt_out *prompt_out;     /* its prompt, where that goes out; see prompt_walk */

    atomic_int refs;
    atomic_bool cancelled; /* set by engine_cancel: the client is gone */
    atomic_int parked;     /* enum request_parking, set by engine_park */
    /* Stop marks, set by the output side: choice i ended textually after stop_at[i]
     * generated tokens; INT32_MAX: not. */
    _Atomic int32_t *stop_at; /* [max(best_of, beam_width)] */
    /* How it fared, written by the engine before it emits `last`: for logs. Times are 0
     * where it did not come so far. */
    struct request_course {
        int64_t queue_us;   /* from arrival to its first turn */
        int64_t prefill_us; /* from there to its first token */
        int64_t decode_us;  /* from its first token to its last */
        int32_t preemptions;
        /* Tokens drawn, whatever became of them: of all samples, best_of's too, up to
         * where each ended; of a beam search those of every live beam and hypothesis in
         * every step. None twice for a recompute. */
        int64_t n_drawn;
    } course;
};
/* Takes over `params` (zeroed in the caller's hands) and copies the prompt. */
int request_new(struct request **ret, struct gen_params *params, const int32_t *prompt,
                int32_t n_prompt, struct err *e);
/* The same over parameters that it shares with others: takes a reference. */
int request_new_shared(struct request **ret, struct shared_params *params, const int32_t *prompt,
                       int32_t n_prompt, struct err *e);
struct request *request_ref(struct request *r);
void request_unref(struct request *r);

/* How far a request waits while the reader of its outputs is behind. */
enum request_parking {
    PARK_NONE,
    PARK_ENDED,   /* what is left to report of a beam search that is over */
    PARK_RUNNING, /* no step is planned with it either */
};

/* FINISH_ERROR: the server failed. FINISH_IMPOSSIBLE: what the request bans leaves a
 * choice no next token; other choices go on. */
enum finish_reason {
    FINISH_NONE,
    FINISH_STOP,
    FINISH_LENGTH,
    FINISH_ABORT,
    FINISH_ERROR,
    FINISH_IMPOSSIBLE
};
/* "stop", …, "error" for the last two; or NULL */
const char *finish_reason_name(enum finish_reason f);

#endif
