/* A request as submitted to the engine: its parameters, the flags that its owner and
 * the output side set on it, and its timing. */
#ifndef QUIRE_ENGINE_REQUEST_H
#define QUIRE_ENGINE_REQUEST_H

#include <stdatomic.h>

#include "config/base/base.h"

struct grammar;
struct stop_set;
struct word_list;

/* Parameters of generation, validated, with defaults filled in. Those that the commit
 * of each token reads come first. */
struct gen_params {
    int32_t min_tokens;   /* no stop before so many generated tokens */
    int32_t n_logprobs;   /* -1: none */
    int32_t *stop_token;  /* [n_stop_token] owned */
    int32_t n_stop_token; /* stop ids */
    bool ignore_eos;      /* flag of the API */

    int32_t max_tokens; /* >= 1; 0 only with echo */
    /* max_tokens is a default and may be lowered to what the KV pool holds */
    bool max_tokens_yields;
    int32_t n;             /* choices returned */
    int32_t best_of;       /* >= n; sequences sampled */
    int32_t beam_width;    /* 0: no beam search */
    float length_penalty;  /* beam search: exponent of the length in a score */
    int8_t early_stopping; /* 0 false, 1 true, 2 "never" */
    float temperature;     /* 0: greedy */
    float top_p, min_p;    /* 1 and 0: off */
    int32_t top_k;         /* 0: off */
    float presence_penalty, frequency_penalty, repetition_penalty; /* 0, 0, 1: off */
    uint64_t seed;             /* of its samples; see request.seed */
    int32_t n_prompt_logprobs; /* -1: none */
    /* flags of the API */
    bool echo, include_stop_str, skip_special, spaces_between_special, stream;
    int32_t priority; /* lower runs first under policy: priority */

    /* Owned; see gen_params_release. */
    char **stop;       /* [n_stop] UTF-8, none empty */
    int32_t *stop_len; /* [n_stop] lengths in bytes; NULL: each ends at its NUL */
    int32_t n_stop;
    struct gen_bias {
        int32_t token;
        float bias;
    } *bias; /* [n_bias] */
    int32_t n_bias;
    int32_t *allowed_token; /* [n_allowed] */
    int32_t n_allowed;
    char **bad_word;       /* [n_bad_words] UTF-8; encoded at submit */
    int32_t *bad_word_len; /* [n_bad_words] as stop_len */
    int32_t n_bad_words;
    /* every choice must be a sentence of it, unless it is cut short; NULL: any text. A
     * reference, of engine_grammar_new */
    struct grammar *grammar;
    /* separates its prefix-cache entries from those of other salts */
    char *cache_salt; /* or NULL */
};
/* Parameters shared by the prompts of one HTTP request, with what is derived from them
 * once for all. Immutable except for `words`, which the first engine_submit encodes; so
 * requests that share one are submitted by one thread. Reference-counted. */
struct shared_params {
    atomic_int refs;          /* references held */
    struct gen_params params; /* owned */
    struct stop_set *stops;   /* compiled stop strings; NULL: none */
    struct word_list *words;  /* encoded bad words; NULL: none, or not encoded yet */
    bool checked;             /* an engine has checked that the token ids are in its vocabulary */
};
/* Takes over `params`, which is zeroed. ERR_INVALID names an unusable stop string;
 * ERR_NOMEM. */
int shared_params_new(struct shared_params **ret, struct gen_params *params, struct err *e);
void shared_params_unref(struct shared_params *p);

void gen_params_release(struct gen_params *p);

/* Immutable once submitted, except for the flags, counts and timing. The flags and the
 * first of the parameters, which every step reads, are in one cache line, which nobody
 * writes but to end or suspend the request. */
struct request {
    /* Stop positions, set by the output side: choice i ended textually after stop_at[i]
     * generated tokens; INT32_MAX: it has not. */
    _Atomic int32_t *stop_at; /* [max(best_of, beam_width)], of one `only_stop_at` */
    _Atomic int32_t only_stop_at;
    atomic_int parked;     /* enum request_parking, set by engine_park */
    int64_t arrival_us;    /* clock_us when it was accepted */
    atomic_bool cancelled; /* set by engine_cancel */

    struct gen_params params; /* a copy; its lists belong to `shared` */
    char id[136];             /* "cmpl-…", for logs */
    /* Holds a reference; NULL in a request that was not made by request_new. */
    struct shared_params *shared;
    const struct stop_set *stops; /* of `shared`; NULL: no stop strings */
    uint64_t seed;                /* of its samples: params.seed unless overridden */
    int32_t *prompt;              /* [n_prompt] owned */
    int32_t n_prompt;             /* tokens */
    int32_t index;                /* of the prompt within its HTTP request */
    int32_t tenant; /* the tenant it is charged to, < LIMIT_TENANTS; used with policy: fair */
    float weight;   /* the tenant's weight under policy: fair; 0 means 1 */
    void *user;     /* the caller's own */

    struct output_state *output_state; /* owned by the output side, from submit to `last` */
    /* the prompt, where it is returned to the client; see prompt_walk */
    struct prompt_out *prompt_out;

    atomic_int refs; /* references held */
    /* Timing and counts for logs, written by the engine before it emits `last`. Times
     * are 0 for phases that the request did not reach. */
    struct request_timing {
        int64_t queue_us;          /* from arrival until it was first scheduled */
        int64_t prefill_us;        /* from then to its first token */
        int64_t decode_us;         /* from its first token to its last */
        int32_t preemptions;       /* times it was preempted */
        int64_t drafted, accepted; /* drafts that were verified, and those that held */
        /* Tokens sampled, used or not. Of samples: all of them (best_of's too), each up
         * to its end. Of a beam search: those of every live beam and hypothesis in
         * every step. A token that is recomputed counts once. */
        int64_t n_sampled;
    } course;
};
/* Takes over `params`, which is zeroed, and copies the prompt. */
int request_new(struct request **ret, struct gen_params *params, const int32_t *prompt,
                int32_t n_prompt, struct err *e);
/* The same with shared parameters, to which it takes a reference. */
int request_new_shared(struct request **ret, struct shared_params *params, const int32_t *prompt,
                       int32_t n_prompt, struct err *e);
struct request *request_ref(struct request *r);
void request_unref(struct request *r);

/* How far a request is suspended while the reader of its outputs lags behind. */
enum request_parking {
    PARK_NONE,
    PARK_ENDED,   /* a finished beam search is not reported any further */
    PARK_RUNNING, /* and no step is planned with it */
};

/* FINISH_ERROR: the server failed. FINISH_IMPOSSIBLE: the request's bans leave the
 * choice no next token; its other choices continue. */
enum finish_reason {
    FINISH_NONE,
    FINISH_STOP,
    FINISH_LENGTH,
    FINISH_ABORT,
    FINISH_ERROR,
    FINISH_IMPOSSIBLE
};
/* The API's name: "stop", …; "error" for the last two; NULL for FINISH_NONE. */
const char *finish_reason_name(enum finish_reason f);

#endif
