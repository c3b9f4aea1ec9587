/* What $ref names: schemas by URI ($id, $anchor), and by JSON pointer (RFC 6901) inside
 * them. Nothing is fetched: a reference that leaves the document is refused. URIs are
 * resolved as in RFC 3986, section 5. */
#include <string.h>

#include "engine/constrain/json_schema/schema.h"

/* ---- text ---- */

/* a[0, n_a) followed by b[0, n_b). */
static const char *join(struct schema *s, const char *a, size_t n_a, const char *b, size_t n_b)
{
    char *text = schema_alloc(s, n_a + n_b + 1, 1);

    if (text) {
        memcpy(text, a, n_a);
        memcpy(text + n_a, b, n_b);
    }
    return text;
}

/* Bytes of "scheme:" in front of a URI; 0: it is relative. */
static size_t scheme_len(const char *uri)
{
    size_t n = strspn(uri, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-.");

    return n > 0 && uri[n] == ':' ? n + 1 : 0;
}

/* Bytes of a URI in front of its path: scheme and authority. */
static size_t authority_end(const char *uri)
{
    size_t n = scheme_len(uri);

    if (strncmp(uri + n, "//", 2) == 0) {
        n += 2;
        n += strcspn(uri + n, "/?#");
    }
    return n;
}

/* Resolve "." and ".." in the path that begins at `path`. */
static void remove_dots(char *path)
{
    char *out = path;

    for (const char *in = path; *in;) {
        size_t n = strcspn(in + 1, "/") + 1;
        if (*in == '/' && (n == 2 && in[1] == '.')) {
            out += in[n] ? 0 : 1;
        } else if (*in == '/' && n == 3 && in[1] == '.' && in[2] == '.') {
            while (out > path && *--out != '/') {
            }
            out += in[n] ? 0 : 1;
        } else {
            memmove(out, in, n);
            out += n;
        }
        in += n;
    }
    *out = '\0';
}

/* A reference [n] without its fragment, seen from the URI `base`. */
static const char *resolve_uri(struct schema *s, const char *base, const char *ref, size_t n)
{
    size_t keep = strcspn(base, "#"), path = authority_end(base);

    if (scheme_len(ref) > 0 && scheme_len(ref) <= n) {
        return join(s, "", 0, ref, n);
    }
    if (n == 0) {
        return join(s, base, keep, "", 0);
    }
    if (n >= 2 && ref[0] == '/' && ref[1] == '/') {
        return join(s, base, scheme_len(base), ref, n);
    }
    keep = path;
    if (ref[0] != '/') {
        size_t end = path + strcspn(base + path, "?#");
        for (size_t i = path; i < end; i++) {
            keep = base[i] == '/' ? i + 1 : keep;
        }
        if (keep == path && path > 0 && base[path - 1] != ':') {
            base = join(s, base, path, "/", 1);
            keep = path + 1;
        }
    }
    char *text = base ? (char *)join(s, base, keep, ref, n) : NULL;
    if (text && text[path] == '/') {
        remove_dots(text + path);
    }
    return text;
}

/* ---- collecting ---- */

/* Where schemas are inside a schema. */
enum holds { HOLDS_NONE, HOLDS_SCHEMA, HOLDS_LIST, HOLDS_MAP, HOLDS_EITHER };

static enum holds held_by(const struct value *keyword)
{
    static const struct {
        const char *name;
        enum holds holds;
    } TABLE[] = {
        {"properties", HOLDS_MAP},
        {"patternProperties", HOLDS_MAP},
        {"$defs", HOLDS_MAP},
        {"definitions", HOLDS_MAP},
        {"dependentSchemas", HOLDS_MAP},
        {"dependencies", HOLDS_MAP},
        {"allOf", HOLDS_LIST},
        {"anyOf", HOLDS_LIST},
        {"oneOf", HOLDS_LIST},
        {"prefixItems", HOLDS_LIST},
        {"items", HOLDS_EITHER},
        {"additionalItems", HOLDS_SCHEMA},
        {"unevaluatedItems", HOLDS_SCHEMA},
        {"contains", HOLDS_SCHEMA},
        {"additionalProperties", HOLDS_SCHEMA},
        {"unevaluatedProperties", HOLDS_SCHEMA},
        {"propertyNames", HOLDS_SCHEMA},
        {"not", HOLDS_SCHEMA},
        {"if", HOLDS_SCHEMA},
        {"then", HOLDS_SCHEMA},
        {"else", HOLDS_SCHEMA},
    };

    for (size_t i = 0; i < ARRAY_LEN(TABLE); i++) {
        if (doc_is(keyword, TABLE[i].name)) {
            return TABLE[i].holds;
        }
    }
    return HOLDS_NONE;
}

static void add_anchor(struct schema *s, const char *uri, const struct value *v)
{
    if (!uri) {
        return;
    }
    if (s->n_anchors == s->anchors_cap) {
        int32_t cap = MAX(16, 2 * s->anchors_cap);
        struct anchor *grown = schema_alloc(s, (size_t)cap, sizeof(*grown));
        if (!grown) {
            return;
        }
        if (s->n_anchors > 0) {
            memcpy(grown, s->anchors, (size_t)s->n_anchors * sizeof(*grown));
        }
        s->anchors = grown;
        s->anchors_cap = cap;
    }
    s->anchors[s->n_anchors++] = (struct anchor){uri, v};
}

static const char *base_uri(const struct value *base)
{
    return base ? base->text : "";
}

static const struct value *id_of(const struct schema *s, const struct value *v)
{
    const struct value *id = doc_get(v, s->draft == 3 || s->draft == 4 ? "id" : "$id");

    if (!id || id->type != V_STRING || (s->draft > 0 && s->draft <= 7 && doc_get(v, "$ref"))) {
        return NULL;
    }
    return id;
}

/* Enter what the schema `v` is called, and return the base of what it holds: a string
 * of its URI. */
static const struct value *enter_names(struct schema *s, const struct value *v,
                                       const struct value *base)
{
    const struct value *id = id_of(s, v);
    static const char *const NAMES[] = {"$anchor", "$dynamicAnchor"};

    if (id && id->text[0] == '#') {
        add_anchor(s, join(s, base_uri(base), strlen(base_uri(base)), id->text, strlen(id->text)),
                   v);
    } else if (id) {
        struct value *named = schema_alloc(s, 1, sizeof(*named));
        const char *uri = resolve_uri(s, base_uri(base), id->text, strcspn(id->text, "#"));
        if (!named || !uri) {
            return base;
        }
        named->type = V_STRING;
        named->text = uri;
        base = named;
        add_anchor(s, uri, v);
    }
    for (size_t i = 0; i < ARRAY_LEN(NAMES); i++) {
        const struct value *name = doc_get(v, NAMES[i]);
        if (name && name->type == V_STRING) {
            const char *uri = join(s, base_uri(base), strlen(base_uri(base)), "#", 1);
            add_anchor(s, uri ? join(s, uri, strlen(uri), name->text, strlen(name->text)) : NULL,
                       v);
        }
    }
    return base;
}

/* As deep as the document. */
static void collect(struct schema *s, const struct value *v, const struct value *base)
{
    if (v->type != V_OBJECT || !grammar_build_work(s->b, 1)) {
        return;
    }
    base = enter_names(s, v, base);
    ((struct value *)v)->base = base;
    for (int32_t i = 0; i < v->n; i++) {
        const struct value *item = v->item[i];
        enum holds holds = held_by(v->name[i]);
        if (holds == HOLDS_SCHEMA || (holds == HOLDS_EITHER && item->type == V_OBJECT)) {
            collect(s, item, base);
        } else if (holds != HOLDS_NONE && item->type == (holds == HOLDS_MAP ? V_OBJECT : V_ARRAY)) {
            for (int32_t k = 0; k < item->n; k++) {
                collect(s, item->item[k], base);
            }
        }
    }
}

void refs_collect(struct schema *s)
{
    collect(s, s->root, NULL);
}

/* ---- resolving ---- */

static int hex(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

/* The next token of a JSON pointer in a fragment, decoded; *at is behind it. */
static const struct value *pointer_token(struct schema *s, const char **at)
{
    size_t n = strcspn(*at, "/"), len = 0;
    const char *in = *at;
    struct value *token = schema_alloc(s, 1, sizeof(*token));
    char *text = schema_alloc(s, n + 1, 1);

    *at += n;
    if (!token || !text) {
        return NULL;
    }
    for (size_t i = 0; i < n; i++) {
        char c = in[i];
        if (c == '%' && i + 2 < n && hex(in[i + 1]) >= 0 && hex(in[i + 2]) >= 0) {
            c = (char)(hex(in[i + 1]) * 16 + hex(in[i + 2]));
            i += 2;
        }
        text[len++] = c;
    }
    size_t out = 0;
    for (size_t i = 0; i < len; i++) {
        bool escape = text[i] == '~' && i + 1 < len && (text[i + 1] == '0' || text[i + 1] == '1');
        text[out++] = escape ? (text[i + 1] == '0' ? '~' : '/') : text[i];
        i += escape ? 1 : 0;
    }
    text[out] = '\0';
    token->type = V_STRING;
    token->text = text;
    token->n = (int32_t)out;
    return token;
}

static const struct value *pointer_step(struct schema *s, const struct value *v,
                                        const struct value *token)
{
    if (v->type == V_OBJECT && grammar_build_work(s->b, 1 + v->n / 8)) {
        for (int32_t i = 0; i < v->n; i++) {
            if (v->name[i]->n == token->n &&
                memcmp(v->name[i]->text, token->text, (size_t)token->n) == 0) {
                return v->item[i];
            }
        }
    }
    if (v->type == V_ARRAY && token->n > 0 && token->n < 7 &&
        strspn(token->text, "0123456789") == (size_t)token->n) {
        int32_t index = 0;
        for (int32_t i = 0; i < token->n; i++) {
            index = index * 10 + (token->text[i] - '0');
        }
        return index < v->n ? v->item[index] : NULL;
    }
    return NULL;
}

/* The value at a JSON pointer under a schema. What collect did not reach gets its base
 * from the schemas on the way. */
static const struct value *follow(struct schema *s, const struct value *v, const char *pointer)
{
    const struct value *base = v->base;

    while (v && *pointer == '/') {
        pointer++;
        const struct value *token = pointer_token(s, &pointer);
        v = token ? pointer_step(s, v, token) : NULL;
        if (v && v->type == V_OBJECT) {
            base = v->base ? v->base : base;
        }
    }
    if (v && v->type == V_OBJECT && !v->base && base) {
        collect(s, v, base);
    }
    return v;
}

static const struct value *find_anchor(const struct schema *s, const char *uri)
{
    for (int32_t i = 0; i < s->n_anchors; i++) {
        if (strcmp(s->anchors[i].uri, uri) == 0) {
            return s->anchors[i].value;
        }
    }
    return NULL;
}

static void *leaves(struct schema *s, const struct value *ref)
{
    grammar_build_fail(s->b, ERR_UNSUPPORTED,
                       "schema: the reference '%.200s' names nothing in the schema", ref->text);
    return NULL;
}

/* Whether a $dynamicRef means what $ref would: its anchor is not dynamic, or there is
 * one dynamic anchor of that name. */
static bool is_static(struct schema *s, const struct value *target, const char *name)
{
    const struct value *own = doc_get(target, "$dynamicAnchor");
    int32_t n = 0;

    if (!own || own->type != V_STRING || !doc_is(own, name)) {
        return true;
    }
    for (int32_t i = 0; i < s->n_values; i++) {
        const struct value *a =
            s->values[i]->type == V_OBJECT ? doc_get(s->values[i], "$dynamicAnchor") : NULL;
        n += a && a->type == V_STRING && doc_is(a, name);
    }
    return n == 1;
}

const struct value *refs_resolve(struct schema *s, const struct value *from,
                                 const struct value *ref, bool dynamic)
{
    if (ref->type != V_STRING) {
        return schema_invalid(s, "$ref", "a URI");
    }
    size_t n = strcspn(ref->text, "#");
    const char *fragment = ref->text[n] == '#' ? ref->text + n + 1 : "";
    const char *uri = resolve_uri(s, base_uri(from->base), ref->text, n);
    if (!uri) {
        return NULL;
    }
    const struct value *v = find_anchor(s, uri);
    bool is_root = strcmp(uri, base_uri(s->root->base)) == 0 || (n == 0 && !from->base);
    v = v ? v : is_root ? s->root : NULL;
    if (v && *fragment == '/') {
        v = follow(s, v, fragment);
    } else if (*fragment) {
        const char *named = join(s, uri, strlen(uri), "#", 1);
        named = named ? join(s, named, strlen(named), fragment, strlen(fragment)) : NULL;
        v = named ? find_anchor(s, named) : NULL;
    }
    if (!v) {
        return leaves(s, ref);
    }
    if (dynamic && *fragment != '/' && !is_static(s, v, fragment)) {
        return schema_refuse(s, "$dynamicRef", "where several schemas have its anchor");
    }
    return v;
}
