/* The items of an answer: consecutive events of one kind become one item (an output
 * item in responses, a content block in messages).
 *
 * White space that would begin an item waits until more text of its kind follows, and
 * is dropped if none does: what a model writes between its reasoning and a call is no
 * item of its own.
 */
#ifndef QUIRE_SERVER_STREAM_ANSWER_ITEMS_H
#define QUIRE_SERVER_STREAM_ANSWER_ITEMS_H

#include "server/stream/dialect.h"

enum item_kind { ITEM_NONE, ITEM_TEXT, ITEM_REASONING, ITEM_CALL };

struct answer_items {
    enum item_kind kind;    /* of the open item; ITEM_NONE: none is open */
    int32_t n;              /* items begun: the open one has the index n - 1 */
    enum item_kind waiting; /* of the text in `space` */
    struct buf space;       /* white space that may begin the next item */
};

/* What an item looks like; `state` is the dialect's. All return a buffer's result. */
struct item_writer {
    /* An item begins; `event` has the name and id of a call. */
    int (*open)(struct buf *b, void *state, const struct answer_event *event);
    /* The next piece of the open item's text or arguments; never empty. */
    int (*piece)(struct buf *b, void *state, const char *text, size_t len);
    /* The open item ends; `cut`: before the model had finished it. */
    int (*close)(struct buf *b, void *state, bool cut);
};

void answer_items_init(struct answer_items *s);
void answer_items_release(struct answer_items *s);
/* One event of the answer. */
int answer_items_event(struct answer_items *s, const struct item_writer *w, struct buf *b,
                       void *state, const struct answer_event *event);
/* Close the open item, if there is one. */
int answer_items_close(struct answer_items *s, const struct item_writer *w, struct buf *b,
                       void *state, bool cut);

/* Begin a server-sent event that has a name: `event: NAME`, and `data: {"type":"NAME"`
 * without the closing brace. */
int put_named_event(struct buf *b, const char *name);

#endif
