/* Resolves a model's name to a directory or a GGUF file. */
#ifndef QUIRE_ENGINE_MODEL_PATH_H
#define QUIRE_ENGINE_MODEL_PATH_H

#include "config/base/base.h"

/* What a model is for: a draft head may have no tokenizer. */
enum model_use { MODEL_SERVED, MODEL_DRAFTS };

/* Resolves `model`: a directory in Hugging Face's layout, a GGUF file, or a directory
 * with a single GGUF file; otherwise a hub name, downloaded if need be
 * (models/hub/hub.h). NULL means the bundled model, searched in
 * $QUIRE_SHARE/models/demo, then relative to the executable, as installed
 * (../share/quire/models/demo) and as built (../models/demo). `ret` is malloc'd. */
int model_path_find(char **ret, const char *model, enum model_use use, struct err *e);
/* The name to serve a directory or file under: its hub name, else the last component of
 * its path. malloc'd; NULL when out of memory. */
char *model_path_name(const char *path);

#endif
