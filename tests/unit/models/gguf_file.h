/* Writing GGUF files for tests; after cmocka.h. */
#ifndef QUIRE_TESTS_UNIT_MODELS_GGUF_FILE_H
#define QUIRE_TESTS_UNIT_MODELS_GGUF_FILE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "config/base/buf.h"
#include "models/checkpoint/gguf/gguf.h"

struct file {
    struct buf head, tensors, data, all;
    uint64_t n_pairs, n_tensors;
};

static inline void u32(struct buf *b, uint32_t n)
{
    buf_append(b, &n, 4); /* little endian, as every machine this is tested on */
}

static inline void u64(struct buf *b, uint64_t n)
{
    buf_append(b, &n, 8);
}

static inline void string(struct buf *b, const char *text)
{
    u64(b, strlen(text));
    buf_append(b, text, strlen(text));
}

static inline void file_init(struct file *f)
{
    memset(f, 0, sizeof(*f));
    buf_init(&f->head, 1 << 20);
    buf_init(&f->tensors, 1 << 20);
    buf_init(&f->data, 1 << 20);
    buf_init(&f->all, 1 << 22);
}

static inline void file_release(struct file *f)
{
    buf_release(&f->head);
    buf_release(&f->tensors);
    buf_release(&f->data);
    buf_release(&f->all);
}

static inline void key(struct file *f, const char *name, enum gguf_type type)
{
    string(&f->head, name);
    u32(&f->head, type);
    f->n_pairs++;
}

static inline void set_int(struct file *f, const char *name, uint32_t value)
{
    key(f, name, GGUF_U32);
    u32(&f->head, value);
}

/* A whole number among the settings of an architecture. */
struct setting_int {
    const char *key;
    uint32_t value;
};

static inline void set_ints(struct file *f, const char *arch, const struct setting_int *v, size_t n)
{
    char name[64];

    for (size_t i = 0; i < n; i++) {
        snprintf(name, sizeof(name), "%s.%s", arch, v[i].key);
        set_int(f, name, v[i].value);
    }
}

static inline void set_real(struct file *f, const char *name, float value)
{
    key(f, name, GGUF_F32);
    buf_append(&f->head, &value, 4);
}

static inline void set_bool(struct file *f, const char *name, bool value)
{
    key(f, name, GGUF_BOOL);
    buf_putc(&f->head, (char)value);
}

static inline void set_text(struct file *f, const char *name, const char *value)
{
    key(f, name, GGUF_STRING);
    string(&f->head, value);
}

static inline void set_texts(struct file *f, const char *name, const char *const *value, uint64_t n)
{
    key(f, name, GGUF_ARRAY);
    u32(&f->head, GGUF_STRING);
    u64(&f->head, n);
    for (uint64_t i = 0; i < n; i++) {
        string(&f->head, value[i]);
    }
}

/* n 32-bit numbers. */
static inline void set_numbers(struct file *f, const char *name, enum gguf_type item,
                               const void *value, uint64_t n)
{
    key(f, name, GGUF_ARRAY);
    u32(&f->head, item);
    u64(&f->head, n);
    buf_append(&f->head, value, 4 * n);
}

/* dim0 is the contiguous axis; an axis of 0 is none. */
static inline void add_cube(struct file *f, const char *name, uint32_t encoding,
                            const uint64_t dim[3], const void *data, size_t n_bytes)
{
    uint32_t n_dims = dim[2] ? 3 : dim[1] ? 2 : 1;

    string(&f->tensors, name);
    u32(&f->tensors, n_dims);
    for (uint32_t i = 0; i < n_dims; i++) {
        u64(&f->tensors, dim[i]);
    }
    u32(&f->tensors, encoding);
    u64(&f->tensors, f->data.len);
    buf_append(&f->data, data, n_bytes);
    while (f->data.len % 32) {
        buf_putc(&f->data, 0);
    }
    f->n_tensors++;
}

/* Likewise, of one axis or two. */
static inline void add_tensor(struct file *f, const char *name, uint32_t encoding, uint64_t dim0,
                              uint64_t dim1, const void *data, size_t n_bytes)
{
    add_cube(f, name, encoding, (const uint64_t[]){dim0, dim1, 0}, data, n_bytes);
}

static inline void finish(struct file *f, uint32_t version)
{
    buf_clear(&f->all);
    buf_puts(&f->all, "GGUF");
    u32(&f->all, version);
    u64(&f->all, f->n_tensors);
    u64(&f->all, f->n_pairs);
    buf_append(&f->all, f->head.data, f->head.len);
    buf_append(&f->all, f->tensors.data, f->tensors.len);
    while (f->all.len % 32) {
        buf_putc(&f->all, 0);
    }
    buf_append(&f->all, f->data.data, f->data.len);
    assert_false(f->all.failed);
}

#endif
