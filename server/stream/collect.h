/* The one JSON body of a request without `stream`. Each output is appended, as JSON, to
 * its choice when it arrives; at the end the choices are joined without copying. */
#ifndef QUIRE_SERVER_STREAM_COLLECT_H
#define QUIRE_SERVER_STREAM_COLLECT_H

#include "server/stream/segments.h"
#include "server/stream/sse.h"

/* The JSON lists with one entry per token that a choice can have. */
enum {
    LIST_TOKENS, /* completions: logprobs.tokens; chats: logprobs.content */
    LIST_LOGPROBS,
    LIST_TOP,
    LIST_OFFSETS,
    LIST_IDS,
    LIST_PROMPT_LOGPROBS,
    N_TOKEN_LISTS,
};

struct token_lists {
    struct buf of[N_TOKEN_LISTS]; /* the inside of each JSON list, without brackets */
};

struct choice_json {
    struct buf text;           /* the inside of the JSON string */
    struct token_lists *list;  /* the collector's; NULL: the style shows no tokens */
    enum finish_reason finish; /* FINISH_NONE until the choice has ended */
    const char *error;         /* with FINISH_IMPOSSIBLE: a static string */
    char *stop_string;         /* [stop_string_len] owned; NULL: no stop string matched */
    int32_t stop_string_len;
    int32_t stop_token; /* the token that ended the choice; -1: none */
    bool whole;         /* of a prompt: its JSON is complete */
};

struct collector {
    struct choice_json *choice; /* [n_choices] NULL before the first output */
    int32_t n_choices;          /* of all prompts together */
    struct token_lists *list;   /* [n_choices + n_prompts] NULL: no tokens are shown */
    /* [n_prompts] the prompts that the choices repeat; NULL: none is repeated */
    struct choice_json *prompt;
    int32_t n_prompts, per_prompt; /* per_prompt: choices of each prompt */
    size_t bytes;                  /* JSON bytes of the body, at most LIMIT_RESPONSE_BYTES */
    size_t held;                   /* bytes of memory allocated for them */
};

/* Allocates nothing before the first output. */
void collector_init(struct collector *c, int32_t n_choices);
/* The answer repeats the prompts: each is rendered once for all of its choices. To be
 * called before the first output. */
void collector_share_prompts(struct collector *c, int32_t n_prompts);
void collector_release(struct collector *c);
/* Add an output to choice `index`: 0, ERR_FULL (the body would exceed
 * LIMIT_RESPONSE_BYTES) or ERR_NOMEM. */
int collector_add(struct collector *c, const struct sse_style *s, int32_t index,
                  const struct output *o);
/* The same in portions of at most *units of work (see sse_middle): COLLECT_MORE until
 * the output is complete. */
enum { COLLECT_MORE = 1 };
int collector_add_some(struct collector *c, const struct sse_style *s, int32_t index,
                       const struct output *o, struct sse_cursor *at, int32_t *units);

/* Make the body, in empty segments that take over the collector's buffers: nothing is
 * copied. `n`: choices per prompt. `prompts`: [n_choices / n] if the style has token
 * ids, else NULL. */
int collector_segments(struct segments *g, struct collector *c, const struct sse_style *s,
                       const struct prompt_ids *prompts, int32_t n, const struct usage *total);
/* The same, copied into one buffer. */
int collector_body(struct buf *b, struct collector *c, const struct sse_style *s,
                   const struct prompt_ids *prompts, int32_t n, const struct usage *total);

#endif
