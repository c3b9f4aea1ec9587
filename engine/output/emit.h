/* Stage 10, emit: turns deltas, one at a time, into outputs: text, stop strings, echo,
 * log-probabilities, usage, best_of.
 *
 * Everything here runs on the output thread (or in a test without threads); output.c
 * delivers the deltas. */
#ifndef QUIRE_ENGINE_OUTPUT_EMIT_H
#define QUIRE_ENGINE_OUTPUT_EMIT_H

#include "engine/engine.h"
#include "engine/output/garbage.h"
#include "engine/sched/decode/delta.h"
#include "engine/sched/decode/stops.h"
#include "models/tokenizer/tokenizer.h"

/* Tokens of a choice that were not sent yet. Parallel arrays, grown by doubling. */
struct held_tokens {
    struct token_out *token; /* [n] top_id and top_logprob are set when they are sent */
    size_t *text_at;         /* [n] byte of choice.text where the token's text begins */
    int32_t n, cap;          /* tokens held, allocated */
    /* The newest tokens, after which no text has come yet. Until then their text_offset
     * holds how many bytes of an incomplete character were pending before them. */
    int32_t n_open;
    int32_t *top_id;        /* [n_top] top ids of all tokens, concatenated */
    float *top_logprob;     /* [n_top] */
    int32_t n_top, cap_top; /* entries held, allocated */
    /* 0 .. SPREAD-1: makes its array sizes differ from other choices' (grow in
     * emit.c) */
    int32_t spread;
};

struct choice {
    struct detokenizer detok;  /* continues the prompt's with echo */
    struct stop_state stop;    /* of the search for stop strings */
    struct buf text;           /* decoded, not sent yet */
    struct held_tokens held;   /* not sent yet */
    int32_t n_generated;       /* tokens up to and including the one that ended it */
    int32_t n_chars;           /* code points decoded so far, echo included */
    double logprob_sum;        /* of the generated tokens */
    int64_t first_us, last_us; /* when its first and its latest token were emitted; 0: none */
    bool begun, ended;         /* its prompt was announced; its last piece is made */
    /* its end is decided by the engine: the text is not searched for stop strings */
    bool decided;
    enum finish_reason finish; /* with best_of > n, kept until all choices have ended */
    const char *stop_string;   /* the one that matched, or NULL */
    int32_t stop_string_len;   /* bytes */
    const char *error;         /* static sentence, or NULL */
    int32_t stop_token;        /* the stop token that matched, or -1 */
};

/* A prompt that is returned (echo, prompt_logprobs), stored once for all choices. It
 * belongs to the request: a holder of the request may read it (prompt_walk) from the
 * first output that announces it; it does not change after that. Its arrays are
 * allocated at the first delta. */
struct prompt_out {
    struct token_out *token;  /* [n_prompt] text_offset is set by the first reader */
    int32_t *top_id;          /* [n_prompt, top_stride] */
    float *top_logprob;       /* [n_prompt, top_stride] */
    int32_t top_stride;       /* alternatives stored a token */
    int32_t n_seen;           /* prompt tokens scored so far */
    int32_t n_chars;          /* code points of its text; 0 without echo */
    struct detokenizer detok; /* state in which a choice begins: after the prompt with echo */
    struct detokenizer start; /* state before the prompt's first token */
    bool has_offsets;         /* the tokens have text offsets; written by the first reader */
};

/* The output side's state of a request. Made at submit; its choices and the prompt's
 * arrays are allocated at the first delta, so that a waiting request holds neither. */
struct output_state {
    struct garbage garbage;       /* its `free` frees the whole struct */
    const struct stop_set *stops; /* the request's, or NULL */
    bool out_of_memory;           /* no memory for the choices: they have ended with an error */
    bool ranked;                  /* best_of > n: nothing is sent before all choices have ended */
    int32_t n_choices;            /* sequences that produce deltas */
    int32_t completion_tokens;    /* of all choices */
    int32_t cached_tokens;        /* prompt tokens from the prefix cache */
    int64_t first_us;             /* clock_us of the first token of any choice; 0: none yet */
    enum finish_reason finish;    /* of the first choice that ended, for statistics */
    struct prompt_out *prompt;    /* the request's; NULL: the prompt is not returned */
    struct choice *choice;        /* [n_choices] NULL: before the first delta */
};

struct inbox;
struct reaper;

/* The context of the output stage, one per engine. */
struct output_processor {
    const struct tokenizer *tokenizer; /* the engine's */
    struct sink *sink;                 /* where outputs go */
    struct engine_stats *stats;        /* counters of tokens and requests, latencies */
    struct inbox *inbox;               /* marked when a stop position is set; NULL: none */
    /* decremented when a request's last output was sent; NULL: none */
    _Atomic int64_t *active;
    _Atomic int64_t *tenant_active; /* [LIMIT_TENANTS] the same by tenant; NULL with `active` */
    struct reaper *reaper;          /* frees large states; NULL: freed directly */
    int64_t now_us;                 /* clock_us, set by the caller before each run of deltas */
};

/* Makes r->output_state. Any thread. */
int output_state_new(struct request *r, const struct tokenizer *t, struct err *e);
void output_state_free(struct output_state *m);
void prompt_out_free(struct prompt_out *p);

/* Processes one delta. `next` is the one after it, or NULL if there is none yet.
 * Returns how many deltas it consumed: 2 if d was a token and `next` the end of the
 * same choice, which then leave as one piece. After DELTA_END the engine's reference to
 * the request is dropped. */
int emit_delta(struct output_processor *proc, const struct delta *d, const struct delta *next);

#endif
