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
/* jinja_format.c */
struct jvalue jdo_percent_format(struct jrun *r, struct jvalue in, const struct jargs *a);
struct jvalue jdo_format(struct jrun *r, struct jvalue in, const struct jargs *a); /* str.format */
struct jvalue jdo_from_json(struct jrun *r, struct jvalue in, const struct jargs *a);
struct jvalue jdo_append(struct jrun *r, struct jvalue in, const struct jargs *a);
struct jvalue jdo_pop(struct jrun *r, struct jvalue in, const struct jargs *a);
struct jvalue jdo_update(struct jrun *r, struct jvalue in, const struct jargs *a);
/* A JSON text in ASCII. */
struct jvalue jto_ascii(struct jrun *r, struct jvalue in);
/* Whether `v` is a string; otherwise an error that names the filter or method. */
bool jneed_string(struct jrun *r, struct jvalue v, const char *name);

#endif
