/* Choices that a program finds out on a machine, kept in a file for its next starts and
 * for other processes there.
 *
 * The file is text: a line that names what the choices hold for, a line of name and
 * value for each, and a last line that tells a whole file from one written in part.
 * Anything else counts as nothing and is replaced.
 */
#ifndef QUIRE_CONFIG_BASE_KEPT_H
#define QUIRE_CONFIG_BASE_KEPT_H

#include <stdbool.h>
#include <stdint.h>

/* A choice among n values, all words without spaces. */
struct kept_choice {
    const char *name;
    const char *const *value; /* [n] */
    int32_t n;
    /* The index of the value that this machine is to have; -1: it could not be found,
     * and nothing is kept. */
    int32_t (*measure)(void *arg);
    void *arg;
};

/* The index of the value that is kept for `machine`, a line of text, in the file
 * dir/prefix-HASH; otherwise the one that is measured, which is then kept there. Of
 * several processes that ask at the same time one measures and the others wait for it,
 * at most a second. Without a file that can be written each measures for itself. -1:
 * nothing is kept, and nothing was found. `dir` NULL: no file. */
int32_t kept_choose(const char *dir, const char *prefix, const char *machine,
                    const struct kept_choice *c);
/* Locks the open file against other processes, until it is closed. False: another one
 * has held it for about a second. */
bool kept_lock(int fd);

#endif
