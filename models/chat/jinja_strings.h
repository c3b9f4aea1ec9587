/* Functions that are both a filter and a method of strings or dicts; the signature is
 * that of jbuiltin.call. */
#ifndef QUIRE_MODELS_CHAT_JINJA_STRINGS_H
#define QUIRE_MODELS_CHAT_JINJA_STRINGS_H

#include "models/chat/jinja.h"

struct jvalue jdo_strip(struct jrun *r, struct jvalue in, const struct jargs *a);
struct jvalue jdo_lstrip(struct jrun *r, struct jvalue in, const struct jargs *a);
struct jvalue jdo_rstrip(struct jrun *r, struct jvalue in, const struct jargs *a);
struct jvalue jdo_upper(struct jrun *r, struct jvalue in, const struct jargs *a);
struct jvalue jdo_lower(struct jrun *r, struct jvalue in, const struct jargs *a);
struct jvalue jdo_title(struct jrun *r, struct jvalue in, const struct jargs *a); /* str.title */
/* The filter `title`. */
struct jvalue jdo_title_words(struct jrun *r, struct jvalue in, const struct jargs *a);
struct jvalue jdo_capitalize(struct jrun *r, struct jvalue in, const struct jargs *a);
struct jvalue jdo_replace(struct jrun *r, struct jvalue in, const struct jargs *a);
struct jvalue jdo_items(struct jrun *r, struct jvalue in, const struct jargs *a);
/* Whether `v` is a string; otherwise an error that names the filter or method. */
bool jneed_string(struct jrun *r, struct jvalue v, const char *name);

#endif
