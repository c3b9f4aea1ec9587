/* See file.h. */
#include "models/checkpoint/file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "config/base/limits.h"

static int join(char *ret, const char *dir, const char *name, struct err *e)
{
    if (snprintf(ret, PATH_MAX, "%s/%s", dir, name) >= PATH_MAX) {
        return err_set(e, ERR_INVALID, "%s: the path of the model directory is too long", name);
    }
    return 0;
}

static bool inside(const char *path, const char *dir)
{
    size_t len = strlen(dir);

    return strncmp(path, dir, len) == 0 && path[len] == '/';
}

/* Whether `target` is in the blobs of the Hugging Face cache that `home` is a snapshot
 * of, or a folder in one. From <cache>/models--<name>/snapshots/<commit> these are
 * ../../blobs, or ../../../blobs where all models share them. */
static bool in_blobs(const char *home, const char *target)
{
    static const char *const BLOBS[] = {"blobs", "../blobs"};
    char model[PATH_MAX], path[PATH_MAX], real[PATH_MAX], *snapshots = NULL;

    if (snprintf(model, sizeof(model), "%s", home) >= PATH_MAX) {
        return false;
    }
    for (char *p = strstr(model, "/snapshots/"); p; p = strstr(p + 1, "/snapshots/")) {
        snapshots = p;
    }
    if (!snapshots) {
        return false;
    }
    *snapshots = '\0';
    for (size_t i = 0; i < ARRAY_LEN(BLOBS); i++) {
        if (join(path, model, BLOBS[i], NULL) == 0 && realpath(path, real) &&
            inside(target, real)) {
            return true;
        }
    }
    return false;
}

/* Check that the link at `path` leads into the directory, or into the blobs of the
 * cache that the directory is a snapshot of. */
static int check_link(const char *dir, const char *path, const char *name, struct err *e)
{
    char target[PATH_MAX], home[PATH_MAX];

    if (!realpath(path, target) || !realpath(dir, home)) {
        return err_set(e, errno == ENOENT ? ERR_NOT_FOUND : ERR_IO,
                       "%s: a broken symbolic link: %s", name, strerror(errno));
    }
    if (inside(target, home) || in_blobs(home, target)) {
        return 0;
    }
    return err_set(
        e, ERR_INVALID,
        "%s: a symbolic link out of the model directory; only links inside it and into the blobs "
        "directory of its Hugging Face cache are followed",
        name);
}

int model_file_check_pointer(int fd, const char *name, struct err *e)
{
    static const char BEGIN[] = "version https://git-lfs.github.com/spec/";
    char text[sizeof(BEGIN) - 1];

    if (pread(fd, text, sizeof(text), 0) != (ssize_t)sizeof(text) ||
        memcmp(text, BEGIN, sizeof(text)) != 0) {
        return 0;
    }
    return err_set(e, ERR_INVALID,
                   "%s: a Git LFS pointer, not the file itself: fetch it with git lfs pull, or "
                   "give the model's hub name",
                   name);
}

int model_file_open(const char *dir, const char *name, int64_t *ret_bytes, struct err *e)
{
    char path[PATH_MAX];

    if (!*name || strchr(name, '/') || strcmp(name, ".") == 0 || strcmp(name, "..") == 0) {
        return err_set(e, ERR_INVALID, "'%.200s' is not the name of a file in the model directory",
                       name);
    }
    int rc = join(path, dir, name, e);
    if (rc < 0) {
        return rc;
    }
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0 && errno == ELOOP) {
        rc = check_link(dir, path, name, e);
        if (rc < 0) {
            return rc;
        }
        fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    }
    if (fd < 0) {
        return err_set(e, errno == ENOENT || errno == ENOTDIR ? ERR_NOT_FOUND : ERR_IO, "%s: %s",
                       name, strerror(errno));
    }
    struct stat st;
    if (fstat(fd, &st) < 0) {
        rc = err_set(e, ERR_IO, "%s: %s", name, strerror(errno));
    } else if (!S_ISREG(st.st_mode)) {
        rc = err_set(e, ERR_INVALID, "%s: not a regular file", name);
    } else {
        rc = model_file_check_pointer(fd, name, e);
    }
    if (rc < 0) {
        close(fd);
        return rc;
    }
    *ret_bytes = st.st_size;
    return fd;
}

static int read_all(int fd, char *data, size_t len, const char *name, struct err *e)
{
    for (size_t have = 0; have < len;) {
        ssize_t n = read(fd, data + have, len - have);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return err_set(e, ERR_IO, "%s: %s", name,
                           n < 0 ? strerror(errno) : "the file was truncated while it was read");
        }
        have += (size_t)n;
    }
    return 0;
}

int model_file_read(const char *dir, const char *name, size_t max_bytes, char **ret,
                    size_t *ret_len, struct err *e)
{
    int64_t n_bytes;
    int fd = model_file_open(dir, name, &n_bytes, e);

    if (fd < 0) {
        return fd;
    }
    int rc = 0;
    char *data = NULL;
    if ((uint64_t)n_bytes > max_bytes) {
        rc = err_set(e, ERR_INVALID, "%s: %lld bytes, at most %zu are read", name,
                     (long long)n_bytes, max_bytes);
        goto out;
    }
    data = malloc((size_t)n_bytes + 1);
    rc = data ? read_all(fd, data, (size_t)n_bytes, name, e) : err_nomem(e, name);
    if (rc < 0) {
        goto out;
    }
    data[n_bytes] = 0;
    *ret = data;
    *ret_len = (size_t)n_bytes;
    data = NULL;
out:
    free(data);
    close(fd);
    return rc;
}

bool model_file_exists(const char *dir, const char *name)
{
    char path[PATH_MAX];

    return join(path, dir, name, NULL) == 0 && access(path, F_OK) == 0;
}

bool model_file_cached(int fd, int64_t n_bytes)
{
    enum { SAMPLE_EVERY = 256 << 10 };
    char byte;
    struct iovec to = {.iov_base = &byte, .iov_len = 1};

    for (int64_t at = 0; at < n_bytes; at += SAMPLE_EVERY) {
        if (preadv2(fd, &to, 1, at, RWF_NOWAIT) != 1) {
            return false;
        }
    }
    return true;
}

/* ---- names of models in several files ---- */

/* "-00001-of-00003.gguf" */
enum { DIGITS = 5, END_CHARS = 1 + DIGITS + 4 + DIGITS + 5 };

int32_t model_file_parts(const char *name)
{
    size_t n = strlen(name);
    int32_t count = 0;

    if (n < END_CHARS) {
        return 0;
    }
    const char *end = name + n - END_CHARS, *digit = end + 1 + DIGITS + 4;
    bool first = memcmp(end, "-00001-of-", 1 + DIGITS + 4) == 0;
    for (int i = 0; i < DIGITS && first; i++) {
        first = digit[i] >= '0' && digit[i] <= '9';
        count = count * 10 + (digit[i] - '0');
    }
    return first && strcmp(digit + DIGITS, ".gguf") == 0 && count <= LIMIT_SHARDS ? count : 0;
}

void model_file_part(char *ret, const char *name, int32_t i)
{
    size_t n = strlen(name);
    char number[DIGITS + 1];

    snprintf(number, sizeof(number), "%05u", (unsigned)i % 100000u);
    memmove(ret, name, n + 1);
    memcpy(ret + n - END_CHARS + 1, number, DIGITS);
}
