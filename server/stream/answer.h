/* An answer that is read by the model's format before it is written: text of the model
 * goes through a parser for each choice, and the parser's events through the functions
 * of a dialect (dialect.h). Completions and chats that need no reading are written by
 * sse.c and collect.c instead; of other dialects the text is then content as it is.
 *
 *     output  ->  chat_parser  ->  answer_event  ->  dialect  ->  struct buf
 *
 * The functions are called by one thread at a time, under the stream's lock or, while
 * the stream has a queue, by its renderer. Memory is that of the parsers, which hold
 * back a bounded text, and of the dialect's state (answer_held).
 */
#ifndef QUIRE_SERVER_STREAM_ANSWER_H
#define QUIRE_SERVER_STREAM_ANSWER_H

#include "server/api/api.h"
#include "server/stream/dialect.h"

struct answer;

/* An answer in the dialect `d`. `engine` must outlive it, and so must what `info`
 * points to, except `id`. The tools, the echo and opens_reasoning are taken from
 * `c`. */
int answer_new(struct answer **ret, const struct engine *engine, const struct dialect *d,
               const struct answer_info *info, struct completion *c, struct err *e);
void answer_free(struct answer *a); /* NULL: nothing */
/* Memory of parsers and dialect, in bytes. */
size_t answer_held(const struct answer *a);

/* The position in an output that is added in portions; all zero at its beginning. */
struct answer_cursor {
    size_t text;   /* bytes that the parser has read */
    int32_t token; /* tokens that the dialect has got */
    bool shown;    /* the dialect has got a slice of tokens, if only an empty one */
};

/* Add the next portion of an output of choice `index`, of at most *units of work (see
 * sse_middle), which decreases. `usage`: of the whole HTTP request so far. Returns 0 if
 * the output is complete; ANSWER_MORE; ERR_NOMEM; ERR_FULL. */
enum { ANSWER_MORE = 1 };
int answer_add(struct answer *a, struct buf *b, int32_t index, const struct output *o,
               const struct usage *usage, struct answer_cursor *at, int32_t *units);
/* Append the closing events, or the whole body. */
int answer_end(struct answer *a, struct buf *b, const struct usage *usage);
/* Append the event of an error, and what closes the stream. */
int answer_error(struct answer *a, struct buf *b, int status, const char *message);

/* Chat completions. */
extern const struct dialect chat_dialect;

#endif
