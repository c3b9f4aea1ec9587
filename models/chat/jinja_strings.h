/* What filters and methods of the same name share. All take the value, then their
 * arguments, as struct jbuiltin says. */
#ifndef QUIRE_MODELS_CHAT_JINJA_STRINGS_H
#define QUIRE_MODELS_CHAT_JINJA_STRINGS_H

#include "models/chat/jinja.h"

struct jvalue jdo_strip(struct jrun *r, struct jvalue in, const struct jargs *a);
struct jvalue jdo_lstrip(struct jrun *r, struct jvalue in, const struct jargs *a);
struct jvalue jdo_rstrip(struct jrun *r, struct jvalue in, const struct jargs *a);
struct jvalue jdo_upper(struct jrun *r, struct jvalue in, const struct jargs *a);
struct jvalue jdo_lower(struct jrun *r, struct jvalue in, const struct jargs *a);
struct jvalue jdo_title(struct jrun *r, struct jvalue in, const struct jargs *a); /* str.title */
/* the filter title */
struct jvalue jdo_title_words(struct jrun *r, struct jvalue in, const struct jargs *a);
struct jvalue jdo_capitalize(struct jrun *r, struct jvalue in, const struct jargs *a);
struct jvalue jdo_replace(struct jrun *r, struct jvalue in, const struct jargs *a);
struct jvalue jdo_items(struct jrun *r, struct jvalue in, const struct jargs *a);
/* Texts only: what a filter makes of other values first. */
bool jneed_string(struct jrun *r, struct jvalue v, const char *who);

#endif
