/* Outputs of the engine as bytes: server-sent events, and the JSON fragments that
 * events and single bodies have in common.
 *
 * Pure functions over `struct buf`: no HTTP, no threads. No JSON tree is built; an
 * event is the request's constant head, the choice's index, the escaped text and a
 * constant tail, written in one pass.
 */
#ifndef QUIRE_SERVER_STREAM_SSE_H
#define QUIRE_SERVER_STREAM_SSE_H

#include "engine/engine.h"

/* The form of one HTTP request's events, or of its body. */
struct sse_style {
    char *head; /* `data: {"id":…,"choices":[{"index":`, owned */
    size_t head_len;
    char *bare; /* `data: {"id":…,"choices":[`, owned: starts the usage event */
    size_t bare_len;
    bool chat;             /* chat completions; false: completions */
    bool whole;            /* one body instead of events: a different `object` */
    bool logprobs;         /* log-probabilities of generated tokens are shown */
    bool echo_logprobs;    /* those of the prompt's tokens too */
    bool prompt_logprobs;  /* the field prompt_logprobs was given */
    bool token_ids;        /* the field return_token_ids was given */
    bool continuous_usage; /* every event has the usage so far */
    int32_t n_top;         /* top tokens per token in `logprobs` */
    int32_t n_prompt_top;  /* top tokens per token in `prompt_logprobs` */
    /* As engine_token_bytes: the bytes of a token. */
    const char *(*token_bytes)(const void *arg, int32_t id, size_t *ret_len);
    const void *arg; /* for token_bytes */
};

/* Prepare `head` and `bare`; `chat` and `whole` must be set. `model` and `fingerprint`
 * are escaped here. */
int sse_style_init(struct sse_style *s, const char *id, int64_t created, const char *model,
                   const char *fingerprint, struct err *e);
void sse_style_release(struct sse_style *s);

/* A prompt's token ids, for the field `prompt_token_ids`. */
struct prompt_ids {
    const int32_t *id; /* [n] the request's */
    int32_t n;
};

/* The position in an output that is rendered in portions; all zero at its beginning. */
struct sse_cursor {
    int phase;                /* enum phase in sse.c */
    int32_t at;               /* next token, or id, of the phase */
    struct prompt_walk *walk; /* owned; iterates over an echoed prompt; or NULL */
    struct buf text;          /* text of the token at which `walk` is */
};
void sse_cursor_release(struct sse_cursor *c);

/* An output's event in portions: sse_open, sse_middle until it returns true, sse_close;
 * together they write what sse_piece writes at once. The middle is the same for all
 * choices of an echoed prompt. *units decreases by the work done: one unit is one JSON
 * number or string. */
void sse_open(struct buf *b, const struct sse_style *s, int32_t index);
bool sse_middle(struct buf *b, const struct sse_style *s, const struct output *o,
                const struct prompt_ids *prompt, struct sse_cursor *c, int32_t *units);
/* The field `drafted` of a choice with token_ids: which of n tokens were drafts, by
 * their place in this event; nothing if none was. */
void sse_put_drafted(struct buf *b, const struct token_out *t, int32_t n);
int sse_close(struct buf *b, const struct sse_style *s, const struct usage *total);
/* Estimate of the units that the event of `o` costs; INT32_MAX for an echoed prompt.
 * Short plain text costs nothing. */
int32_t sse_units(const struct sse_style *s, const struct output *o, int32_t n_prompt_ids);
/* Iterate over the output's tokens; an echoed prompt's are read by c->walk, and c->text
 * is then the token's text. False after the last one; c->at is 0 again then. */
bool sse_next_token(struct buf *b, const struct output *o, struct sse_cursor *c,
                    struct token_out *ret);

/* One event: output `o` of choice `index`. `prompt` [n_prompt]: the prompt's ids in a
 * choice's first event, if the style has token ids; else NULL. `total`: the usage of
 * the whole HTTP request so far. All of these return the result of the buf
 * functions. */
int sse_piece(struct buf *b, const struct sse_style *s, int32_t index, const struct output *o,
              const int32_t *prompt, int32_t n_prompt, const struct usage *total);
/* The first event of a chat's choice, which gives the role. */
int sse_role(struct buf *b, const struct sse_style *s, int32_t index);
int sse_usage(struct buf *b, const struct sse_style *s, const struct usage *total);
int sse_error(struct buf *b, int status, const char *message);
int sse_done(struct buf *b);
int sse_keepalive(struct buf *b);

/* ---- fragments ---- */

int put_i64(struct buf *b, int64_t v);
/* A log-probability: null for NaN, -9999.0 for an infinite one. */
int put_logprob(struct buf *b, float v);
/* A token as a JSON string: its text, or "bytes:\xe2\x80" if it is not valid UTF-8 by
 * itself. */
int put_token_string(struct buf *b, const struct sse_style *s, int32_t id);
/* {"tok": logprob, …}: the top tokens and the token itself. */
int put_top(struct buf *b, const struct sse_style *s, const struct token_out *t);
/* One entry of prompt_logprobs: {"id": {"logprob", "rank", "decoded_token"}, …}, or
 * null. */
int put_prompt_logprob(struct buf *b, const struct sse_style *s, const struct token_out *t);
/* One entry of a chat's logprobs.content. */
int put_chat_token(struct buf *b, const struct sse_style *s, const struct token_out *t);
int put_ids(struct buf *b, const int32_t *id, int32_t n);
/* "usage":{…} */
int put_usage(struct buf *b, const struct usage *u);
/* "finish_reason":…[,"stop_reason":…] */
int put_finish(struct buf *b, enum finish_reason finish, const char *stop_string,
               int32_t stop_string_len, int32_t stop_token);
/* The same with another name of the reason; NULL: it has not ended. */
int put_finish_as(struct buf *b, const char *name, enum finish_reason finish,
                  const char *stop_string, int32_t stop_string_len, int32_t stop_token);
/* ,"error":{…} for a choice that could not go on (FINISH_IMPOSSIBLE); nothing for any
 * other finish. */
int put_choice_error(struct buf *b, enum finish_reason finish, const char *error);

#endif
