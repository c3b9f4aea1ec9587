/* Models by their name on the Hugging Face hub: `org/name`, `org/name@revision`,
 * `org/name/file.gguf`.
 *
 * A model is looked up in the cache that other tools share (HF_HUB_CACHE, HF_HOME,
 * XDG_CACHE_HOME) and, when something that serving needs is not there, downloaded into
 * it. Only this file and its neighbours hub_*.c know of networks.
 */
#ifndef QUIRE_MODELS_HUB_HUB_H
#define QUIRE_MODELS_HUB_HUB_H

#include "config/base/base.h"

/* Whether `model` has the form of a hub name. A path that exists goes before it. */
bool hub_is_name(const char *model);
/* The model's snapshot directory in the cache, or the GGUF file in it; malloc'd.
 * Downloads what is missing, which takes as long as it takes, tells so on stderr, and
 * may be ended at any time: it is taken up again where it stopped. */
int hub_find(char **ret, const char *model, struct err *e);
/* "org/name" of a path in a hub cache, malloc'd; NULL: it lies in none (or there is no
 * memory). */
char *hub_name_of_path(const char *path);

#endif
