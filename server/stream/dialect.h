/* How an answer that was parsed into events (reasoning, text, tool calls) is written
 * for one API: chat completions, responses, messages.
 *
 * Text that the model wrote goes through a parser a choice (chat_format.h's events,
 * repeated here because the server does not see models/), then through the functions of
 * the request's dialect, which append server-sent events, or collect one body. All are
 * pure functions over `struct buf` and the dialect's own state: no HTTP, no threads,
 * called under the stream's lock.
 */
#ifndef QUIRE_SERVER_STREAM_DIALECT_H
#define QUIRE_SERVER_STREAM_DIALECT_H

#include "engine/engine.h"

enum answer_kind {
    ANSWER_CONTENT,
    ANSWER_REASONING,
    ANSWER_CALL,
    ANSWER_ARGUMENTS,
    ANSWER_CALL_END
};

struct answer_event {
    enum answer_kind kind;
    const char *text; /* [len] content, reasoning, arguments; valid during the call */
    size_t len;
    int32_t call;     /* index of the call in the choice, from 0 */
    const char *name; /* ANSWER_CALL: the function */
    const char *id;   /* ANSWER_CALL: the call's id, unique in the answer */
};

/* What a dialect knows of the request; constant, owned by the stream. */
struct answer_info {
    const char *id;          /* the answer's: "chatcmpl-…", "resp_…", "msg_…" */
    const char *model;       /* its name */
    const char *fingerprint; /* system_fingerprint */
    int64_t created;         /* unix seconds */
    int32_t n_choices;       /* of the whole HTTP request */
    bool whole;              /* one body instead of events */
    /* Members that the request's fields add to the answer's objects, a JSON fragment
     * with a comma behind each (the echo of parameters in responses); may be "". */
    const char *echo;

    /* Of chat completions only. */
    const struct sse_style *style; /* the constant parts of events, log-probabilities */
    bool include_usage;            /* the last event gives the usage */
    bool functions;                /* calls are answered as function_call */
};

struct dialect {
    size_t state_bytes; /* of the state of one answer */
    /* Set up and tear down a zeroed state. */
    int (*init)(void *state, const struct answer_info *info, struct err *e);
    void (*release)(void *state);
    size_t (*held)(const void *state); /* memory that the state holds */
    /* Append the events before the first output; of a whole body: nothing. `usage`
     * stays valid, and is that of the answer so far whenever a function is called. */
    int (*begin)(struct buf *b, void *state, const struct usage *usage);
    /* One event of a choice; of a whole body: kept in the state. */
    int (*event)(struct buf *b, void *state, int32_t choice, const struct answer_event *event);
    /* (optional) n tokens, from o->token[from] on, that belong to the last events; n
     * may be 0. Called at least once for every output, behind its events; `o` is valid
     * until `finish` has returned. */
    int (*tokens)(struct buf *b, void *state, int32_t choice, const struct output *o, int32_t from,
                  int32_t n);
    /* The choice has ended. `calls`: it ended with tool calls. */
    int (*finish)(struct buf *b, void *state, int32_t choice, enum finish_reason finish,
                  const char *stop_string, bool calls);
    /* The closing events, or the whole body. */
    int (*end)(struct buf *b, void *state, const struct usage *usage);
    /* An error after the answer has begun: an event; of a whole body not called. */
    int (*error)(struct buf *b, void *state, int status, const char *message);
    /* The body of an error reply of any status. */
    void (*error_body)(struct buf *b, int status, const char *param, const char *message);
};

#endif
