/* Which directory, or GGUF file, a model's name means. */
#ifndef QUIRE_ENGINE_MODEL_PATH_H
#define QUIRE_ENGINE_MODEL_PATH_H

#include "config/base/base.h"

/* The directory of `model`, or the GGUF file that it is or that lies in it alone; or
 * what its name on the hub means, downloaded when need be (models/hub/hub.h). NULL
 * means the bundled one, looked for in $QUIRE_SHARE/models/demo, then beside the
 * executable as installed (../share/quire/models/demo) and as built (../models/demo).
 * `ret` is malloc'd. */
int model_path_find(char **ret, const char *model, struct err *e);
/* The name to serve a directory or file under: the one on the hub, else its last part;
 * malloc'd; NULL without memory. */
char *model_path_name(const char *path);

#endif
