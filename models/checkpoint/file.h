/* Opening the files of a model directory, which are not trusted: regular files only,
 * and no link that leads out of it. */
#ifndef QUIRE_MODELS_CHECKPOINT_FILE_H
#define QUIRE_MODELS_CHECKPOINT_FILE_H

#include "config/base/base.h"

/* Open `dir`/`name` for reading; the descriptor, or ERR_NOT_FOUND when there is none,
 * ERR_IO, or ERR_INVALID: `name` is no plain file name, the file is not a regular one,
 * a pointer that Git LFS left in its place, or a symbolic link out of the directory.
 * Links into the blobs/ of a Hugging Face cache, of which `dir` is then a snapshot, are
 * followed. */
int model_file_open(const char *dir, const char *name, int64_t *ret_bytes, struct err *e);
/* All of a file of at most max_bytes, NUL-terminated (the NUL not counted). The caller
 * frees *ret. Errors as above; a file that is larger is ERR_INVALID. */
int model_file_read(const char *dir, const char *name, size_t max_bytes, char **ret,
                    size_t *ret_len, struct err *e);
bool model_file_exists(const char *dir, const char *name);
/* ERR_INVALID for what a clone without Git LFS leaves instead of a large file. `name`
 * is for the message. */
int model_file_check_pointer(int fd, const char *name, struct err *e);

/* Whether the file lies in the page cache, by samples of it; false where the file
 * system does not tell. */
bool model_file_cached(int fd, int64_t n_bytes);

#endif
