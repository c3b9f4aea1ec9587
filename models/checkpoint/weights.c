/* The tensors of a checkpoint by name, and their files (see weights.h).
 *
 * Files are mapped, not read: opening only parses the headers, and a tensor's pages are
 * read when a backend first touches them. All headers are checked before any tensor is
 * handed out.
 */
#include "models/checkpoint/weights_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xxhash.h>

#include "config/base/json.h"
#include "config/base/limits.h"
#include "models/checkpoint/file.h"
#include "models/checkpoint/gguf/gguf.h"
#include "models/checkpoint/mapped.h"
#include "models/checkpoint/quantised/quantised.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

static const char SINGLE[] = "model.safetensors", INDEX[] = "model.safetensors.index.json";

int checkpoint_new(struct checkpoint **ret, struct err *e)
{
    struct checkpoint *c = calloc(1, sizeof(*c));

    if (!c) {
        return err_nomem(e, "checkpoint");
    }
    *ret = c;
    return 0;
}

void checkpoint_free(struct checkpoint *c)
{
    if (!c) {
        return;
    }
    for (int32_t i = 0; i < c->n_tensors; i++) {
        free((char *)c->tensor[i].name);
        quant_tensor_free(c->tensor[i].quantised);
    }
    for (int32_t i = 0; i < c->n_mappings; i++) {
        file_unmap(c->mapping[i].data, c->mapping[i].n_bytes);
        free(c->mapping[i].file);
    }
    gguf_free(c->gguf);
    free(c->tensor);
    free(c->slot);
    free(c->mapping);
    free(c->kept);
    free(c);
}

/* madvise of the tensor's whole pages. */
static int advise(const struct tensor *t, int advice)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t at = (uintptr_t)t->data, n_bytes = (uintptr_t)t->n_bytes;

    if (t->encoded) {
        at = (uintptr_t)t->encoded->data;
        n_bytes = (uintptr_t)t->encoded->n_bytes;
    } else if (t->quantised) {
        at = (uintptr_t)t->quantised->codes;
        n_bytes = (uintptr_t)t->quantised->n_bytes;
    }
    uintptr_t end = (at + n_bytes) / page * page;

    at = (at + page - 1) / page * page;
    return end > at ? madvise((void *)at, end - at, advice) : 0;
}

void checkpoint_ask(const struct checkpoint *c, const struct tensor *t)
{
    if (c->uncached) {
        advise(t, MADV_WILLNEED);
    }
}

int checkpoint_keep(struct checkpoint *c, const struct tensor *t, struct err *e)
{
    if (!c->kept) {
        c->kept = calloc((size_t)c->n_tensors, sizeof(*c->kept));
    }
    if (!c->kept) {
        return err_nomem(e, t->name);
    }
    c->kept[t - c->tensor] = true;
    checkpoint_ask(c, t);
    return 0;
}

int checkpoint_fetch(const struct checkpoint *c, struct err *e)
{
    for (int32_t i = 0; i < c->n_tensors && c->kept && c->uncached; i++) {
        /* MADV_POPULATE_READ is of Linux 5.14; an older kernel says EINVAL */
        if (c->kept[i] && advise(&c->tensor[i], MADV_POPULATE_READ) < 0 && errno != EINVAL) {
            return err_set(e, ERR_IO, "%s cannot be read: %s", c->tensor[i].name, strerror(errno));
        }
    }
    return 0;
}

/* The pages of GGUF files: all, or, with `header` alone, those in front of the first
 * tensor, which are the settings and the vocabulary. They are read no more. */
static void drop_files(const struct gguf *g, bool header)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    size_t n_bytes = g->n_bytes;

    if (!g->mapped) {
        return;
    }
    for (int32_t i = 0; i < g->n_tensors && header; i++) {
        uintptr_t at = (uintptr_t)g->tensor[i].data, begin = (uintptr_t)g->data;
        n_bytes = at >= begin ? MIN(n_bytes, at - begin) : n_bytes; /* else of another file */
    }
    madvise((void *)(uintptr_t)g->data, header ? n_bytes / page * page : n_bytes, MADV_DONTNEED);
    for (int32_t i = 0; i < g->n_parts; i++) {
        drop_files(g->part[i], header);
    }
}

void checkpoint_drop_pages(const struct checkpoint *c)
{
    for (int32_t i = 0; i < c->n_tensors && c->kept; i++) {
        /* the pages of a kept tensor may be anonymous memory by then, whose contents
         * would be lost (kernels/cpu/memory/hugepages.c); those of its parts are the
         * same */
        if (!c->kept[i] && !c->tensor[i].part) {
            advise(&c->tensor[i], MADV_DONTNEED);
        }
    }
    if (c->gguf) {
        drop_files(c->gguf, c->kept);
    }
    if (c->kept) {
        return;
    }
    for (int32_t i = 0; i < c->n_mappings; i++) {
        madvise(c->mapping[i].data, c->mapping[i].n_bytes, MADV_DONTNEED);
    }
}

/* The slot of `name`, or the free slot for it; at least half of the slots are free. */
static int32_t *find_slot(const struct checkpoint *c, const char *name)
{
    uint64_t at = XXH3_64bits(name, strlen(name));

    for (;; at++) {
        int32_t *slot = &c->slot[at & (uint64_t)(c->n_slots - 1)];
        if (*slot < 0 || strcmp(c->tensor[*slot].name, name) == 0) {
            return slot;
        }
    }
}

const struct tensor *checkpoint_find(const struct checkpoint *c, const char *name)
{
    int32_t at = c->n_slots ? *find_slot(c, name) : -1;

    return at < 0 ? NULL : &c->tensor[at];
}

int32_t checkpoint_count(const struct checkpoint *c)
{
    return c->n_tensors;
}

const struct tensor *checkpoint_at(const struct checkpoint *c, int32_t i)
{
    return &c->tensor[i];
}

/* Double the capacity; there are twice as many slots as tensors fit. */
static int grow(struct checkpoint *c, struct err *e)
{
    int32_t cap = c->cap_tensors ? 2 * c->cap_tensors : 512, n_slots = 2 * cap;
    struct tensor *tensor = realloc(c->tensor, (size_t)cap * sizeof(*tensor));

    if (!tensor) {
        return err_nomem(e, "list of tensors");
    }
    c->tensor = tensor;
    int32_t *slot = malloc((size_t)n_slots * sizeof(*slot));
    if (!slot) {
        return err_nomem(e, "list of tensors");
    }
    free(c->slot);
    c->slot = slot;
    c->n_slots = n_slots;
    c->cap_tensors = cap;
    memset(slot, -1, (size_t)n_slots * sizeof(*slot));
    for (int32_t i = 0; i < c->n_tensors; i++) {
        *find_slot(c, tensor[i].name) = i;
    }
    return 0;
}

int checkpoint_add(struct checkpoint *c, const struct tensor *t, struct err *e)
{
    if (c->n_tensors >= LIMIT_TENSORS) {
        return err_set(e, ERR_FULL, "more than %d tensors", LIMIT_TENSORS);
    }
    int rc = c->n_tensors == c->cap_tensors ? grow(c, e) : 0;
    if (rc < 0) {
        return rc;
    }
    int32_t *slot = find_slot(c, t->name);
    if (*slot >= 0) {
        return err_set(e, ERR_INVALID, "tensor '%.200s' appears twice", t->name);
    }
    char *name = strdup(t->name);
    if (!name) {
        return err_nomem(e, "list of tensors");
    }
    *slot = c->n_tensors;
    c->tensor[c->n_tensors] = *t;
    c->tensor[c->n_tensors++].name = name;
    return 0;
}

/* Map one file of the directory and add its tensors. */
static int add_file(struct checkpoint *c, const char *dir, const char *file, struct err *e)
{
    int64_t n_bytes;
    int fd = model_file_open(dir, file, &n_bytes, e);

    if (fd < 0) {
        return fd;
    }
    void *data = NULL;
    int rc = n_bytes > 0 ? file_map(fd, (size_t)n_bytes, file, &data, e)
                         : err_set(e, ERR_INVALID, "%s: the file is empty", file);
    c->uncached |= rc == 0 && !model_file_cached(fd, n_bytes);
    close(fd);
    if (rc < 0) {
        return rc;
    }
    struct mapping *list = realloc(c->mapping, (size_t)(c->n_mappings + 1) * sizeof(*list));
    char *name = strdup(file);
    if (list) {
        c->mapping = list;
    }
    if (!list || !name) {
        file_unmap(data, (size_t)n_bytes);
        free(name);
        return err_nomem(e, file);
    }
    c->mapping[c->n_mappings++] =
        (struct mapping){.data = data, .n_bytes = (size_t)n_bytes, .file = name};
    return safetensors_parse(c, data, (size_t)n_bytes, file, e);
}

static const struct mapping *find_mapping(const struct checkpoint *c, const char *file)
{
    for (int32_t i = c->n_mappings - 1; i >= 0; i--) {
        if (strcmp(c->mapping[i].file, file) == 0) {
            return &c->mapping[i];
        }
    }
    return NULL;
}

/* One entry of the index: `tensor` is in `file`, which is opened when an entry first
 * names it. */
static int add_indexed(struct checkpoint *c, const char *dir, const char *tensor, const char *file,
                       struct err *e)
{
    const struct mapping *m = find_mapping(c, file);

    if (!m) {
        if (c->n_mappings >= LIMIT_SHARDS) {
            return err_set(e, ERR_INVALID, "%s: more than %d shards", INDEX, LIMIT_SHARDS);
        }
        int rc = add_file(c, dir, file, e);
        if (rc < 0) {
            return rc == ERR_NOT_FOUND
                       ? err_prefix(e, "%s: '%.100s' is in a shard that is missing", INDEX, tensor)
                       : rc;
        }
        m = find_mapping(c, file);
    }
    const struct tensor *t = checkpoint_find(c, tensor);
    const char *data = t ? t->data : NULL, *first = m->data;
    if (!data || data < first || data > first + m->n_bytes) {
        return err_set(e, ERR_INVALID, "%s: tensor '%.200s' is not in '%.100s'", INDEX, tensor,
                       file);
    }
    return 0;
}

static int add_shards(struct checkpoint *c, const char *dir, struct err *e)
{
    char *text, file[256];
    size_t len;
    int64_t n_named = 0;
    int rc = model_file_read(dir, INDEX, LIMIT_SAFETENSORS_HEADER_BYTES, &text, &len, e);

    if (rc < 0) {
        return rc;
    }
    struct json j;
    json_init(&j, text, len, INDEX, e);
    json_enter_object(&j);
    while (json_next_member(&j)) {
        if (!json_key_is(&j, "weight_map") || n_named > 0) {
            json_skip(&j);
            continue;
        }
        json_enter_object(&j);
        while (json_next_member(&j) && json_read_string(&j, file, sizeof(file), NULL)) {
            rc = add_indexed(c, dir, j.key, file, e);
            if (rc < 0) {
                goto out;
            }
            n_named++;
        }
    }
    json_finish(&j);
    if (j.failed) {
        rc = ERR_INVALID;
    } else if (n_named == 0) {
        rc = err_set(e, ERR_INVALID, "%s: weight_map names no tensors", INDEX);
    } else if (n_named != c->n_tensors) {
        rc = err_set(e, ERR_INVALID, "%s names %lld tensors, its shards hold %d", INDEX,
                     (long long)n_named, c->n_tensors);
    }
out:
    free(text);
    return rc;
}

int checkpoint_open(struct checkpoint **ret, const char *dir, struct err *e)
{
    struct checkpoint *c = NULL;
    int rc = checkpoint_new(&c, e);

    if (rc < 0) {
        return rc;
    }
    if (model_file_exists(dir, SINGLE)) {
        rc = add_file(c, dir, SINGLE, e);
    } else if (model_file_exists(dir, INDEX)) {
        rc = add_shards(c, dir, e);
    } else {
        rc = err_set(e, ERR_NOT_FOUND, "the model directory has no weights: neither %s nor %s%s",
                     SINGLE, INDEX,
                     model_file_exists(dir, "pytorch_model.bin")
                         ? "; pytorch_model.bin is not read, convert it to safetensors"
                         : "");
    }
    if (rc < 0) {
        checkpoint_free(c);
        return rc;
    }
    *ret = c;
    return 0;
}
