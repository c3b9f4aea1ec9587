/* Pieces of answers as bytes: server-sent events, and the fragments of JSON that both
 * forms of answer are made of.
 *
 * Pure functions over `struct buf`: no HTTP, no threads. Nothing is built as a tree; an
 * event is the request's constant head, the choice's index, the escaped text and a
 * constant tail, written in one pass.
 */
#ifndef QUIRE_SERVER_STREAM_SSE_H
#define QUIRE_SERVER_STREAM_SSE_H

#include "engine/engine.h"

/* What all events of one HTTP request have in common. */
struct sse_style {
    char *head; /* `data: {"id":…,"choices":[{"index":`, owned */
    size_t head_len;
    char *bare; /* `data: {"id":…,"choices":[` owned: for the usage event */
    size_t bare_len;
    bool chat;            /* events and answers of chat completions */
    bool whole;           /* one body, not events: told by `object` */
    bool logprobs;        /* the tokens' log-probabilities were asked for */
    bool echo_logprobs;   /* the prompt's too */
    bool prompt_logprobs; /* the field of that name was given */
    bool token_ids;
    bool continuous_usage;
    int32_t n_top;        /* the best tokens that `logprobs` shows, of the prompt too */
    int32_t n_prompt_top; /* the same of `prompt_logprobs` */
    /* The bytes of a token, for its text in `logprobs`; as engine_token_bytes. */
    const char *(*token_bytes)(const void *arg, int32_t id, size_t *ret_len);
    const void *arg;
};

/* Prepare head and bare; `chat` and `whole` are set. `model` and `fingerprint` are
 * escaped here. */
int sse_style_init(struct sse_style *s, const char *id, int64_t created, const char *model,
                   const char *fingerprint, struct err *e);
void sse_style_release(struct sse_style *s);

/* A prompt's ids, for `prompt_token_ids`. */
struct prompt_ids {
    const int32_t *id;
    int32_t n;
};

/* Where the making of a piece stands; all zero at its beginning. */
struct sse_cursor {
    int phase;
    int32_t at; /* the phase's token, or id */
    struct prompt_walk *walk;
    struct buf text; /* of the walk's token */
};
void sse_cursor_release(struct sse_cursor *c);

/* A piece's event in portions: sse_open, sse_middle until it says true, sse_close; as
 * sse_piece makes it at once. The middle is the same for all choices that begin with
 * the same prompt. *units falls by what was written: a unit is a number or a string of
 * JSON, some hundred nanoseconds of work. */
void sse_open(struct buf *b, const struct sse_style *s, int32_t index);
bool sse_middle(struct buf *b, const struct sse_style *s, const struct output *o,
                const struct prompt_ids *prompt, struct sse_cursor *c, int32_t *units);
int sse_close(struct buf *b, const struct sse_style *s, const struct usage *total);
/* What the event of `o` costs, about; INT32_MAX for a prompt. Plain text costs
 * nothing. */
int32_t sse_units(const struct sse_style *s, const struct output *o, int32_t n_prompt_ids);
/* The piece's tokens one after another, those of a prompt read by a walk (then c->text
 * is the token's text). False: that was the last, and c->at is 0 again. */
bool sse_next_token(struct buf *b, const struct output *o, struct sse_cursor *c,
                    struct token_out *ret);

/* One event: the piece `o` of choice `index`. `prompt` [n_prompt] is given with a
 * choice's first event where token ids were asked for. `total` is the usage of the
 * whole HTTP request so far. All return what the buf says. */
int sse_piece(struct buf *b, const struct sse_style *s, int32_t index, const struct output *o,
              const int32_t *prompt, int32_t n_prompt, const struct usage *total);
/* The first event of a chat's choice: its role. */
int sse_role(struct buf *b, const struct sse_style *s, int32_t index);
int sse_usage(struct buf *b, const struct sse_style *s, const struct usage *total);
int sse_error(struct buf *b, int status, const char *message);
int sse_done(struct buf *b);
int sse_keepalive(struct buf *b);

/* ---- fragments ---- */

int put_i64(struct buf *b, int64_t v);
/* A log-probability; null where it is not finite. */
int put_logprob(struct buf *b, float v);
/* "text" of a token: its UTF-8, or "bytes:\xe2\x80" where it is part of a character. */
int put_token_string(struct buf *b, const struct sse_style *s, int32_t id);
/* {"tok": logprob, …}: the best ones and the token itself. */
int put_top(struct buf *b, const struct sse_style *s, const struct token_out *t);
/* One entry of prompt_logprobs: {"id": {"logprob", "rank", "decoded_token"}, …}, or
 * null. */
int put_prompt_logprob(struct buf *b, const struct sse_style *s, const struct token_out *t);
/* One entry of a chat's logprobs.content. */
int put_chat_token(struct buf *b, const struct sse_style *s, const struct token_out *t);
int put_ids(struct buf *b, const int32_t *id, int32_t n);
/* "usage":{…} */
int put_usage(struct buf *b, const struct usage *u);
/* "finish_reason":…[,"stop_reason":…] of a piece. */
int put_finish(struct buf *b, enum finish_reason finish, const char *stop_string,
               int32_t stop_string_len, int32_t stop_token);
/* ,"error":{…} of a choice that could not go on (FINISH_IMPOSSIBLE); nothing for any
 * other end. */
int put_choice_error(struct buf *b, enum finish_reason finish, const char *error);

#endif
