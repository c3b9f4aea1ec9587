/* See heuristics_products.h. The file is a header, which tells what the choices hold
 * for, and the records as they are in memory. A checksum over the records detects
 * truncated or damaged files, which count as empty. */
#include "kernels/cuda/gemm/heuristics_products.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "config/base/cache_dir.h"
#include "config/base/kept.h"

struct file_header {
    char magic[8];
    uint32_t record_bytes;
    int32_t n;
    uint64_t device, checksum;
    int64_t memory_gbs;
};

static const char MAGIC[8] = {'Q', 'U', 'I', 'R', 'E', 'M', 'P', '2'};

uint64_t product_hash(const void *data, int64_t n_bytes)
{
    const unsigned char *p = data;
    uint64_t h = 0xCBF29CE484222325ull; /* FNV-1a */

    for (int64_t i = 0; i < n_bytes; i++) {
        h = (h ^ p[i]) * 0x100000001B3ull;
    }
    return h ^ (h >> 29);
}

static bool read_all(int fd, void *to, size_t n)
{
    for (char *p = to; n > 0;) {
        ssize_t got = read(fd, p, n);
        if (got <= 0) {
            return false;
        }
        p += got;
        n -= (size_t)got;
    }
    return true;
}

static bool write_all(int fd, const void *from, size_t n)
{
    for (const char *p = from; n > 0;) {
        ssize_t put = write(fd, p, n);
        if (put <= 0) {
            return false;
        }
        p += put;
        n -= (size_t)put;
    }
    return true;
}

static uint64_t checksum(const struct product_store *s)
{
    uint64_t of[2] = {product_hash(s->record, (int64_t)s->n * (int64_t)sizeof(*s->record)),
                      (uint64_t)s->memory_gbs};

    return product_hash(of, sizeof(of));
}

static bool reserve(struct product_store *s, int32_t n)
{
    if (n > s->cap) {
        struct product_record *grown = realloc(s->record, (size_t)n * sizeof(*grown));
        if (!grown) {
            return false;
        }
        s->record = grown;
        s->cap = n;
    }
    return true;
}

static void load(struct product_store *s)
{
    int fd = open(s->path, O_RDONLY | O_CLOEXEC);
    struct file_header h = {0};

    if (fd < 0) {
        return;
    }
    bool ok = read_all(fd, &h, sizeof(h)) && memcmp(h.magic, MAGIC, sizeof(MAGIC)) == 0 &&
              h.device == s->device && h.record_bytes == sizeof(*s->record) && h.n >= 0 &&
              h.n <= PRODUCT_RECORDS && reserve(s, h.n) &&
              read_all(fd, s->record, (size_t)h.n * sizeof(*s->record));
    s->n = ok ? h.n : 0;
    s->memory_gbs = ok ? h.memory_gbs : 0;
    s->seen = checksum(s);
    s->damaged = !ok || s->seen != h.checksum;
    if (s->damaged) {
        s->n = 0;
        s->memory_gbs = 0;
        s->seen = 0;
    }
    close(fd);
}

/* Takes over what the file has more than the store, and what it has in place of the
 * store's. */
static void merge(struct product_store *s)
{
    struct product_store disk = {.device = s->device};
    bool changed = s->changed, replaces = s->replaces;

    memcpy(disk.path, s->path, sizeof(disk.path));
    load(&disk);
    for (int32_t i = 0; i < disk.n && disk.seen != s->seen; i++) {
        const struct product_record *r = &disk.record[i];
        if (!replaces || !product_store_find(s, &r->key)) {
            product_store_put(s, &r->key, &r->choice);
        }
    }
    s->memory_gbs = disk.memory_gbs > 0 ? disk.memory_gbs : s->memory_gbs;
    s->changed = changed;
    s->replaces = replaces;
    free(disk.record);
}

/* Locks the directory of the file; -1: it is not there, or another process has held the
 * lock for long, and each does what it does alone. */
static int lock_directory(const struct product_store *s)
{
    char dir[sizeof(s->path)];
    char *end;

    memcpy(dir, s->path, sizeof(dir));
    end = strrchr(dir, '/');
    if (!end || end == dir) {
        return -1;
    }
    *end = '\0';
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0 && !kept_lock(fd)) {
        close(fd);
        fd = -1;
    }
    return fd;
}

static void unlock(int fd)
{
    if (fd >= 0) {
        close(fd);
    }
}

void product_store_open(struct product_store *s, const char *dir, const char *device)
{
    char found[384];

    memset(s, 0, sizeof(*s));
    s->device = product_hash(device, (int64_t)strlen(device));
    if (!dir && cache_dir(found, sizeof(found))) {
        dir = found;
    }
    int n = !dir ? 0
                 : snprintf(s->path, sizeof(s->path), "%s/products-%016llx", dir,
                            (unsigned long long)s->device);
    if (n <= 0 || n >= (int)sizeof(s->path)) {
        s->path[0] = '\0';
        return;
    }
    load(s);
}

void product_store_release(struct product_store *s)
{
    free(s->record);
    memset(s, 0, sizeof(*s));
}

const struct product_choice *product_store_find(const struct product_store *s,
                                                const struct product_key *k)
{
    for (int32_t i = 0; i < s->n && !k->alike; i++) {
        if (memcmp(&s->record[i].key, k, sizeof(*k)) == 0) {
            return &s->record[i].choice;
        }
    }
    return NULL;
}

void product_store_put(struct product_store *s, const struct product_key *k,
                       const struct product_choice *c)
{
    struct product_choice *known = (struct product_choice *)product_store_find(s, k);

    if (known) {
        bool differs = memcmp(known, c, sizeof(*c)) != 0;
        s->changed = s->changed || differs;
        s->replaces = s->replaces || differs;
        *known = *c;
    } else if (!k->alike && s->n < PRODUCT_RECORDS && (s->n < s->cap || reserve(s, s->cap + 256))) {
        s->record[s->n++] = (struct product_record){*k, *c};
        s->changed = true;
    }
}

/* Writes the file anew. */
static void write_file(struct product_store *s)
{
    char fresh[sizeof(s->path) + 32];

    snprintf(fresh, sizeof(fresh), "%s.%d", s->path, (int)getpid());
    int fd = open(fresh, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) {
        return;
    }
    struct file_header h = {.record_bytes = sizeof(*s->record),
                            .n = s->n,
                            .device = s->device,
                            .checksum = checksum(s),
                            .memory_gbs = s->memory_gbs};
    memcpy(h.magic, MAGIC, sizeof(MAGIC));
    bool ok =
        write_all(fd, &h, sizeof(h)) && write_all(fd, s->record, (size_t)s->n * sizeof(*s->record));
    ok = close(fd) == 0 && ok;
    ok = ok && rename(fresh, s->path) == 0;
    if (ok) {
        s->seen = h.checksum;
    } else {
        unlink(fresh);
    }
}

void product_store_save(struct product_store *s)
{
    if (!s->changed || s->path[0] == '\0') {
        return;
    }
    cache_make_dirs(s->path);
    int fd = lock_directory(s);
    merge(s);
    s->changed = s->replaces = false;
    write_file(s);
    unlock(fd);
}

void product_store_memory(struct product_store *s, int32_t (*measure)(void *arg), void *arg)
{
    if (s->memory_gbs > 0) {
        return;
    }
    if (s->path[0] == '\0') {
        s->memory_gbs = measure(arg);
        return;
    }
    cache_make_dirs(s->path);
    int fd = lock_directory(s);
    merge(s);
    if (s->memory_gbs == 0) {
        s->memory_gbs = measure(arg);
        if (s->memory_gbs > 0) {
            write_file(s);
        }
    }
    unlock(fd);
}
