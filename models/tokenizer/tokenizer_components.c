/* The normalizer, pre-tokenizer, post-processor and decoder of tokenizer.json, each one
 * component or a "Sequence" of them.
 *
 * A component is a flat object. All fields that any type of component has are read into
 * one struct, of which the component's type then says which are used.
 */
#include "models/tokenizer/tokenizer_internal.h"

#include <stdlib.h>
#include <string.h>

enum { NAME_BYTES = 128, TEMPLATE_NAMES = 16, TEMPLATE_IDS = 8 };

/* A special token of TemplateProcessing and its ids. */
struct template_name {
    char name[NAME_BYTES];
    int32_t id[TEMPLATE_IDS];
    int32_t n;
};

struct component {
    char type[32], behavior[32], scheme[16];
    char pattern[TOKENIZER_PATTERN_BYTES];
    size_t pattern_len;
    bool is_regex, have_pattern;
    char content[256], prepend[256], replacement[16];
    size_t content_len, prepend_len;
    int64_t start, stop;
    bool invert, add_prefix_space, have_prefix_space, use_regex, individual, split, left, right;
    /* Post-processors. */
    char before[TEMPLATE_NAMES][NAME_BYTES], after[TEMPLATE_NAMES][NAME_BYTES];
    int32_t n_before, n_after, n_names;
    struct template_name name[TEMPLATE_NAMES];
    int32_t cls, sep;
};

typedef void (*component_fn)(struct json *j, const struct component *c, void *ctx);

/* ---- reading ---- */

static void read_pattern(struct json *j, struct component *c)
{
    c->have_pattern = true;
    if (json_peek(j) == JSON_STRING) {
        json_read_string(j, c->pattern, sizeof(c->pattern), &c->pattern_len);
        return;
    }
    json_enter_object(j);
    while (json_next_member(j)) {
        c->is_regex = json_key_is(j, "Regex");
        json_read_string(j, c->pattern, sizeof(c->pattern), &c->pattern_len);
    }
}

/* "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}, ...] */
static void read_template(struct json *j, struct component *c)
{
    bool behind = false;

    json_enter_array(j);
    while (json_next_element(j)) {
        json_enter_object(j);
        while (json_next_member(j)) {
            bool sequence = json_key_is(j, "Sequence");
            char name[NAME_BYTES] = "";
            json_enter_object(j);
            while (json_next_member(j)) {
                if (json_key_is(j, "id")) {
                    json_read_string(j, name, sizeof(name), NULL);
                } else {
                    json_skip(j);
                }
            }
            int32_t *n = behind ? &c->n_after : &c->n_before;
            if (sequence) {
                behind = true;
            } else if (*n == TEMPLATE_NAMES) {
                json_fail(j, "a template of more than %d special tokens", TEMPLATE_NAMES);
            } else {
                memcpy(behind ? c->after[(*n)++] : c->before[(*n)++], name, sizeof(name));
            }
        }
    }
}

/* "special_tokens": {"<s>": {"ids": [1], ...}} */
static void read_template_names(struct json *j, struct component *c)
{
    json_enter_object(j);
    while (json_next_member(j)) {
        if (c->n_names == TEMPLATE_NAMES || j->key_len >= NAME_BYTES) {
            json_fail(j,
                      "more than %d special tokens in a template, or a longer name than %d bytes",
                      TEMPLATE_NAMES, NAME_BYTES - 1);
            return;
        }
        struct template_name *t = &c->name[c->n_names++];
        memcpy(t->name, j->key, j->key_len + 1);
        json_enter_object(j);
        while (json_next_member(j)) {
            if (!json_key_is(j, "ids")) {
                json_skip(j);
                continue;
            }
            json_enter_array(j);
            while (json_next_element(j)) {
                int64_t id = -1;
                if (json_read_int(j, &id) &&
                    (t->n == TEMPLATE_IDS || id < 0 || id >= LIMIT_VOCAB)) {
                    json_fail(
                        j, "a template's special token has more than %d ids, or one that is no id",
                        TEMPLATE_IDS);
                } else if (!j->failed) {
                    t->id[t->n++] = (int32_t)id;
                }
            }
        }
    }
}

/* ["</s>", 2] */
static int32_t read_named_id(struct json *j)
{
    int64_t id = -1;

    json_enter_array(j);
    if (json_next_element(j) && json_skip(j) && json_next_element(j) && json_read_int(j, &id) &&
        json_next_element(j)) {
        json_fail(j, "a name and an id expected");
    }
    if (!j->failed && (id < 0 || id >= LIMIT_VOCAB)) {
        json_fail(j, "%lld is no token id", (long long)id);
    }
    return (int32_t)id;
}

static void read_component(struct json *j, component_fn fn, void *ctx);

static void read_list(struct json *j, component_fn fn, void *ctx)
{
    json_enter_array(j);
    while (json_next_element(j)) {
        read_component(j, fn, ctx);
    }
}

static bool read_string_field(struct json *j, struct component *c)
{
    struct {
        const char *key;
        char *text;
        size_t cap, *len;
    } field[] = {{"type", c->type, sizeof(c->type), NULL},
                 {"behavior", c->behavior, sizeof(c->behavior), NULL},
                 {"prepend_scheme", c->scheme, sizeof(c->scheme), NULL},
                 {"content", c->content, sizeof(c->content), &c->content_len},
                 {"prepend", c->prepend, sizeof(c->prepend), &c->prepend_len},
                 {"replacement", c->replacement, sizeof(c->replacement), NULL}};

    for (size_t i = 0; i < ARRAY_LEN(field); i++) {
        if (json_key_is(j, field[i].key)) {
            json_read_string(j, field[i].text, field[i].cap, field[i].len);
            return true;
        }
    }
    return false;
}

static bool read_bool_field(struct json *j, struct component *c)
{
    struct {
        const char *key;
        bool *value;
    } field[] = {{"invert", &c->invert},       {"add_prefix_space", &c->add_prefix_space},
                 {"use_regex", &c->use_regex}, {"individual_digits", &c->individual},
                 {"split", &c->split},         {"strip_left", &c->left},
                 {"strip_right", &c->right}};

    for (size_t i = 0; i < ARRAY_LEN(field); i++) {
        if (json_key_is(j, field[i].key)) {
            json_read_bool(j, field[i].value);
            c->have_prefix_space |= field[i].value == &c->add_prefix_space;
            return true;
        }
    }
    return false;
}

static void read_other_field(struct json *j, struct component *c, component_fn fn, void *ctx)
{
    if (json_key_is(j, "pattern")) {
        read_pattern(j, c);
    } else if (json_key_is(j, "normalizers") || json_key_is(j, "pretokenizers") ||
               json_key_is(j, "processors") || json_key_is(j, "decoders")) {
        read_list(j, fn, ctx);
    } else if (json_key_is(j, "single")) {
        read_template(j, c);
    } else if (json_key_is(j, "special_tokens")) {
        read_template_names(j, c);
    } else if (json_key_is(j, "cls")) {
        c->cls = read_named_id(j);
    } else if (json_key_is(j, "sep")) {
        c->sep = read_named_id(j);
    } else if (json_key_is(j, "start")) {
        json_read_int(j, &c->start);
    } else if (json_key_is(j, "stop")) {
        json_read_int(j, &c->stop);
    } else {
        json_skip(j);
    }
}

static void read_component(struct json *j, component_fn fn, void *ctx)
{
    struct component *c = calloc(1, sizeof(*c)); /* too large for a recursive stack frame */

    if (!c) {
        json_fail_nomem(j, "a tokenizer's component");
        return;
    }
    c->use_regex = c->split = true;
    c->cls = c->sep = -1;
    json_enter_object(j);
    while (json_next_member(j)) {
        if (json_peek(j) == JSON_NULL) {
            json_skip(j);
        } else if (!read_string_field(j, c) && !read_bool_field(j, c)) {
            read_other_field(j, c, fn, ctx);
        }
    }
    if (!j->failed && strcmp(c->type, "Sequence") != 0) {
        fn(j, c, ctx);
    }
    free(c);
}

static void read_components(struct json *j, component_fn fn, void *ctx)
{
    if (json_peek(j) == JSON_NULL) {
        json_skip(j);
    } else {
        read_component(j, fn, ctx);
    }
}

static bool type_is(const struct component *c, const char *type)
{
    return strcmp(c->type, type) == 0;
}

/* Report an error of compiling or allocating as an error of the file. */
static void check(struct json *j, int rc, const struct err *e)
{
    if (rc != 0) {
        json_fail_with(j, e);
    }
}

static void compile(struct json *j, const struct component *c, struct pattern *p)
{
    struct err e = {0};

    check(j,
          c->is_regex ? pattern_compile(p, c->pattern, c->pattern_len, &e)
                      : pattern_literal(p, c->pattern, c->pattern_len, &e),
          &e);
}

/* ---- normalizer ---- */

static void set_text(struct json *j, struct normal *n, const char *text, size_t len)
{
    n->text = malloc(len + 1);
    if (!n->text) {
        json_fail_nomem(j, "a normalizer");
        return;
    }
    memcpy(n->text, text, len + 1);
    n->text_len = len;
}

static void add_normalizer(struct json *j, const struct component *c, void *ctx)
{
    static const struct {
        const char *type;
        enum normal_kind kind;
    } KINDS[] = {{"NFC", NORMAL_NFC},
                 {"NFD", NORMAL_NFD},
                 {"NFKC", NORMAL_NFKC},
                 {"NFKD", NORMAL_NFKD},
                 {"Lowercase", NORMAL_LOWERCASE},
                 {"Strip", NORMAL_STRIP},
                 {"StripAccents", NORMAL_STRIP_ACCENTS},
                 {"Prepend", NORMAL_PREPEND},
                 {"Replace", NORMAL_REPLACE}};
    struct tokenizer *t = ctx;
    size_t i = 0;

    while (i < ARRAY_LEN(KINDS) && !type_is(c, KINDS[i].type)) {
        i++;
    }
    if (i == ARRAY_LEN(KINDS) || t->n_normal == TOKENIZER_STAGES) {
        json_fail(j,
                  i == ARRAY_LEN(KINDS) ? "the normalizer \"%s\" is not supported"
                                        : "too many normalizers (at \"%s\")",
                  c->type);
        return;
    }
    struct normal *n = &t->normal[t->n_normal++];
    n->kind = KINDS[i].kind;
    n->left = c->left;
    n->right = c->right;
    if (n->kind == NORMAL_PREPEND) {
        set_text(j, n, c->prepend, c->prepend_len);
    }
    if (n->kind == NORMAL_REPLACE) {
        set_text(j, n, c->content, c->content_len);
        compile(j, c, &n->pattern);
    }
}

void read_normalizer(struct json *j, struct tokenizer *t)
{
    read_components(j, add_normalizer, t);
}

/* ---- pre-tokenizer ---- */

static struct stage *add_stage(struct json *j, struct tokenizer *t, enum stage_kind kind)
{
    if (t->bpe.byte_level) {
        json_fail(j, "a pre-tokenizer after ByteLevel is not supported");
        return NULL;
    }
    if (t->n_stages == TOKENIZER_STAGES) {
        json_fail(j, "more than %d pre-tokenizers", TOKENIZER_STAGES);
        return NULL;
    }
    struct stage *s = &t->stage[t->n_stages++];
    s->kind = kind;
    s->behavior = SPLIT_ISOLATED;
    return s;
}

static void set_behavior(struct json *j, const struct component *c, struct stage *s)
{
    static const char *const NAMES[] = {"Removed", "Isolated", "MergedWithPrevious",
                                        "MergedWithNext", "Contiguous"};

    for (size_t i = 0; i < ARRAY_LEN(NAMES); i++) {
        if (strcmp(c->behavior, NAMES[i]) == 0) {
            s->behavior = (enum split_behavior)i;
            return;
        }
    }
    if (c->behavior[0]) {
        json_fail(j, "the split behavior \"%s\" is not known", c->behavior);
    }
}

static void add_regex_stage(struct json *j, struct tokenizer *t, const char *regex)
{
    struct stage *s = add_stage(j, t, STAGE_SPLIT);
    struct err e = {0};

    if (s) {
        check(j, pattern_compile(&s->pattern, regex, strlen(regex), &e), &e);
    }
}

static void add_class_stage(struct json *j, const struct component *c, struct tokenizer *t,
                            bool (*is_match)(int32_t c), enum split_behavior behavior)
{
    struct stage *s = add_stage(j, t, STAGE_CLASS);

    if (!s) {
        return;
    }
    s->is_match = is_match;
    s->behavior = behavior;
    set_behavior(j, c, s);
}

static enum prepend_scheme scheme_of(struct json *j, const struct component *c)
{
    if (strcmp(c->scheme, "never") == 0) {
        return PREPEND_NEVER;
    }
    if (strcmp(c->scheme, "first") == 0) {
        return PREPEND_FIRST;
    }
    if (c->scheme[0] && strcmp(c->scheme, "always") != 0) {
        json_fail(j, "the prepend_scheme \"%s\" is not known", c->scheme);
    }
    /* Older files have add_prefix_space instead. */
    return !c->scheme[0] && c->have_prefix_space && !c->add_prefix_space ? PREPEND_NEVER
                                                                         : PREPEND_ALWAYS;
}

static void add_metaspace(struct json *j, const struct component *c, struct tokenizer *t)
{
    struct stage *s = add_stage(j, t, STAGE_METASPACE);
    size_t len = strlen(c->replacement);

    if (!s) {
        return;
    }
    if (len == 0 || len > 4) {
        json_fail(j, "Metaspace needs a replacement of one character");
        return;
    }
    memcpy(s->replacement, c->replacement, len);
    s->replacement_len = (uint8_t)len;
    s->prepend = scheme_of(j, c);
    s->split = c->split;
}

static void add_byte_level(struct json *j, const struct component *c, struct tokenizer *t)
{
    if (c->add_prefix_space && !add_stage(j, t, STAGE_PREFIX_SPACE)) {
        return;
    }
    if (c->use_regex) {
        add_regex_stage(j, t, GPT2_PATTERN);
    }
    t->bpe.byte_level = true;
}

static void add_pre_tokenizer(struct json *j, const struct component *c, void *ctx)
{
    struct tokenizer *t = ctx;

    if (type_is(c, "ByteLevel")) {
        add_byte_level(j, c, t);
    } else if (type_is(c, "Split")) {
        struct stage *s = add_stage(j, t, STAGE_SPLIT);
        if (!s) {
            return;
        }
        s->invert = c->invert;
        set_behavior(j, c, s);
        compile(j, c, &s->pattern);
    } else if (type_is(c, "Digits")) {
        add_class_stage(j, c, t, char_is_number, c->individual ? SPLIT_ISOLATED : SPLIT_CONTIGUOUS);
    } else if (type_is(c, "Punctuation")) {
        add_class_stage(j, c, t, char_is_punctuation, SPLIT_ISOLATED);
    } else if (type_is(c, "WhitespaceSplit")) {
        add_class_stage(j, c, t, char_is_space, SPLIT_REMOVED);
    } else if (type_is(c, "Whitespace")) { /* \w+|[^\w\s]+ */
        add_class_stage(j, c, t, char_is_space, SPLIT_REMOVED);
        add_class_stage(j, c, t, char_is_word, SPLIT_CONTIGUOUS);
    } else if (type_is(c, "Metaspace")) {
        add_metaspace(j, c, t);
    } else {
        json_fail(j, "the pre-tokenizer \"%s\" is not supported", c->type);
    }
}

void read_pre_tokenizer(struct json *j, struct tokenizer *t)
{
    read_components(j, add_pre_tokenizer, t);
}

/* ---- post-processor ---- */

static void put_ids(struct json *j, const struct component *c, const char names[][NAME_BYTES],
                    int32_t n_names, int32_t *ret, int32_t *ret_n)
{
    int32_t n = 0;

    for (int32_t i = 0; i < n_names; i++) {
        int32_t k = 0;
        while (k < c->n_names && strcmp(c->name[k].name, names[i]) != 0) {
            k++;
        }
        if (k == c->n_names || n + c->name[k].n > TOKENIZER_TEMPLATE) {
            json_fail(
                j, "the template's token \"%s\" has no ids in special_tokens, or there are over %d",
                names[i], TOKENIZER_TEMPLATE);
            return;
        }
        memcpy(ret + n, c->name[k].id, (size_t)c->name[k].n * sizeof(*ret));
        n += c->name[k].n;
    }
    *ret_n = n;
}

static void add_post_processor(struct json *j, const struct component *c, void *ctx)
{
    struct tokenizer *t = ctx;

    if (type_is(c, "TemplateProcessing")) {
        put_ids(j, c, c->before, c->n_before, t->prefix, &t->n_prefix);
        put_ids(j, c, c->after, c->n_after, t->suffix, &t->n_suffix);
    } else if (type_is(c, "RobertaProcessing") || type_is(c, "BertProcessing")) {
        if (c->cls < 0 || c->sep < 0) {
            json_fail(j, "%s needs \"cls\" and \"sep\"", c->type);
            return;
        }
        t->prefix[0] = c->cls;
        t->suffix[0] = c->sep;
        t->n_prefix = t->n_suffix = 1;
    } else if (!type_is(c, "ByteLevel")) { /* ByteLevel changes only offsets */
        json_fail(j, "the post-processor \"%s\" is not supported", c->type);
    }
}

void read_post_processor(struct json *j, struct tokenizer *t)
{
    read_components(j, add_post_processor, t);
}

/* ---- decoder ---- */

static void add_decoder(struct json *j, const struct component *c, void *ctx)
{
    static const char *const TYPES[] = {"ByteLevel", "Replace", "ByteFallback",
                                        "Fuse",      "Strip",   "Metaspace"};
    struct decoder *d = ctx;
    size_t i = 0;

    while (i < ARRAY_LEN(TYPES) && !type_is(c, TYPES[i])) {
        i++;
    }
    if (i == ARRAY_LEN(TYPES) || d->n == TOKENIZER_STAGES) {
        json_fail(j,
                  i == ARRAY_LEN(TYPES) ? "the decoder \"%s\" is not supported"
                                        : "too many decoders (at \"%s\")",
                  c->type);
        return;
    }
    struct decoder_step *s = &d->step[d->n++];
    s->kind = (int)i;
    const char *from = s->kind == DECODER_METASPACE ? c->replacement
                       : s->kind == DECODER_STRIP   ? c->content
                                                    : c->pattern;
    const char *to = s->kind == DECODER_METASPACE ? " " : c->content;
    if (c->is_regex || strlen(from) >= sizeof(s->from) || strlen(to) >= sizeof(s->to) ||
        c->start < 0 || c->start > 1 || c->stop != 0) {
        json_fail(j, "this form of the decoder \"%s\" is not supported", c->type);
        return;
    }
    memcpy(s->from, from, strlen(from) + 1);
    memcpy(s->to, to, strlen(to) + 1);
    s->start = (int32_t)c->start;
    s->keep_first = s->kind == DECODER_METASPACE && scheme_of(j, c) == PREPEND_NEVER;
}

void read_decoder(struct json *j, struct decoder *d)
{
    read_components(j, add_decoder, d);
}
