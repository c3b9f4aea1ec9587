/* Files in memory: one that is cut short, or whose disk fails, while it is read ends
 * the process with one line that names it. */
#ifndef QUIRE_MODELS_CHECKPOINT_MAPPED_H
#define QUIRE_MODELS_CHECKPOINT_MAPPED_H

#include "config/base/base.h"

/* Map the whole of a file for reading. `name` is for messages: what follows its last
 * '/' counts. ERR_IO with errno's text. The caller unmaps it; fd may be closed at
 * once. */
int file_map(int fd, size_t n_bytes, const char *name, void **ret, struct err *e);
/* Whatever lies in its place by now. */
void file_unmap(void *data, size_t n_bytes);

#endif
