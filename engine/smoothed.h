/* Smoothing at start (setting `quantization_smooth`): a directory of floats becomes one
 * of int8 in the cache directory, which is served in its place. */
#ifndef QUIRE_ENGINE_SMOOTHED_H
#define QUIRE_ENGINE_SMOOTHED_H

#include "config/settings/settings.h"

/* With quantization_smooth replaces *path, what model_path_find returned, by the
 * directory that `quire quantize --smooth` makes of it. It is made by a child of this
 * process, unless an earlier start did so of the same files and text. Otherwise leaves
 * *path as it is, as it does on failure. */
int smoothed_find(char **path, const struct settings *s, struct err *e);
/* Whether such a child runs. Any thread. */
bool smoothed_running(void);
/* End it, and wait some seconds at most until what it has written is gone; none starts
 * afterwards. Any thread. */
void smoothed_stop(void);

#endif
