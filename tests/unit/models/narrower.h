/* A golden with a narrower MLP, for divisions that its own width does not allow: every
 * tensor of an MLP keeps the beginning of its axes. */
#ifndef QUIRE_TESTS_UNIT_MODELS_NARROWER_H
#define QUIRE_TESTS_UNIT_MODELS_NARROWER_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "config/base/base.h"

/* Extents of axes and texts of config.json, and what takes their place. */
struct narrowing {
    struct {
        int64_t from, to; /* from 0: no more */
    } extent[5];
    struct {
        const char *from, *to;
    } text[5];
};

enum { NARROW_DIMS = 4, NARROW_HEADER = 1 << 14 };

/* A tensor of a safetensors file: its entry in the header, and where its values are. */
struct narrow_tensor {
    char name[128], dtype[8];
    int64_t dim[NARROW_DIMS], first, end;
    int32_t n_dims;
};

static inline char *narrow_read(const char *dir, const char *name, size_t *ret_n)
{
    char path[512];

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    fseek(f, 0, SEEK_END);
    *ret_n = (size_t)ftell(f);
    rewind(f);
    char *data = calloc(*ret_n + 1, 1);
    assert_non_null(data);
    assert_int_equal(fread(data, 1, *ret_n, f), *ret_n);
    fclose(f);
    return data;
}

static inline FILE *narrow_create(const char *dir, const char *name)
{
    char path[512];

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    return f;
}

/* The tensor whose entry begins at `at`; returns where the next one does, or NULL. */
static inline const char *narrow_parse(const char *at, struct narrow_tensor *t)
{
    long long first, end;
    int used = 0;

    memset(t, 0, sizeof(*t));
    if (sscanf(at, "\"%127[^\"]\":{\"dtype\":\"%7[^\"]\",\"shape\":[%n", t->name, t->dtype,
               &used) != 2) {
        return NULL;
    }
    for (at += used; *at != ']'; at += *at == ',') {
        assert_true(t->n_dims < NARROW_DIMS);
        t->dim[t->n_dims++] = strtoll(at, (char **)&at, 10);
    }
    assert_int_equal(sscanf(at, "],\"data_offsets\":[%lld,%lld]}%n", &first, &end, &used), 2);
    t->first = first;
    t->end = end;
    at += used;
    return at + (*at == ',');
}

static inline int64_t narrow_extent(const struct narrowing *n, int64_t extent)
{
    for (size_t i = 0; i < ARRAY_LEN(n->extent) && n->extent[i].from > 0; i++) {
        if (n->extent[i].from == extent) {
            return n->extent[i].to;
        }
    }
    return extent;
}

/* Copy the beginning of the axes from d on; returns the bytes written. */
static inline int64_t narrow_copy(char *to, const char *from, const struct narrow_tensor *was,
                                  const struct narrow_tensor *is, int32_t d, int64_t element)
{
    int64_t inner = element, n = 0;

    for (int32_t i = d + 1; i < was->n_dims; i++) {
        inner *= was->dim[i];
    }
    if (d == was->n_dims) {
        memcpy(to, from, (size_t)element);
        return element;
    }
    for (int64_t i = 0; i < is->dim[d]; i++) {
        n += narrow_copy(to + n, from + i * inner, was, is, d + 1, element);
    }
    return n;
}

/* The tensor's values and its entry, if it is of an MLP narrower, to both. */
static inline void narrow_add(const struct narrowing *n, const struct narrow_tensor *t,
                              const char *values, char *header, char *data, int64_t *at)
{
    struct narrow_tensor is = *t;
    bool shape = strstr(t->name, "weight_shape") != NULL;
    bool mlp =
        strstr(t->name, ".mlp.") && !strstr(t->name, "router") && !strstr(t->name, "mlp.gate.");
    int64_t elements = 1, first = *at;
    size_t len = strlen(header);

    for (int32_t i = 0; i < t->n_dims; i++) {
        elements *= t->dim[i];
        is.dim[i] = mlp && !shape ? narrow_extent(n, t->dim[i]) : t->dim[i];
    }
    *at += narrow_copy(data + first, values + t->first, t, &is, 0, (t->end - t->first) / elements);
    for (int64_t i = 0; i < elements && mlp && shape; i++) {
        int64_t extent;
        memcpy(&extent, data + first + i * 8, sizeof(extent));
        extent = narrow_extent(n, extent);
        memcpy(data + first + i * 8, &extent, sizeof(extent));
    }
    len += (size_t)snprintf(header + len, NARROW_HEADER - len,
                            "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[", len > 1 ? "," : "", t->name,
                            t->dtype);
    for (int32_t i = 0; i < t->n_dims; i++) {
        len += (size_t)snprintf(header + len, NARROW_HEADER - len, "%s%lld", i ? "," : "",
                                (long long)is.dim[i]);
    }
    snprintf(header + len, NARROW_HEADER - len, "],\"data_offsets\":[%lld,%lld]}", (long long)first,
             (long long)*at);
}

static inline void narrow_weights(const struct narrowing *n, const char *golden, const char *dir)
{
    static char header[NARROW_HEADER];
    size_t size;
    uint64_t length;
    char *file = narrow_read(golden, "model.safetensors", &size), *data = calloc(size, 1);
    struct narrow_tensor t;
    int64_t at = 0;

    memcpy(&length, file, sizeof(length));
    strcpy(header, "{");
    for (const char *entry = file + 9; (entry = narrow_parse(entry, &t)) != NULL;) {
        if (strcmp(t.name, "__metadata__") != 0) {
            narrow_add(n, &t, file + 8 + length, header, data, &at);
        }
    }
    strcat(header, "}");
    while (strlen(header) % 8 != 0) {
        strcat(header, " ");
    }
    length = strlen(header);
    FILE *f = narrow_create(dir, "model.safetensors");
    fwrite(&length, sizeof(length), 1, f);
    fwrite(header, 1, length, f);
    fwrite(data, 1, (size_t)at, f);
    assert_int_equal(fclose(f), 0);
    free(file);
    free(data);
}

static inline void narrow_config(const struct narrowing *n, const char *golden, const char *dir)
{
    size_t size;
    char *text = narrow_read(golden, "config.json", &size);
    FILE *f = narrow_create(dir, "config.json");

    for (const char *at = text; *at;) {
        size_t i = 0;
        while (i < ARRAY_LEN(n->text) && n->text[i].from &&
               strncmp(at, n->text[i].from, strlen(n->text[i].from)) != 0) {
            i++;
        }
        bool found = i < ARRAY_LEN(n->text) && n->text[i].from;
        fputs(found ? n->text[i].to : (const char[]){*at, 0}, f);
        at += found ? strlen(n->text[i].from) : 1;
    }
    assert_int_equal(fclose(f), 0);
    free(text);
}

/* Write the golden into a new directory, whose name goes to dir[64]. */
static inline void narrow_golden(const struct narrowing *n, const char *golden, char *dir)
{
    snprintf(dir, 64, "/tmp/quire-narrower-XXXXXX");
    assert_non_null(mkdtemp(dir));
    narrow_weights(n, golden, dir);
    narrow_config(n, golden, dir);
}

static inline void narrow_remove(const char *dir)
{
    static const char *const FILES[] = {"model.safetensors", "config.json"};
    char path[512];

    for (size_t i = 0; i < ARRAY_LEN(FILES); i++) {
        snprintf(path, sizeof(path), "%s/%s", dir, FILES[i]);
        unlink(path);
    }
    assert_int_equal(rmdir(dir), 0);
}

#endif
