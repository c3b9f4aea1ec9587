/* The header of a safetensors file.
 *
 * Layout: the header's length (64 bits, little endian), the header (a JSON object, name
 * -> {dtype, shape, data_offsets}), then the data; offsets count from its beginning.
 * Headers are not trusted: the bytes of a tensor must be what shape and type make, and
 * all tensors together must cover the data without gaps or overlaps.
 */
#include <endian.h>
#include <stdlib.h>
#include <string.h>

#include "config/base/json.h"
#include "models/checkpoint/weights_internal.h"

struct stored_type {
    const char *name;
    int32_t bytes;
    bool usable;
    enum dtype dtype;
};

static const struct stored_type TYPES[] = {
    {"BF16", 2, true, DTYPE_BF16}, {"F16", 2, true, DTYPE_F16}, {"F32", 4, true, DTYPE_F32},
    {"I32", 4, true, DTYPE_I32},   {"F64", 8, false, 0},        {"I64", 8, false, 0},
    {"U64", 8, false, 0},          {"U32", 4, false, 0},        {"I16", 2, false, 0},
    {"U16", 2, false, 0},          {"I8", 1, false, 0},         {"U8", 1, false, 0},
    {"BOOL", 1, false, 0},         {"F8_E4M3", 1, false, 0},    {"F8_E5M2", 1, false, 0},
    {"F8_E8M0", 1, false, 0},
};

/* One member of the header. */
struct entry {
    char name[JSON_KEY_BYTES];
    const struct stored_type *type;
    int32_t n_dims; /* -1: no shape yet */
    int64_t dim[TENSOR_MAX_DIMS];
    int64_t begin, end; /* begin -1: no data_offsets yet */
};

static bool read_type(struct json *j, struct entry *t)
{
    char name[16];

    if (t->type) {
        return json_fail(j, "tensor '%.200s': dtype is given twice", t->name);
    }
    if (!json_read_string(j, name, sizeof(name), NULL)) {
        return false;
    }
    for (size_t i = 0; i < ARRAY_LEN(TYPES); i++) {
        if (strcmp(TYPES[i].name, name) == 0) {
            t->type = &TYPES[i];
        }
    }
    return t->type ||
           json_fail(j, "tensor '%.200s': dtype '%s' is none of a safetensors file", t->name, name);
}

static bool read_shape(struct json *j, struct entry *t)
{
    if (t->n_dims >= 0) {
        return json_fail(j, "tensor '%.200s': shape is given twice", t->name);
    }
    t->n_dims = 0;
    json_enter_array(j);
    while (json_next_element(j)) {
        int64_t n;
        if (t->n_dims == TENSOR_MAX_DIMS) {
            return json_fail(j, "tensor '%.200s': more than %d dimensions", t->name,
                             TENSOR_MAX_DIMS);
        }
        if (!json_read_int(j, &n)) {
            return false;
        }
        if (n < 0) {
            return json_fail(j, "tensor '%.200s': a dimension of %lld", t->name, (long long)n);
        }
        t->dim[t->n_dims++] = n;
    }
    return !j->failed;
}

static bool read_offsets(struct json *j, struct entry *t)
{
    if (t->begin >= 0) {
        return json_fail(j, "tensor '%.200s': data_offsets is given twice", t->name);
    }
    int64_t value[2] = {0, 0};
    int n = 0;
    json_enter_array(j);
    while (json_next_element(j)) {
        if (n == 2) {
            return json_fail(j, "tensor '%.200s': data_offsets has more than 2 numbers", t->name);
        }
        if (!json_read_int(j, &value[n++])) {
            return false;
        }
    }
    if (!j->failed && (n != 2 || value[0] < 0 || value[1] < value[0])) {
        return json_fail(
            j, "tensor '%.200s': data_offsets must be a begin and an end that is not smaller",
            t->name);
    }
    t->begin = value[0];
    t->end = value[1];
    return !j->failed;
}

/* The bytes that shape and dtype make; -1: more than 63 bits. */
static int64_t entry_bytes(const struct entry *t)
{
    int64_t n = t->type->bytes;

    for (int32_t i = 0; i < t->n_dims; i++) {
        if (__builtin_mul_overflow(n, t->dim[i], &n)) {
            return -1;
        }
    }
    return n;
}

static bool read_entry(struct json *j, struct entry *t, int64_t data_bytes)
{
    *t = (struct entry){.n_dims = -1, .begin = -1};
    memcpy(t->name, j->key, j->key_len + 1);
    if (j->key_len == 0) {
        return json_fail(j, "a tensor without a name");
    }
    for (const char *p = t->name; *p; p++) {
        if ((unsigned char)*p < 0x20 || *p == 0x7f) {
            return json_fail(j, "a control character in the name of a tensor");
        }
    }
    json_enter_object(j);
    while (json_next_member(j)) {
        if (json_key_is(j, "dtype")) {
            read_type(j, t);
        } else if (json_key_is(j, "shape")) {
            read_shape(j, t);
        } else if (json_key_is(j, "data_offsets")) {
            read_offsets(j, t);
        } else {
            json_fail(j, "tensor '%.200s': field '%.50s' is none of dtype, shape, data_offsets",
                      t->name, j->key);
        }
    }
    if (j->failed) {
        return false;
    }
    if (!t->type || t->n_dims < 0 || t->begin < 0) {
        return json_fail(j, "tensor '%.200s' lacks %s", t->name,
                         !t->type        ? "dtype"
                         : t->n_dims < 0 ? "shape"
                                         : "data_offsets");
    }
    if (t->end > data_bytes) {
        return json_fail(
            j,
            "tensor '%.200s' ends at byte %lld of the data, the file has %lld: it is not complete",
            t->name, (long long)t->end, (long long)data_bytes);
    }
    if (entry_bytes(t) != t->end - t->begin) {
        return json_fail(j, "tensor '%.200s' claims %lld bytes, its shape and type make %lld",
                         t->name, (long long)(t->end - t->begin), (long long)entry_bytes(t));
    }
    return true;
}

/* __metadata__: an object of strings, which is not used. */
static bool skip_metadata(struct json *j)
{
    json_enter_object(j);
    while (json_next_member(j)) {
        if (json_peek(j) != JSON_STRING) {
            return json_fail(j, "__metadata__: '%.100s' is not a string", j->key);
        }
        json_skip(j);
    }
    return !j->failed;
}

static int by_place(const void *a, const void *b)
{
    const struct tensor *s = *(const struct tensor *const *)a,
                        *t = *(const struct tensor *const *)b;

    if (s->data != t->data) {
        return (const char *)s->data < (const char *)t->data ? -1 : 1;
    }
    return (s->n_bytes > t->n_bytes) - (s->n_bytes < t->n_bytes);
}

/* Check that the tensors from `first` on cover data[n_bytes] exactly once. */
static int check_cover(const struct checkpoint *c, int32_t first, const char *data, size_t n_bytes,
                       const char *file, struct err *e)
{
    int32_t n = c->n_tensors - first;
    const struct tensor **order = malloc((size_t)MAX(n, 1) * sizeof(*order));

    if (!order) {
        return err_nomem(e, file);
    }
    for (int32_t i = 0; i < n; i++) {
        order[i] = &c->tensor[first + i];
    }
    qsort(order, (size_t)n, sizeof(*order), by_place);
    int rc = 0;
    const char *at = data;
    for (int32_t i = 0; i < n && rc == 0; i++) {
        const char *begin = order[i]->data;
        if (begin != at) {
            rc = err_set(e, ERR_INVALID, "%s: %s tensor '%.200s'", file,
                         begin < at ? "the data of another tensor overlaps that of"
                                    : "bytes that belong to no tensor lie before",
                         order[i]->name);
        }
        at = begin + order[i]->n_bytes;
    }
    if (rc == 0 && at != data + n_bytes) {
        rc = err_set(e, ERR_INVALID, "%s: %zu bytes after the last tensor", file,
                     (size_t)(data + n_bytes - at));
    }
    free(order);
    return rc;
}

int safetensors_parse(struct checkpoint *c, const void *data, size_t n_bytes, const char *file,
                      struct err *e)
{
    uint64_t header_bytes;

    if (n_bytes < sizeof(header_bytes)) {
        return err_set(e, ERR_INVALID, "%s: %zu bytes are too few for a safetensors file", file,
                       n_bytes);
    }
    memcpy(&header_bytes, data, sizeof(header_bytes));
    header_bytes = le64toh(header_bytes);
    n_bytes -= sizeof(header_bytes);
    if (header_bytes > n_bytes || header_bytes > LIMIT_SAFETENSORS_HEADER_BYTES) {
        return err_set(e, ERR_INVALID,
                       "%s: a header of %llu bytes; the file has %zu more, at most %zu are allowed",
                       file, (unsigned long long)header_bytes, n_bytes,
                       LIMIT_SAFETENSORS_HEADER_BYTES);
    }
    const char *header = (const char *)data + sizeof(header_bytes), *body = header + header_bytes;
    int64_t body_bytes = (int64_t)(n_bytes - header_bytes);

    int32_t first = c->n_tensors;
    struct json j;
    struct entry t;
    json_init(&j, header, header_bytes, file, e);
    json_enter_object(&j);
    while (json_next_member(&j)) {
        if (json_key_is(&j, "__metadata__")) {
            skip_metadata(&j);
            continue;
        }
        if (!read_entry(&j, &t, body_bytes)) {
            return ERR_INVALID;
        }
        struct tensor tensor = {.name = t.name,
                                .stored_type = t.type->name,
                                .usable = t.type->usable,
                                .dtype = t.type->dtype,
                                .n_dims = t.n_dims,
                                .data = body + t.begin,
                                .n_bytes = t.end - t.begin};
        memcpy(tensor.dim, t.dim, sizeof(tensor.dim));
        int rc = checkpoint_add(c, &tensor, e);
        if (rc < 0) {
            return err_prefix(e, "%s", file);
        }
    }
    if (!json_finish(&j)) {
        return ERR_INVALID;
    }
    return check_cover(c, first, body, (size_t)body_bytes, file, e);
}
