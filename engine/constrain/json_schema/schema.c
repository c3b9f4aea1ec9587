#include "engine/constrain/json_schema/schema.h"

#include <stdlib.h>
#include <string.h>

/* ---- memory ---- */

struct chunk {
    struct chunk *next;
    size_t at, size; /* bytes of data in use, and in all */
    max_align_t data[];
};

enum { CHUNK_BYTES = 16 * 1024 };

void *schema_alloc(struct schema *s, size_t n, size_t size)
{
    size_t bytes = (MAX(n * size, 1) + 15) & ~(size_t)15;
    struct chunk *c = s->chunks;

    if (grammar_build_failed(s->b)) {
        return NULL;
    }
    if (n > SCHEMA_BYTES / size || s->bytes + bytes > SCHEMA_BYTES) {
        grammar_build_fail(s->b, ERR_INVALID, "schema: it takes more than %d MB to compile",
                           SCHEMA_BYTES >> 20);
        return NULL;
    }
    if (!c || c->size - c->at < bytes) {
        size_t room = MAX(bytes, (size_t)CHUNK_BYTES);
        c = calloc(1, sizeof(*c) + room);
        if (!c) {
            grammar_build_fail(s->b, ERR_NOMEM, "out of memory: schema");
            return NULL;
        }
        c->size = room;
        c->next = s->chunks;
        s->chunks = c;
    }
    void *p = (char *)c->data + c->at;
    c->at += bytes;
    s->bytes += bytes;
    return p;
}

static void release(struct schema *s)
{
    for (struct chunk *c = s->chunks, *next; c; c = next) {
        next = c->next;
        free(c);
    }
}

/* ---- errors ---- */

void *schema_refuse(struct schema *s, const char *keyword, const char *why)
{
    grammar_build_fail(s->b, ERR_UNSUPPORTED, "schema: the keyword '%s' cannot be enforced%s%s",
                       keyword, why ? " " : "", why ? why : "");
    return NULL;
}

void *schema_invalid(struct schema *s, const char *keyword, const char *want)
{
    grammar_build_fail(s->b, ERR_INVALID, "schema: the keyword '%s' takes %s", keyword, want);
    return NULL;
}

/* ---- the front end ---- */

/* The draft that $schema names; 0: none, or one that is not known. */
static int find_draft(const struct value *root)
{
    static const struct {
        const char *part;
        int draft;
    } DRAFTS[] = {{"/draft-03/", 3}, {"/draft-04/", 4},         {"/draft-06/", 6},
                  {"/draft-07/", 7}, {"/draft/2019-09/", 2019}, {"/draft/2020-12/", 2020}};
    const struct value *name = doc_get(root, "$schema");

    for (size_t i = 0; name && name->type == V_STRING && i < ARRAY_LEN(DRAFTS); i++) {
        if (strstr(name->text, "json-schema.org") && strstr(name->text, DRAFTS[i].part)) {
            return DRAFTS[i].draft;
        }
    }
    return 0;
}

/* Every value and none, as shapes. */
static void make_bounds(struct schema *s)
{
    struct shape *all = schema_alloc(s, 1, sizeof(*all)), *none = schema_alloc(s, 1, sizeof(*none));
    struct array_set *array = schema_alloc(s, 1, sizeof(*array));
    struct object_set *object = schema_alloc(s, 1, sizeof(*object));
    struct cell *cell = schema_alloc(s, 1, sizeof(*cell));
    const struct array_set **arrays = schema_alloc(s, 1, sizeof(*arrays));
    const struct object_set **objects = schema_alloc(s, 1, sizeof(*objects));

    if (!all || !none || !array || !object || !cell || !arrays || !objects) {
        return;
    }
    *array = (struct array_set){.max = -1};
    *cell = (struct cell){s->any, CONJ_TRUE};
    *object = (struct object_set){.cell = cell, .n_cells = 1, .max = -1};
    *arrays = array;
    *objects = object;
    *all = (struct shape){.null = true,
                          .no = true,
                          .yes = true,
                          .number = number_all(s),
                          .string = {.rx = s->any},
                          .array = arrays,
                          .object = objects,
                          .n_arrays = 1,
                          .n_objects = 1};
    *none = (struct shape){.number = number_none(s), .string = {.rx = s->never}};
    s->all = all;
    s->none = none;
}

static bool prepare(struct schema *s)
{
    s->any = rx_any(s->b);
    s->never = rx_never(s->b);
    number_constants(s);
    make_bounds(s);
    s->conj = schema_alloc(s, SCHEMA_CONJUNCTIONS, sizeof(*s->conj));
    s->conj_table = schema_alloc(s, 4 * (size_t)SCHEMA_CONJUNCTIONS, sizeof(*s->conj_table));
    s->queue = schema_alloc(s, SCHEMA_CONJUNCTIONS, sizeof(*s->queue));
    s->n_conj = 2;
    emit_constants(s);
    return !grammar_build_failed(s->b);
}

sym_id json_schema_build(struct grammar_builder *b, const char *schema, size_t len)
{
    struct schema s = {.b = b};
    sym_id start = 0;

    if (prepare(&s) && doc_read(&s, schema, len)) {
        s.draft = find_draft(s.root);
        refs_collect(&s);
        conj_id root = conj_of(&s, (struct literal){.value = s.root});
        start = emit_conj(&s, root);
        emit_queue(&s);
        if (!start) {
            grammar_build_fail(b, ERR_INVALID, "schema: no value satisfies it");
        }
    }
    release(&s);
    return grammar_build_failed(b) ? 0 : start;
}
