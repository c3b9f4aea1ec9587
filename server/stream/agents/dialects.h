/* The dialects of agents' APIs (see dialect.h). Both answer one choice. */
#ifndef QUIRE_SERVER_STREAM_DIALECTS_H
#define QUIRE_SERVER_STREAM_DIALECTS_H

#include "server/stream/dialect.h"

/* OpenAI's /v1/responses. Every event has a sequence number, counted from 0; the items'
 * ids are made of the answer's id and the item's index. */
extern const struct dialect responses_dialect;
/* Anthropic's /v1/messages. */
extern const struct dialect messages_dialect;

/* The body of an error reply: {"type":"error","error":{type, message}}. */
void messages_error_body(struct buf *b, int status, const char *param, const char *message);

#endif
