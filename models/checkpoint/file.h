/* Opening the files of a model directory. The directory is not trusted: only regular
 * files are opened, and no link that leads out of it is followed. */
#ifndef QUIRE_MODELS_CHECKPOINT_FILE_H
#define QUIRE_MODELS_CHECKPOINT_FILE_H

#include "config/base/base.h"

/* Open `dir`/`name` for reading. Returns the descriptor, or ERR_NOT_FOUND, ERR_IO, or
 * ERR_INVALID: `name` is no plain file name, or the file is not a regular one, a
 * pointer that Git LFS left in its place, or a symbolic link out of the directory. If
 * `dir` is a snapshot in a Hugging Face cache, links into the cache's blobs/ are
 * followed. */
int model_file_open(const char *dir, const char *name, int64_t *ret_bytes, struct err *e);
/* Read a whole file of at most max_bytes; the caller frees *ret, which has a NUL after
 * its *ret_len bytes. Errors as above; a larger file is ERR_INVALID. */
int model_file_read(const char *dir, const char *name, size_t max_bytes, char **ret,
                    size_t *ret_len, struct err *e);
bool model_file_exists(const char *dir, const char *name);
/* ERR_INVALID for the pointer that a clone without Git LFS has in place of a large
 * file. `name` is for the message. */
int model_file_check_pointer(int fd, const char *name, struct err *e);

/* Whether the file is in the page cache, judged by samples; false if the file system
 * cannot say. */
bool model_file_cached(int fd, int64_t n_bytes);

/* How many GGUF files a model has whose first one has this name, as llama.cpp names
 * them: NAME-00001-of-0000N.gguf, at most LIMIT_SHARDS. 0: it is not such a name. */
int32_t model_file_parts(const char *name);
/* The name, or path, of file number i, from 1, of those: as long as `name`, which may
 * be `ret`. */
void model_file_part(char *ret, const char *name, int32_t i);

#endif
