/* The one JSON body of a request without `stream`: pieces are added to their choice as they come, already as JSON. */
#ifndef QUIRE_SERVER_COLLECT_H
#define QUIRE_SERVER_COLLECT_H

#include "server/sse.h"

/* Every buf holds the inside of a JSON string or list. */
struct choice_parts {
    struct buf text, tokens, logprobs, top, offsets, ids, prompt_logprobs;
    enum finish_reason finish;
    const char *error; /* with FINISH_IMPOSSIBLE: a static string */
    char *stop_string; /* [stop_string_len] owned */
    int32_t stop_string_len;
    int32_t stop_token;
};

struct collector {
    struct choice_parts *choice; /* [n_choices] NULL until the first piece comes */
    int32_t n_choices;
    size_t bytes; /* of all parts; LIMIT_RESPONSE_BYTES at most */
};

/* Holds nothing until the first piece comes. */
void collector_init(struct collector *c, int32_t n_choices);
void collector_release(struct collector *c);
/* Add a piece to choice `index`: 0, ERR_FULL (the answer has grown beyond its cap), ERR_NOMEM. */
int collector_add(struct collector *c, const struct sse_style *s, int32_t index, const struct output *o);

/* The prompts of the request, for `prompt_token_ids`. */
struct prompt_ids {
    const int32_t *id;
    int32_t n;
};
/* The body. `prompts` [n_choices / n] where the style asks for token ids. */
int collector_body(struct buf *b, const struct collector *c, const struct sse_style *s,
                   const struct prompt_ids *prompts, int32_t n, const struct usage *total);

#endif
