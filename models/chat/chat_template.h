/* A model's own chat template turns messages into the text of a prompt.
 *
 * It is read at start: chat_template.jinja of the model's directory, else
 * `chat_template` of tokenizer_config.json (a text, or a list of named ones of which
 * "default" is taken) or of chat_template.json, or tokenizer.chat_template of a GGUF
 * file. A model without a usable template is served without chat;
 * `chat_template_missing` says why.
 */
#ifndef QUIRE_MODELS_CHAT_CHAT_TEMPLATE_H
#define QUIRE_MODELS_CHAT_CHAT_TEMPLATE_H

#include "config/base/base.h"
#include "config/base/buf.h"
#include "models/tokenizer/tokenizer.h"

struct chat_template;
struct chat_format;

/* The template of a model directory, or of a GGUF file, whose BOS and EOS texts come
 * from `tokenizer`. ERR_INVALID, ERR_IO: a file cannot be read; ERR_NOMEM. A missing
 * template is no error. */
int chat_template_open(struct chat_template **ret, const char *path,
                       const struct tokenizer *tokenizer, struct err *e);
/* A template from its `text` (NULL: none); `specials` are members of a JSON object,
 * each with a comma behind it (`"bos_token":"<s>",`), that it sees as variables, or
 * "". */
int chat_template_new(struct chat_template **ret, const char *text, size_t len,
                      const char *specials, struct err *e);
void chat_template_free(struct chat_template *t);
/* Replace a usable template that has no place for tools by one that writes them, calls
 * and what tools answered as text of its messages (generic_tools.c), in the format
 * "hermes"; any other stays. ERR_UNSUPPORTED: its messages are lists of parts;
 * ERR_NOMEM. After an error *t is as it was. */
int chat_template_add_tools(struct chat_template **t, struct err *e);

/* Why chat is not available, as a sentence for clients; NULL if it is. `t` may be
 * NULL. */
const char *chat_template_missing(const struct chat_template *t);
/* Whether the model has a template that cannot be used. */
bool chat_template_broken(const struct chat_template *t);
/* Whether the template iterates over a message's content as a list of parts, and never
 * tests whether it is a string. */
bool chat_template_wants_parts(const struct chat_template *t);
/* The template's text, [*ret_len] bytes; NULL: there is none. */
const char *chat_template_text(const struct chat_template *t, size_t *ret_len);
/* The special tokens that the template sees, as chat_template_new takes them. */
const char *chat_template_specials(const struct chat_template *t);
/* Whether the template mentions the role "developer". */
bool chat_template_knows_developer(const struct chat_template *t);

/* What a template makes of messages, found by rendering some: a template ignores
 * what it does not know, or refuses it. */
struct chat_caps {
    bool system;    /* the role "system" */
    bool developer; /* the role "developer" */
    bool parts;     /* content as a list of parts */
    bool tools;     /* `tools`, [{"type": "function", "function": {…}}] */
    bool calls;     /* `tool_calls` of an assistant's message */
    bool arguments; /* their arguments are to be objects, not JSON as text */
    bool null;      /* a message with calls may have no content, else "" */
    bool results;   /* the role "tool" */
    bool reasoning; /* `reasoning_content` of a message with calls */
};
/* Of a template without a usable text: nothing. Valid as long as the template. */
const struct chat_caps *chat_template_caps(const struct chat_template *t);
/* The format of the template's text (chat_format.h); of no template the generic one. */
const struct chat_format *chat_template_format(const struct chat_template *t);

/* Append the prompt's text to `out`. `context` is a JSON object of all that the
 * template may see: messages, add_generation_prompt and so on. Any thread. ERR_INVALID:
 * the template refused the messages, or a limit was reached. */
int chat_template_render(const struct chat_template *t, const char *context, size_t len,
                         struct buf *out, struct err *e);

#endif
