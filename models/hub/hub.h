/* Models by their name on the Hugging Face hub: `org/name`, `org/name@revision`,
 * `org/name/file.gguf`, `org/name/folder/file.gguf`.
 *
 * A model is looked up in the cache that other tools share (HF_HUB_CACHE, HF_HOME,
 * XDG_CACHE_HOME); files that serving needs and the cache lacks are downloaded into it.
 * Only models/hub/ uses the network.
 */
#ifndef QUIRE_MODELS_HUB_HUB_H
#define QUIRE_MODELS_HUB_HUB_H

#include "config/base/base.h"

/* Whether `model` has the form of a hub name. An existing path takes precedence, which
 * the caller checks. */
bool hub_is_name(const char *model);
/* The path of the model's snapshot directory in the cache, or of the GGUF file in it;
 * malloc'd. Without `has_tokenizer` the directory may be that of a draft head.
 * Downloads what is missing, with progress on stderr and without a time limit. The
 * process may be ended meanwhile: the next call resumes the download. */
int hub_find(char **ret, const char *model, bool has_tokenizer, struct err *e);
/* "org/name" of a path in a hub cache, malloc'd; NULL: it is in none, or memory is
 * out. */
char *hub_name_of_path(const char *path);

#endif
