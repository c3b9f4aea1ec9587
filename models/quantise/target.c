/* The written directory under another name until it is complete (see quantise.h), so
 * that neither a full disk nor an end in the middle leaves one that looks whole. */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "models/quantise/quantise_internal.h"

int quantise_partial(char *ret, size_t cap, const char *to, pid_t pid, struct err *e)
{
    size_t len = strlen(to);

    while (len > 1 && to[len - 1] == '/') {
        len--;
    }
    int n = snprintf(ret, cap, "%.*s.partial-%ld", (int)len, to, (long)pid);
    if (n < 0 || (size_t)n >= cap) {
        return err_set(e, ERR_INVALID, "the path of the directory to write is too long");
    }
    return 0;
}

void quantise_discard(const char *partial)
{
    DIR *d = opendir(partial);
    const struct dirent *entry;

    if (!d) {
        return;
    }
    while ((entry = readdir(d)) != NULL) {
        unlinkat(dirfd(d), entry->d_name, 0); /* fails for "." and ".." */
    }
    closedir(d);
    rmdir(partial);
}

static int failed(const struct conversion *k, int error, struct err *e)
{
    return err_set(e, ERR_IO, "%s: %s", k->to, strerror(error));
}

int target_begin(const struct conversion *k, struct err *e)
{
    struct stat s;

    if (lstat(k->to, &s) == 0) {
        return failed(k, EEXIST, e);
    }
    return mkdir(k->partial, 0777) == 0 ? 0 : failed(k, errno, e);
}

int target_finish(const struct conversion *k, struct err *e)
{
    return rename(k->partial, k->to) == 0 ? 0 : failed(k, errno, e);
}
