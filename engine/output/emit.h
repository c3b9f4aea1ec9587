/* Stage 10, emit, for one delta at a time: tokens to text, stop strings, echo,
 * log-probabilities, usage, best_of.
 *
 * Everything here runs on the output thread (or in a test, with no thread at all);
 * output.c brings the deltas.
 */
#ifndef QUIRE_ENGINE_OUTPUT_EMIT_H
#define QUIRE_ENGINE_OUTPUT_EMIT_H

#include "engine/engine.h"
#include "engine/output/garbage.h"
#include "engine/sched/decode/delta.h"
#include "engine/sched/decode/stops.h"
#include "models/tokenizer/tokenizer.h"

/* Tokens of a choice whose text was not released yet. Parallel arrays, grown by
 * doubling. */
struct held_tokens {
    struct token_out *token; /* [n]; top_id and top_logprob are set when they go out */
    size_t *text_at;         /* [n] byte of choice.text where the token's text begins */
    int32_t n, cap;
    /* The last tokens, behind which no text has come yet: their text_offset tells how
     * many bytes of an incomplete character were pending before them. */
    int32_t n_open;
    int32_t *top_id; /* [n_top] of all of them, one after another */
    float *top_logprob;
    int32_t n_top, cap_top;
    int32_t spread; /* sets its sizes apart from those of other choices: grow in emit.c */
};

struct choice {
    struct detokenizer detok;
    struct stop_state stop;
    struct buf text; /* decoded and not released */
    struct held_tokens held;
    int32_t n_generated; /* tokens up to and including the one that ended it */
    int32_t n_chars;     /* code points decoded so far, echo included */
    double logprob_sum;
    int64_t first_us, last_us; /* when its first and its latest token came by */
    bool begun, ended;
    bool decided;              /* how it ends is known: its text is not searched for stop strings */
    enum finish_reason finish; /* with best_of: kept until all have ended */
    const char *stop_string;
    int32_t stop_string_len;
    const char *error;
    int32_t stop_token;
};

/* A prompt that goes out (echo, prompt_logprobs), once for all choices. It belongs to
 * the request: a holder of that may read it (prompt_walk) from the first output that
 * names it on, when nothing of it changes any more. Its arrays follow when the first
 * delta comes. */
struct prompt_out {
    struct token_out *token; /* [n_prompt]; text_offset is set when it is read first */
    int32_t *top_id;         /* [n_prompt, top_stride] */
    float *top_logprob;
    int32_t top_stride;
    int32_t n_seen;           /* DELTA_PROMPTs so far */
    int32_t n_chars;          /* code points of its text; 0 without echo */
    struct detokenizer detok; /* as a choice begins with it: behind the prompt with echo */
    struct detokenizer start; /* as the prompt begins */
    bool has_offsets;         /* the tokens have their offsets; the reader's own */
};

/* What the output side knows of a request. Made at submit; its choices and the prompt's
 * arrays follow when the first delta comes, so that a request that waits holds none of
 * them. */
struct output_state {
    struct garbage garbage;       /* its `free` frees the whole */
    const struct stop_set *stops; /* the request's, or NULL */
    bool out_of_memory; /* there was no memory for the choices: they have ended with an error */
    bool ranked;        /* best_of > n: nothing goes out before all have ended */
    int32_t n_choices;  /* sequences whose deltas come */
    int32_t completion_tokens; /* of all choices */
    int32_t cached_tokens;
    int64_t first_us;          /* first token of any choice; 0: none yet */
    enum finish_reason finish; /* of the first choice that ended */
    struct prompt_out *prompt; /* the request's; NULL: the prompt does not go out */
    struct choice *choice;     /* [n_choices] NULL: no delta came yet */
};

/* The stage: one for an engine. */
struct inbox;
struct reaper;
struct output_processor {
    const struct tokenizer *tokenizer;
    struct sink *sink;
    struct engine_stats *stats;
    struct inbox *inbox;            /* told of stop marks */
    _Atomic int64_t *active;        /* lowered when a request's last output went out */
    _Atomic int64_t *tenant_active; /* [LIMIT_TENANTS] the same; NULL with `active` */
    struct reaper *reaper;          /* frees what is large; NULL: freed at once */
    int64_t now_us;                 /* set by the caller before each run of deltas */
};

/* Make r->output_state. Any thread. */
int output_state_new(struct request *r, const struct tokenizer *t, struct err *e);
void output_state_free(struct output_state *m);
void prompt_out_free(struct prompt_out *p);

/* Take one delta; `next` is the one that follows it, or NULL when it is not there yet.
 * Returns how many were taken: 2 when d was a token and `next` the end of the same
 * choice, so that both leave as one piece. After DELTA_END the request's reference is
 * given back. */
int emit_delta(struct output_processor *proc, const struct delta *d, const struct delta *next);

#endif
