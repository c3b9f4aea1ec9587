/* Typed reads of a GGUF file's metadata by key; gguf.c has checked all lengths. */
#include <string.h>

#include "models/checkpoint/gguf/gguf.h"

static float get_f32(const uint8_t *p)
{
    uint32_t v = gguf_u32(p);
    float f;

    memcpy(&f, &v, sizeof(f));
    return f;
}

static double get_f64(const uint8_t *p)
{
    uint64_t v = gguf_u64(p);
    double f;

    memcpy(&f, &v, sizeof(f));
    return f;
}

struct gguf_text gguf_next_string(const uint8_t **at)
{
    struct gguf_text t = {(const char *)*at + 8, (size_t)gguf_u64(*at)};

    *at += 8 + t.len;
    return t;
}

static int wrong_type(const struct gguf *g, const char *key, const char *want, struct err *e)
{
    return err_set(e, ERR_INVALID, "%s: %s must be %s", g->file, key, want);
}

int gguf_int(const struct gguf *g, const char *key, int64_t *ret, struct err *e)
{
    const struct gguf_pair *p = gguf_find(g, key);

    if (!p) {
        return 0;
    }
    switch (p->type) {
    case GGUF_U8:
        *ret = p->at[0];
        return 1;
    case GGUF_I8:
        *ret = (int8_t)p->at[0];
        return 1;
    case GGUF_U16:
        *ret = p->at[0] | p->at[1] << 8;
        return 1;
    case GGUF_I16:
        *ret = (int16_t)(p->at[0] | p->at[1] << 8);
        return 1;
    case GGUF_U32:
        *ret = gguf_u32(p->at);
        return 1;
    case GGUF_I32:
        *ret = (int32_t)gguf_u32(p->at);
        return 1;
    case GGUF_U64:
        if (gguf_u64(p->at) > INT64_MAX) {
            return wrong_type(g, key, "less than 2^63", e);
        }
        *ret = (int64_t)gguf_u64(p->at);
        return 1;
    case GGUF_I64:
        *ret = (int64_t)gguf_u64(p->at);
        return 1;
    default:
        return wrong_type(g, key, "a whole number", e);
    }
}

int gguf_real(const struct gguf *g, const char *key, double *ret, struct err *e)
{
    const struct gguf_pair *p = gguf_find(g, key);

    if (!p) {
        return 0;
    }
    if (p->type != GGUF_F32 && p->type != GGUF_F64) {
        return wrong_type(g, key, "a floating-point number", e);
    }
    *ret = p->type == GGUF_F32 ? (double)get_f32(p->at) : get_f64(p->at);
    return 1;
}

int gguf_bool(const struct gguf *g, const char *key, bool *ret, struct err *e)
{
    const struct gguf_pair *p = gguf_find(g, key);

    if (!p) {
        return 0;
    }
    if (p->type != GGUF_BOOL) {
        return wrong_type(g, key, "a bool", e);
    }
    *ret = p->at[0];
    return 1;
}

int gguf_string(const struct gguf *g, const char *key, struct gguf_text *ret, struct err *e)
{
    const struct gguf_pair *p = gguf_find(g, key);

    if (!p) {
        return 0;
    }
    if (p->type != GGUF_STRING) {
        return wrong_type(g, key, "a string", e);
    }
    const uint8_t *at = p->at;
    *ret = gguf_next_string(&at);
    return 1;
}

int gguf_array(const struct gguf *g, const char *key, enum gguf_type item,
               const struct gguf_pair **ret, struct err *e)
{
    const struct gguf_pair *p = gguf_find(g, key);

    if (!p) {
        return 0;
    }
    if (p->type != GGUF_ARRAY || p->item != item) {
        return wrong_type(g, key,
                          item == GGUF_STRING ? "an array of strings"
                          : item == GGUF_F32  ? "an array of 32-bit floats"
                                              : "an array of 32-bit integers",
                          e);
    }
    *ret = p;
    return 1;
}

int32_t gguf_item_i32(const struct gguf_pair *p, uint64_t i)
{
    return (int32_t)gguf_u32(p->at + 4 * i);
}

float gguf_item_f32(const struct gguf_pair *p, uint64_t i)
{
    return get_f32(p->at + 4 * i);
}
