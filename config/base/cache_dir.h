/* Where a program keeps what it would otherwise find out at every start. */
#ifndef QUIRE_CONFIG_BASE_CACHE_DIR_H
#define QUIRE_CONFIG_BASE_CACHE_DIR_H

#include <stdbool.h>
#include <stdint.h>

/* The directory: systemd's CACHE_DIRECTORY, else quire in XDG_CACHE_HOME, else quire in
 * ~/.cache. False: none of them is set, or the path exceeds `cap` bytes. */
bool cache_dir(char *ret, int64_t cap);
/* Makes the directories above a file, as far as possible. `path` is absolute and the
 * same afterwards. */
void cache_make_dirs(char *path);

#endif
