/* Models in several GGUF files. The first one has all metadata; the others have
 * tensors, and say which file of how many they are. */
#include <stdlib.h>
#include <string.h>

#include "models/checkpoint/file.h"
#include "models/checkpoint/gguf/gguf.h"

/* The part of the model that a file is, from 0, and of how many; 0 of 1: the whole. */
static int place_of(const struct gguf *g, int64_t *ret_no, int64_t *ret_count, struct err *e)
{
    *ret_no = 0;
    *ret_count = 1;
    int rc = gguf_int(g, "split.count", ret_count, e);
    rc = rc < 0 ? rc : gguf_int(g, "split.no", ret_no, e);
    return MIN(rc, 0);
}

/* Opens file number i, from 1, of `count` and adds its tensors to those of g. */
static int add_part(struct gguf *g, const char *path, int32_t i, int64_t count, struct err *e)
{
    char *other = strdup(path);
    struct gguf *p = NULL;
    int64_t no, of;

    if (!other) {
        return err_nomem(e, "a GGUF file's name");
    }
    model_file_part(other, path, i);
    int rc = gguf_open_one(&p, other, e);
    if (rc < 0) {
        free(other);
        return rc;
    }
    p->path = other;
    g->part[g->n_parts++] = p;
    rc = place_of(p, &no, &of, e);
    if (rc == 0 && (no != i - 1 || of != count)) {
        rc = err_set(e, ERR_INVALID, "%s: says that it is file %lld of %lld of its model", p->file,
                     (long long)no + 1, (long long)of);
    }
    if (rc == 0 && p->n_tensors > LIMIT_TENSORS - g->n_tensors) {
        rc = err_set(e, ERR_INVALID, "%s: with it there are more than %d tensors", p->file,
                     (int)LIMIT_TENSORS);
    }
    if (rc < 0 || p->n_tensors == 0) {
        return rc;
    }
    size_t n = (size_t)g->n_tensors, more = (size_t)p->n_tensors;
    struct gguf_tensor *all = realloc(g->tensor, (n + more) * sizeof(*all));
    if (!all) {
        return err_nomem(e, "list of tensors");
    }
    memcpy(all + n, p->tensor, more * sizeof(*all));
    g->tensor = all;
    g->n_tensors += p->n_tensors;
    return 0;
}

static int add_parts(struct gguf *g, const char *path, struct err *e)
{
    int64_t no, count, n_tensors = -1;
    int rc = place_of(g, &no, &count, e);

    if (rc < 0 || count == 1) {
        return rc;
    }
    if (no != 0) {
        return err_set(e, ERR_INVALID, "%s: is file %lld of %lld of a model; give the first one",
                       g->file, (long long)no + 1, (long long)count);
    }
    if (count < 1 || count != model_file_parts(path)) {
        return err_set(e, ERR_INVALID,
                       "%s: is the first of %lld files of a model, which are found by names as "
                       "NAME-00001-of-%05lld.gguf, at most %d",
                       g->file, (long long)count, (long long)count, (int)LIMIT_SHARDS);
    }
    g->part = calloc((size_t)count, sizeof(struct gguf *));
    if (!g->part) {
        return err_nomem(e, "list of GGUF files");
    }
    for (int32_t i = 2; i <= count && rc == 0; i++) {
        rc = add_part(g, path, i, count, e);
    }
    rc = rc < 0 ? rc : gguf_int(g, "split.tensors.count", &n_tensors, e);
    if (rc > 0 && n_tensors != g->n_tensors) {
        rc = err_set(e, ERR_INVALID, "%s: the model has %lld tensors, its files %d", g->file,
                     (long long)n_tensors, g->n_tensors);
    }
    return rc < 0 ? rc : gguf_check_tensors(g, e);
}

int gguf_open(struct gguf **ret, const char *path, struct err *e)
{
    struct gguf *g = NULL;
    int rc = gguf_open_one(&g, path, e);

    rc = rc < 0 ? rc : add_parts(g, path, e);
    if (rc < 0) {
        gguf_free(g);
        return rc;
    }
    *ret = g;
    return 0;
}
