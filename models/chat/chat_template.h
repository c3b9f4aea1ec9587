/* A model's own chat template: messages to the text of a prompt.
 *
 * It is read at start from the model's directory: chat_template.jinja, or
 * `chat_template` of tokenizer_config.json (a text, or a list of named ones of which
 * "default" is taken), or tokenizer.chat_template of a GGUF file. A template that
 * cannot be used does not keep the model from being served; `chat_template_missing`
 * says why chat is not there.
 */
#ifndef QUIRE_MODELS_CHAT_CHAT_TEMPLATE_H
#define QUIRE_MODELS_CHAT_CHAT_TEMPLATE_H

#include "config/base/base.h"
#include "config/base/buf.h"
#include "models/tokenizer/tokenizer.h"

struct chat_template;

/* Of a directory or a GGUF file, whose special tokens are asked of `tokenizer`.
 * ERR_INVALID, ERR_IO: a file that is wrong; ERR_NOMEM. A model without a template is
 * no error. */
int chat_template_open(struct chat_template **ret, const char *path,
                       const struct tokenizer *tokenizer, struct err *e);
/* The template `text`; `specials` are members of a JSON object (`"bos_token":"<s>",…`)
 * that it sees as variables, or "". */
int chat_template_new(struct chat_template **ret, const char *text, size_t len,
                      const char *specials, struct err *e);
void chat_template_free(struct chat_template *t);

/* Why there is no chat, as a sentence for clients; NULL where there is. `t` may be
 * NULL. */
const char *chat_template_missing(const struct chat_template *t);
/* There is one, and it cannot be used. */
bool chat_template_broken(const struct chat_template *t);
/* It goes over a message's content as a list of parts, and never asks whether it is a
 * text. */
bool chat_template_wants_parts(const struct chat_template *t);
/* It knows the role "developer". */
bool chat_template_knows_developer(const struct chat_template *t);

/* Append the prompt's text to `out`. `context` is a JSON object: messages,
 * add_generation_prompt and whatever else the template may see. Any thread.
 * ERR_INVALID: the template refused the messages, or a limit was reached. */
int chat_template_render(const struct chat_template *t, const char *context, size_t len,
                         struct buf *out, struct err *e);

#endif
