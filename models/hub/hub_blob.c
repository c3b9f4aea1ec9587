/* A blob that is being downloaded: the file <oid>.incomplete, under a lock, counted and
 * hashed as it is written.
 *
 * The bytes of an earlier attempt are hashed again first, so the hash always covers the
 * file from its beginning; a blob gets its name only if all of it is right. The lock is
 * the one that Python's huggingface_hub takes.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "models/hub/hub_internal.h"

void hub_blob_init(struct hub_blob *b, const struct hub_file *f)
{
    *b = (struct hub_blob){.file = f, .fd = -1, .lock_fd = -1};
}

static void drop_hash(struct hub_blob *b)
{
    unsigned char out[HUB_HASH_BYTES];

    if (b->hash) {
        gnutls_hash_deinit(b->hash, out);
    }
    b->hash = NULL;
}

void hub_blob_release(struct hub_blob *b)
{
    drop_hash(b);
    if (b->fd >= 0 && b->have == 0) {
        unlink(b->path);
    }
    if (b->fd >= 0) {
        close(b->fd);
    }
    if (b->lock_fd >= 0) {
        close(b->lock_fd); /* releases the lock */
    }
    b->fd = b->lock_fd = -1;
}

static int failed(const struct hub_blob *b, const char *doing, struct err *e)
{
    return err_set(e, ERR_IO, "cannot %s %s: %s", doing, b->file->name, strerror(errno));
}

/* Git names a blob by the SHA-1 of its length and contents, Git LFS by the SHA-256 of
 * its contents. */
static int begin_hash(struct hub_blob *b, struct err *e)
{
    char head[32];

    drop_hash(b);
    if (gnutls_hash_init(&b->hash, b->file->lfs ? GNUTLS_DIG_SHA256 : GNUTLS_DIG_SHA1) != 0) {
        b->hash = NULL;
        return err_nomem(e, "a checksum");
    }
    int n = snprintf(head, sizeof(head), "blob %lld", (long long)b->file->n_bytes);
    if (!b->file->lfs) {
        gnutls_hash(b->hash, head, (size_t)n + 1);
    }
    return 0;
}

int hub_blob_restart(struct hub_blob *b, struct err *e)
{
    b->have = 0;
    if (ftruncate(b->fd, 0) != 0 || lseek(b->fd, 0, SEEK_SET) < 0) {
        return failed(b, "write", e);
    }
    return begin_hash(b, e);
}

/* Hash the bytes of an earlier attempt; the next write is after them. */
static int resume(struct hub_blob *b, struct err *e)
{
    char data[1 << 16];
    ssize_t n;
    int rc = begin_hash(b, e);

    while (rc == 0 && (n = read(b->fd, data, sizeof(data))) != 0) {
        if (n < 0) {
            return failed(b, "read the incomplete", e);
        }
        gnutls_hash(b->hash, data, (size_t)n);
        b->have += n;
    }
    return rc == 0 && b->have > b->file->n_bytes ? hub_blob_restart(b, e) : rc;
}

/* 1: locked; 0: another process holds the lock. A process may remove the lock file when
 * it releases it; a lock on a removed file is not valid, so a new one is made. */
static int lock(struct hub_blob *b, const struct hub *h, struct err *e)
{
    char path[PATH_MAX];
    struct stat st;
    int rc = hub_cache_lock(h, b->file->oid, path, e);

    while (rc == 0) {
        b->lock_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0664);
        bool locked = b->lock_fd >= 0 && flock(b->lock_fd, LOCK_EX | LOCK_NB) == 0;
        bool busy = b->lock_fd >= 0 && !locked && errno == EWOULDBLOCK;
        if (!locked && !busy) {
            return failed(b, "lock", e);
        }
        if (locked && fstat(b->lock_fd, &st) == 0 && st.st_nlink > 0) {
            return 1;
        }
        close(b->lock_fd);
        b->lock_fd = -1;
        if (busy) {
            break;
        }
    }
    return rc;
}

int hub_blob_open(struct hub_blob *b, const struct hub *h, struct err *e)
{
    int rc = lock(b, h, e);

    if (rc != 1) {
        return rc;
    }
    if (hub_cache_has(h, b->file)) {
        hub_blob_release(b);
        return 2;
    }
    rc = hub_cache_blob(h, b->file->oid, ".incomplete", b->path, e);
    if (rc < 0) {
        return rc;
    }
    b->have = 0;
    b->fd = open(b->path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (b->fd < 0) {
        return failed(b, "write", e);
    }
    rc = resume(b, e);
    return rc < 0 ? rc : 1;
}

int hub_blob_write(struct hub_blob *b, const void *data, size_t len, struct err *e)
{
    if ((int64_t)len > b->file->n_bytes - b->have) {
        return err_set(e, ERR_INVALID, "%s is longer than the %lld bytes that the hub says",
                       b->file->name, (long long)b->file->n_bytes);
    }
    for (size_t done = 0; done < len;) {
        ssize_t n = write(b->fd, (const char *)data + done, len - done);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return failed(b, "write", e);
        }
        gnutls_hash(b->hash, (const char *)data + done, (size_t)n);
        b->have += n;
        done += (size_t)n;
    }
    return 0;
}

bool hub_blob_verify(struct hub_blob *b)
{
    unsigned char out[HUB_HASH_BYTES];
    char text[2 * HUB_HASH_BYTES + 1];
    size_t n = b->file->lfs ? 32 : 20;

    gnutls_hash_deinit(b->hash, out);
    b->hash = NULL;
    for (size_t i = 0; i < n; i++) {
        snprintf(text + 2 * i, 3, "%02x", out[i]);
    }
    return b->have == b->file->n_bytes && strcmp(text, b->file->oid) == 0;
}

int hub_blob_finish(struct hub_blob *b, const struct hub *h, struct err *e)
{
    char path[PATH_MAX];
    int rc = hub_cache_blob(h, b->file->oid, "", path, e);

    if (rc == 0 && (fsync(b->fd) != 0 || rename(b->path, path) != 0)) {
        rc = failed(b, "write", e);
    }
    hub_blob_release(b);
    return rc;
}
