/* The header of a GGUF file, versions 2 and 3, little endian.
 *
 * Layout: "GGUF", version, counts of tensors and of metadata pairs, the pairs (key,
 * type, value), the tensors' entries (name, dimensions, type, offset), padding to
 * general.alignment, the data. The file is not trusted: a count is checked against the
 * file's size before memory is allocated for it, every length against the bytes that
 * are left, and tensors must be inside the data and must not overlap.
 */
#include "models/checkpoint/gguf/gguf.h"
#include "models/checkpoint/file.h"
#include "models/checkpoint/mapped.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { ALIGNMENT = 32, PAIR_MIN_BYTES = 8 + 1 + 4 + 1, TENSOR_MIN_BYTES = 8 + 1 + 4 + 8 + 4 + 8 };

/* The part of the header that is not read yet. */
struct cursor {
    const uint8_t *at, *end;
    const char *file;
    struct err *e;
};

/* ---- numbers and strings of the file ---- */

static int ends(struct cursor *c, const char *what)
{
    return err_set(c->e, ERR_INVALID, "%s: the file ends inside %s", c->file, what);
}

static int take_u32(struct cursor *c, uint32_t *ret, const char *what)
{
    if (c->end - c->at < 4) {
        return ends(c, what);
    }
    *ret = gguf_u32(c->at);
    c->at += 4;
    return 0;
}

static int take_u64(struct cursor *c, uint64_t *ret, const char *what)
{
    if (c->end - c->at < 8) {
        return ends(c, what);
    }
    *ret = gguf_u64(c->at);
    c->at += 8;
    return 0;
}

static int take_string(struct cursor *c, struct gguf_text *ret, const char *what)
{
    uint64_t len = 0;
    int rc = take_u64(c, &len, what);

    if (rc < 0) {
        return rc;
    }
    if (len > (uint64_t)(c->end - c->at)) {
        return err_set(c->e, ERR_INVALID,
                       "%s: %s claims a string of %llu bytes, %llu are left of the file", c->file,
                       what, (unsigned long long)len, (unsigned long long)(c->end - c->at));
    }
    *ret = (struct gguf_text){(const char *)c->at, (size_t)len};
    c->at += len;
    return 0;
}

/* Read a key or a tensor's name: printable ASCII of limited length. */
static int take_name(struct cursor *c, struct gguf_text *ret, const char *what)
{
    int rc = take_string(c, ret, what);

    if (rc < 0) {
        return rc;
    }
    if (ret->len == 0 || ret->len > 128) {
        return err_set(c->e, ERR_INVALID, "%s: %s has a name of %zu bytes, allowed are 1 to 128",
                       c->file, what, ret->len);
    }
    for (size_t i = 0; i < ret->len; i++) {
        if (ret->at[i] <= 0x20 || ret->at[i] >= 0x7f) {
            return err_set(c->e, ERR_INVALID, "%s: %s has a name that is not printable ASCII",
                           c->file, what);
        }
    }
    return 0;
}

static int by_text(const struct gguf_text *a, const struct gguf_text *b)
{
    int order = memcmp(a->at, b->at, MIN(a->len, b->len));

    return order ? order : (a->len > b->len) - (a->len < b->len);
}

bool gguf_text_is(struct gguf_text t, const char *text)
{
    return t.len == strlen(text) && memcmp(t.at, text, t.len) == 0;
}

/* ---- metadata ---- */

/* Bytes of a value; 0: the type has no fixed size. */
static size_t type_bytes(uint32_t type)
{
    static const uint8_t BYTES[] = {
        [GGUF_U8] = 1,  [GGUF_I8] = 1,     [GGUF_U16] = 2,  [GGUF_I16] = 2, [GGUF_U32] = 4,
        [GGUF_I32] = 4, [GGUF_F32] = 4,    [GGUF_BOOL] = 1, [GGUF_U64] = 8, [GGUF_I64] = 8,
        [GGUF_F64] = 8, [GGUF_STRING] = 0, [GGUF_ARRAY] = 0};

    return type < ARRAY_LEN(BYTES) ? BYTES[type] : 0;
}

static int check_bools(struct cursor *c, const struct gguf_pair *p)
{
    for (uint64_t i = 0; i < p->n; i++) {
        if (p->at[i] > 1) {
            return err_set(c->e, ERR_INVALID, "%s: %.*s is a bool of %d", c->file, (int)p->key.len,
                           p->key.at, p->at[i]);
        }
    }
    return 0;
}

/* Step over p->n elements of type `item`. */
static int take_items(struct cursor *c, struct gguf_pair *p, uint32_t item)
{
    size_t bytes = type_bytes(item), left = (size_t)(c->end - c->at);
    struct gguf_text text;
    int rc = 0;

    p->at = c->at;
    if (p->n > left / (item == GGUF_STRING ? 8 : bytes)) {
        return err_set(c->e, ERR_INVALID,
                       "%s: %.*s claims %llu elements, %zu bytes are left of the file", c->file,
                       (int)p->key.len, p->key.at, (unsigned long long)p->n, left);
    }
    if (item != GGUF_STRING) {
        c->at += p->n * bytes;
    }
    for (uint64_t i = 0; item == GGUF_STRING && i < p->n && rc == 0; i++) {
        rc = take_string(c, &text, "a string of the metadata");
    }
    return rc == 0 && item == GGUF_BOOL ? check_bools(c, p) : rc;
}

static int take_pair(struct cursor *c, struct gguf_pair *p)
{
    uint32_t type = 0, item;
    int rc = take_name(c, &p->key, "the metadata");

    if (rc == 0) {
        rc = take_u32(c, &type, "the metadata");
    }
    if (rc < 0) {
        return rc;
    }
    item = type;
    p->n = 1;
    if (type == GGUF_ARRAY) {
        rc = take_u32(c, &item, "the metadata");
        if (rc == 0) {
            rc = take_u64(c, &p->n, "the metadata");
        }
        if (rc < 0) {
            return rc;
        }
    }
    if (item > GGUF_F64 || item == GGUF_ARRAY) {
        return err_set(c->e, ERR_INVALID, "%s: %.*s is of type %u%s, which is not known", c->file,
                       (int)p->key.len, p->key.at, item,
                       type == GGUF_ARRAY ? " inside an array" : "");
    }
    p->type = (enum gguf_type)type;
    p->item = (enum gguf_type)item;
    return take_items(c, p, item);
}

static int by_key(const void *a, const void *b)
{
    return by_text(&((const struct gguf_pair *)a)->key, &((const struct gguf_pair *)b)->key);
}

static int take_pairs(struct cursor *c, struct gguf *g)
{
    int rc = 0;

    for (int32_t i = 0; i < g->n_pairs && rc == 0; i++) {
        rc = take_pair(c, &g->pair[i]);
    }
    if (rc < 0) {
        return rc;
    }
    qsort(g->pair, (size_t)g->n_pairs, sizeof(*g->pair), by_key);
    for (int32_t i = 1; i < g->n_pairs; i++) {
        const struct gguf_text *key = &g->pair[i].key;
        if (by_text(key, &g->pair[i - 1].key) == 0) {
            return err_set(c->e, ERR_INVALID, "%s: %.*s appears twice", c->file, (int)key->len,
                           key->at);
        }
    }
    return 0;
}

/* ---- tensors ---- */

/* Set t->n_bytes from its dimensions and its encoding. */
static int set_bytes(struct cursor *c, struct gguf_tensor *t)
{
    int64_t n = 1, block = gguf_block_values(t->encoding);

    for (int32_t i = 0; i < t->n_dims; i++) {
        if (t->dim[i] < 1 || __builtin_mul_overflow(n, t->dim[i], &n)) {
            return err_set(c->e, ERR_INVALID,
                           "%s: tensor %.*s has a dimension of %lld, or too many values", c->file,
                           (int)t->name.len, t->name.at, (long long)t->dim[i]);
        }
    }
    if (t->dim[0] % block != 0) {
        return err_set(c->e, ERR_INVALID,
                       "%s: tensor %.*s has rows of %lld values, %s needs a multiple of %d",
                       c->file, (int)t->name.len, t->name.at, (long long)t->dim[0],
                       gguf_encoding_name(t->encoding), (int)block);
    }
    if (__builtin_mul_overflow(n / block, (int64_t)gguf_block_bytes(t->encoding), &t->n_bytes)) {
        return err_set(c->e, ERR_INVALID, "%s: tensor %.*s has too many values", c->file,
                       (int)t->name.len, t->name.at);
    }
    return 0;
}

/* Read one entry; t->data is set later, from the offset and the beginning of the
 * data. */
static int take_tensor(struct cursor *c, struct gguf_tensor *t, uint64_t *ret_offset)
{
    static const char WHAT[] = "the list of tensors";
    uint32_t n_dims = 0;
    int rc = take_name(c, &t->name, WHAT);

    if (rc == 0) {
        rc = take_u32(c, &n_dims, WHAT);
    }
    if (rc == 0 && (n_dims < 1 || n_dims > GGUF_MAX_DIMS)) {
        rc = err_set(c->e, ERR_INVALID, "%s: tensor %.*s has %u dimensions, allowed are 1 to %d",
                     c->file, (int)t->name.len, t->name.at, n_dims, GGUF_MAX_DIMS);
    }
    for (uint32_t i = 0; rc == 0 && i < n_dims; i++) {
        uint64_t n = 0;
        rc = take_u64(c, &n, WHAT);
        t->dim[i] = rc == 0 && n <= INT64_MAX ? (int64_t)n : -1;
    }
    if (rc == 0) {
        rc = take_u32(c, &t->encoding, WHAT);
    }
    if (rc == 0) {
        rc = take_u64(c, ret_offset, WHAT);
    }
    if (rc < 0) {
        return rc;
    }
    t->n_dims = (int32_t)n_dims;
    if (!gguf_encoding_name(t->encoding)) {
        return err_set(c->e, ERR_UNSUPPORTED, "%s: tensor %.*s is of type %u%s; read are %s",
                       c->file, (int)t->name.len, t->name.at, t->encoding,
                       gguf_encoding_refused(t->encoding), gguf_encoding_list());
    }
    return set_bytes(c, t);
}

static int by_name(const void *a, const void *b)
{
    const struct gguf_tensor *s = *(const struct gguf_tensor *const *)a,
                             *t = *(const struct gguf_tensor *const *)b;

    return by_text(&s->name, &t->name);
}

static int by_place(const void *a, const void *b)
{
    const struct gguf_tensor *s = *(const struct gguf_tensor *const *)a,
                             *t = *(const struct gguf_tensor *const *)b;

    return (s->data > t->data) - (s->data < t->data);
}

int gguf_check_tensors(const struct gguf *g, struct err *e)
{
    int32_t n = g->n_tensors;
    const struct gguf_tensor **order = malloc((size_t)MAX(n, 1) * sizeof(*order));
    int rc = 0;

    if (!order) {
        return err_nomem(e, "list of tensors");
    }
    for (int32_t i = 0; i < n; i++) {
        order[i] = &g->tensor[i];
    }
    qsort(order, (size_t)n, sizeof(*order), by_name);
    for (int32_t i = 1; i < n && rc == 0; i++) {
        if (by_text(&order[i]->name, &order[i - 1]->name) == 0) {
            rc = err_set(e, ERR_INVALID, "%s: tensor %.*s appears twice", g->file,
                         (int)order[i]->name.len, order[i]->name.at);
        }
    }
    qsort(order, (size_t)n, sizeof(*order), by_place);
    for (int32_t i = 1; i < n && rc == 0; i++) {
        const struct gguf_tensor *s = order[i - 1], *t = order[i];
        if (s->data + s->n_bytes > t->data) {
            rc = err_set(e, ERR_INVALID, "%s: tensors %.*s and %.*s overlap", g->file,
                         (int)s->name.len, s->name.at, (int)t->name.len, t->name.at);
        }
    }
    free(order);
    return rc;
}

static int take_tensors(struct cursor *c, struct gguf *g)
{
    uint64_t *offset = calloc((size_t)MAX(g->n_tensors, 1), sizeof(*offset));
    int64_t alignment = ALIGNMENT;

    if (!offset) {
        return err_nomem(c->e, "list of tensors");
    }
    int rc = gguf_int(g, "general.alignment", &alignment, c->e);
    if (rc >= 0) {
        rc = alignment >= 1 && alignment <= 1 << 20 && (alignment & (alignment - 1)) == 0
                 ? 0
                 : err_set(c->e, ERR_INVALID,
                           "%s: general.alignment is %lld, no power of 2 up to 2^20", c->file,
                           (long long)alignment);
    }
    for (int32_t i = 0; i < g->n_tensors && rc == 0; i++) {
        rc = take_tensor(c, &g->tensor[i], &offset[i]);
    }
    size_t begin = rc == 0 ? (size_t)(c->at - g->data) : 0;
    begin = (begin + (size_t)alignment - 1) & ~((size_t)alignment - 1);
    size_t n_data = g->n_bytes > begin ? g->n_bytes - begin : 0;
    for (int32_t i = 0; i < g->n_tensors && rc == 0; i++) {
        struct gguf_tensor *t = &g->tensor[i];
        if (offset[i] % (uint64_t)alignment != 0) {
            rc = err_set(c->e, ERR_INVALID,
                         "%s: tensor %.*s lies at %llu, no multiple of the alignment %lld", c->file,
                         (int)t->name.len, t->name.at, (unsigned long long)offset[i],
                         (long long)alignment);
        } else if (offset[i] > n_data || (uint64_t)t->n_bytes > n_data - offset[i]) {
            rc = err_set(c->e, ERR_INVALID,
                         "%s: tensor %.*s needs bytes %llu to %llu of the data, the file has %zu",
                         c->file, (int)t->name.len, t->name.at, (unsigned long long)offset[i],
                         (unsigned long long)offset[i] + (unsigned long long)t->n_bytes, n_data);
        } else {
            t->data = g->data + begin + offset[i];
        }
    }
    free(offset);
    return rc == 0 ? gguf_check_tensors(g, c->e) : rc;
}

/* ---- the file ---- */

/* Read a count of entries of at least min_bytes each; the rest of the file must have
 * room for them. */
static int take_count(struct cursor *c, int32_t *ret, uint64_t limit, uint64_t min_bytes,
                      const char *what)
{
    uint64_t n = 0;
    int rc = take_u64(c, &n, "the header");

    if (rc == 0 && (n > limit || n > (uint64_t)(c->end - c->at) / min_bytes)) {
        rc = err_set(c->e, ERR_INVALID,
                     "%s: claims %llu %s; the file is too small for them, or they are over %llu",
                     c->file, (unsigned long long)n, what, (unsigned long long)limit);
    }
    if (rc == 0) {
        *ret = (int32_t)n;
    }
    return rc;
}

static int parse(struct cursor *c, struct gguf *g)
{
    uint32_t version = 0;

    if (g->n_bytes < 4 || memcmp(g->data, "GGUF", 4) != 0) {
        return err_set(c->e, ERR_INVALID, "%s: not a GGUF file", c->file);
    }
    c->at += 4;
    int rc = take_u32(c, &version, "the header");
    if (rc == 0 && version != 2 && version != 3) {
        rc = err_set(c->e, ERR_UNSUPPORTED, "%s: GGUF version %u%s; 2 and 3 are read", c->file,
                     version, version && version % 65536 == 0 ? " (a big-endian file)" : "");
    }
    if (rc == 0) {
        rc = take_count(c, &g->n_tensors, LIMIT_TENSORS, TENSOR_MIN_BYTES, "tensors");
    }
    if (rc == 0) {
        rc = take_count(c, &g->n_pairs, LIMIT_GGUF_PAIRS, PAIR_MIN_BYTES, "metadata pairs");
    }
    if (rc < 0) {
        return rc;
    }
    g->pair = calloc((size_t)MAX(g->n_pairs, 1), sizeof(*g->pair));
    g->tensor = calloc((size_t)MAX(g->n_tensors, 1), sizeof(*g->tensor));
    if (!g->pair || !g->tensor) {
        return err_nomem(c->e, "a GGUF header");
    }
    rc = take_pairs(c, g);
    return rc == 0 ? take_tensors(c, g) : rc;
}

int gguf_parse(struct gguf **ret, const void *data, size_t n_bytes, const char *file, struct err *e)
{
    struct gguf *g = calloc(1, sizeof(*g));

    if (!g) {
        return err_nomem(e, "a GGUF file");
    }
    *g = (struct gguf){.data = data, .n_bytes = n_bytes, .file = file};
    struct cursor c = {.at = data, .end = (const uint8_t *)data + n_bytes, .file = file, .e = e};
    int rc = parse(&c, g);
    if (rc < 0) {
        gguf_free(g);
        return rc;
    }
    *ret = g;
    return 0;
}

bool gguf_is_file(const char *path)
{
    struct stat st;

    return stat(path, &st) == 0 && S_ISREG(st.st_mode);
}

int gguf_open_one(struct gguf **ret, const char *path, struct err *e)
{
    const char *slash = strrchr(path, '/'), *file = slash ? slash + 1 : path;
    struct stat st = {0};
    void *data = NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    bool ok = fd >= 0 && fstat(fd, &st) == 0;
    int pointer = ok ? model_file_check_pointer(fd, file, e) : 0;

    if (pointer < 0) {
        close(fd);
        return pointer;
    }
    int rc = !ok ? err_set(e, ERR_IO, "%s: %s", file, strerror(errno))
             : !S_ISREG(st.st_mode) || st.st_size < 1
                 ? err_set(e, ERR_INVALID, "%s: not a GGUF file", file)
                 : file_map(fd, (size_t)st.st_size, file, &data, e);
    if (fd >= 0) {
        close(fd);
    }
    if (rc == 0) {
        rc = gguf_parse(ret, data, (size_t)st.st_size, file, e);
    }
    if (rc == 0) {
        (*ret)->mapped = true;
    } else if (data) {
        file_unmap(data, (size_t)st.st_size);
    }
    return rc;
}

void gguf_free(struct gguf *g)
{
    if (!g) {
        return;
    }
    if (g->mapped) {
        file_unmap((void *)(uintptr_t)g->data, g->n_bytes);
    }
    for (int32_t i = 0; i < g->n_parts; i++) {
        gguf_free(g->part[i]);
    }
    free(g->part);
    free(g->pair);
    free(g->tensor);
    free(g->slice);
    free(g->path);
    free(g);
}

/* ---- metadata by key ---- */

const struct gguf_pair *gguf_find(const struct gguf *g, const char *key)
{
    struct gguf_pair want = {.key = {key, strlen(key)}};

    return bsearch(&want, g->pair, (size_t)g->n_pairs, sizeof(*g->pair), by_key);
}
