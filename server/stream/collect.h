/* The one JSON body of a request without `stream`: pieces are added to their choice as
 * they come, already as JSON. */
#ifndef QUIRE_SERVER_STREAM_COLLECT_H
#define QUIRE_SERVER_STREAM_COLLECT_H

#include "server/stream/segments.h"
#include "server/stream/sse.h"

/* Every buf holds the inside of a JSON string or list. */
/* What is told of each token of a choice, a JSON list each. */
enum {
    LIST_TOKENS,
    LIST_LOGPROBS,
    LIST_TOP,
    LIST_OFFSETS,
    LIST_IDS,
    LIST_PROMPT_LOGPROBS,
    N_TOKEN_LISTS,
};

struct token_lists {
    struct buf of[N_TOKEN_LISTS];
};

struct choice_parts {
    struct buf text;
    struct token_lists *list; /* the collector's; NULL: the style tells nothing of tokens */
    enum finish_reason finish;
    const char *error; /* with FINISH_IMPOSSIBLE: a static string */
    char *stop_string; /* [stop_string_len] owned */
    int32_t stop_string_len;
    int32_t stop_token;
    bool whole; /* a prompt's: it is all there */
};

struct collector {
    struct choice_parts *choice; /* [n_choices] NULL until the first piece comes */
    int32_t n_choices;
    struct token_lists *list; /* [n_choices + n_prompts] NULL: none is told */
    /* [n_prompts] what their choices begin with; NULL: no prompt goes out */
    struct choice_parts *prompt;
    int32_t n_prompts, per_prompt;
    size_t bytes; /* of the body's parts; LIMIT_RESPONSE_BYTES at most */
    size_t held;  /* memory behind them */
};

/* Holds nothing until the first piece comes. */
void collector_init(struct collector *c, int32_t n_choices);
/* Prompts go out: each is made once for all of its choices. Before the first piece. */
void collector_share(struct collector *c, int32_t n_prompts);
void collector_release(struct collector *c);
/* Add a piece to choice `index`: 0, ERR_FULL (the answer has grown beyond its cap),
 * ERR_NOMEM. */
int collector_add(struct collector *c, const struct sse_style *s, int32_t index,
                  const struct output *o);
/* The same in portions of *units at most (sse_middle): COLLECT_MORE until it is all
 * there. */
enum { COLLECT_MORE = 1 };
int collector_add_some(struct collector *c, const struct sse_style *s, int32_t index,
                       const struct output *o, struct sse_cursor *at, int32_t *units);

/* The body, into empty segments, which take over the parts: nothing is copied. `n`:
 * choices a prompt; `prompts` [n_choices / n] where the style asks for token ids. */
int collector_segments(struct segments *g, struct collector *c, const struct sse_style *s,
                       const struct prompt_ids *prompts, int32_t n, const struct usage *total);
/* The same in one piece. */
int collector_body(struct buf *b, struct collector *c, const struct sse_style *s,
                   const struct prompt_ids *prompts, int32_t n, const struct usage *total);

#endif
