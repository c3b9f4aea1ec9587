/* Memory-mapped files. If a mapped file is truncated or its disk fails, the next read
 * of a missing page ends the process with one line that names the file. */
#ifndef QUIRE_MODELS_CHECKPOINT_MAPPED_H
#define QUIRE_MODELS_CHECKPOINT_MAPPED_H

#include "config/base/base.h"

/* Map the whole of a file for reading; the caller unmaps it with file_unmap and may
 * close fd at once. `name` is for messages, which show what follows its last '/'.
 * ERR_IO. */
int file_map(int fd, size_t n_bytes, const char *name, void **ret, struct err *e);
/* The pages may have been replaced by other memory meanwhile (huge pages). */
void file_unmap(void *data, size_t n_bytes);

#endif
