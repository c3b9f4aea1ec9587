/* Every value of every golden's config.json, and every tensor in the header of its
 * weights, changed one at a time: what does not fit is refused with one line before
 * anything computes, and what is served computes.
 *
 * Of the changes one in a few is tried, always the same ones; QUIRE_TEST_WHOLE=1 tries
 * all. QUIRE_TEST_ONLY names one golden. */
#include "tests/unit/changed_model.h"

#include <dirent.h>

enum { ONE_OF_CONFIG = 24, ONE_OF_HEADER = 8, MAX_SPANS = 1 << 14 };

/* ---- the values of a text of JSON ---- */

/* A value, and the member or array that it stands in. */
struct span {
    size_t key, at, end; /* key: where the member's name begins, or the value's beginning */
};

struct text {
    const char *data;
    size_t at;
    struct span span[MAX_SPANS];
    int n;
};

static void skip_blank(struct text *t)
{
    t->at += strspn(t->data + t->at, " \t\r\n");
}

static void skip_string(struct text *t)
{
    for (t->at++; t->data[t->at] != '"'; t->at++) {
        t->at += t->data[t->at] == '\\';
    }
    t->at++;
}

/* Past a value, whose members and items are added to the spans. */
static void walk(struct text *t)
{
    char open = t->data[t->at];

    if (open == '"') {
        skip_string(t);
    } else if (open != '{' && open != '[') {
        t->at += strcspn(t->data + t->at, ",]} \t\r\n");
    } else {
        t->at++;
        skip_blank(t);
        while (t->data[t->at] != '}' && t->data[t->at] != ']') {
            size_t key = t->at;
            if (open == '{') {
                skip_string(t);
                t->at += strcspn(t->data + t->at, ":") + 1;
                skip_blank(t);
            }
            assert_true(t->n < MAX_SPANS);
            struct span *s = &t->span[t->n++];
            *s = (struct span){key, t->at, 0};
            walk(t);
            s->end = t->at;
            skip_blank(t);
            t->at += t->data[t->at] == ',';
            skip_blank(t);
        }
        t->at++;
    }
}

/* ---- changes ---- */

static const char *const VALUES[] = {"0",
                                     "-1",
                                     "1",
                                     "2",
                                     "3",
                                     "7",
                                     "1000",
                                     "65536",
                                     "1048576",
                                     "2147483647",
                                     "2147483648",
                                     "4611686018427387904",
                                     "-4611686018427387904",
                                     "9223372036854775808",
                                     "0.5",
                                     "-0.5",
                                     "1e-30",
                                     "1e30",
                                     "1e400",
                                     "NaN",
                                     "Infinity",
                                     "\"x\"",
                                     "\"\"",
                                     "null",
                                     "[]",
                                     "[0]",
                                     "[[]]",
                                     "{}",
                                     "{\"a\":1}",
                                     "true",
                                     "false"};

/* Tries the golden with `value` in place of [s->at, s->end). */
static void try_config(const char *golden, const struct buf *text, const struct span *s,
                       const char *value)
{
    struct buf b;

    if (!changed_due()) {
        return;
    }
    snprintf(changed.what, sizeof(changed.what), "%s: %.*s -> %.80s", golden,
             (int)MIN(s->end - s->key, (size_t)100), text->data + s->key, value);
    buf_init(&b, 64 << 20);
    buf_append(&b, text->data, s->at);
    buf_puts(&b, value);
    buf_append(&b, text->data + s->end, text->len - s->end);
    assert_false(b.failed);
    changed_write("config.json", b.data, b.len);
    buf_release(&b);
    changed_try(changed.dir, false);
}

/* Numbers that are near the one that is there. */
static void try_near(const char *golden, const struct buf *text, const struct span *s)
{
    char *end, value[64];
    double given = strtod(text->data + s->at, &end);
    const double near[] = {given + 1, given - 1, given * 2, given / 2};

    if (end != text->data + s->end) {
        return;
    }
    for (size_t i = 0; i < ARRAY_LEN(near); i++) {
        snprintf(value, sizeof(value), "%.17g", near[i]);
        try_config(golden, text, s, value);
    }
}

/* Arrays of one item more or less, and of very many. */
static void try_lengths(const char *golden, const struct buf *text, const struct span *s)
{
    const char *at = text->data + s->at;
    size_t len = s->end - s->at, last;
    struct buf b;

    if (at[0] != '[' || !strchr(at, ',')) {
        return;
    }
    for (last = len - 1; last > 0 && at[last] != ','; last--) {
    }
    buf_init(&b, 64 << 20);
    buf_printf(&b, "%.*s]%c", (int)MAX(last, (size_t)1), at, '\0');
    try_config(golden, text, s, b.data);
    for (int many = 1; many <= 4096; many *= 64) {
        buf_clear(&b);
        buf_append(&b, at, len - 1);
        for (int i = 0; i < many; i++) {
            buf_append(&b, last ? at + last : ",0", last ? len - 1 - last : 2);
        }
        buf_append(&b, "]", 2);
        try_config(golden, text, s, b.data);
    }
    buf_release(&b);
}

static void change_config(const char *golden, const struct buf *text)
{
    static struct text t;

    t = (struct text){.data = text->data};
    skip_blank(&t);
    walk(&t);
    for (int i = 0; i < t.n; i++) {
        for (size_t k = 0; k < ARRAY_LEN(VALUES); k++) {
            try_config(golden, text, &t.span[i], VALUES[k]);
        }
        try_near(golden, text, &t.span[i]);
        try_lengths(golden, text, &t.span[i]);
    }
    changed_write("config.json", text->data, text->len);
}

/* ---- the header of the weights ---- */

/* Tries the golden with [at, end) of the header replaced, padded with blanks to its old
 * length, so that the data stays where it is; a longer one is not tried. */
static void try_header(const char *golden, const struct buf *file, size_t at, size_t end,
                       const char *value)
{
    const char *slash = strrchr(golden, '/');

    size_t len = strlen(value);

    if (!changed_due() || len > end - at) {
        return;
    }
    char *copy = malloc(file->len);
    assert_non_null(copy);
    memcpy(copy, file->data, file->len);
    memset(copy + at, ' ', end - at);
    memcpy(copy + at, value, len);
    snprintf(changed.what, sizeof(changed.what), "%s: %.*s -> %s", golden,
             (int)MIN(end - at, (size_t)120), file->data + at, value);
    changed_write(slash + 1, copy, file->len);
    free(copy);
    changed_try(changed.dir, false);
}

/* One tensor's entry: its type, shape and name. */
static void change_entry(const char *golden, const struct buf *file, const struct span *s)
{
    static const char *const TYPES[] = {"F32", "F16", "BF16", "I8", "U8", "I32", "F8", "X"};
    static const char *const WORDS[] = {"[]", "[0]", "{}", "7"};
    const char *entry = file->data + s->at;
    size_t shape = (size_t)(strstr(entry, "\"shape\":") + 8 - file->data);
    size_t type = (size_t)(strstr(entry, "\"dtype\":") + 9 - file->data);
    size_t shape_end = shape + strcspn(file->data + shape, "]") + 1;
    long a = 0, b = 0, c = 0;
    int n = sscanf(file->data + shape, "[%ld,%ld,%ld", &a, &b, &c);
    char value[96];

    for (size_t i = 0; i < ARRAY_LEN(TYPES); i++) {
        size_t end = type + strcspn(file->data + type, "\"");
        try_header(golden, file, type, end, TYPES[i]);
    }
    const long other[][2] = {{b, a}, {a, 0}, {0, b}, {a * b, 1}, {1, a * b}, {a - 1, b}, {-1, -b}};
    for (size_t i = 0; i < ARRAY_LEN(other) && n == 2; i++) {
        snprintf(value, sizeof(value), "[%ld,%ld]", other[i][0], other[i][1]);
        try_header(golden, file, shape, shape_end, value);
    }
    for (size_t i = 0; i < ARRAY_LEN(WORDS); i++) {
        try_header(golden, file, shape, shape_end, WORDS[i]);
    }
    /* another name: the tensor is missing, and one is there that is not known */
    file->data[s->key + 1] ^= 1;
    try_header(golden, file, s->at, s->at, "");
    file->data[s->key + 1] ^= 1;
}

static void change_header(const char *golden, const struct buf *file)
{
    static struct text t;
    uint64_t len;
    struct buf head;

    memcpy(&len, file->data, 8);
    buf_init(&head, 64 << 20);
    buf_append(&head, file->data + 8, (size_t)len);
    buf_putc(&head, '\0');
    t = (struct text){.data = head.data};
    walk(&t);
    for (int i = 0; i < t.n; i++) {
        struct span s = {t.span[i].key + 8, t.span[i].at + 8, t.span[i].end + 8};
        if (file->data[s.key] == '"' && file->data[s.at] == '{' &&
            strncmp(file->data + s.key, "\"__metadata__", 13) != 0) {
            change_entry(golden, file, &s);
        }
    }
    buf_release(&head);
}

/* ---- goldens ---- */

static int is_golden(const struct dirent *d)
{
    const char *only = getenv("QUIRE_TEST_ONLY");
    char path[300];

    snprintf(path, sizeof(path), "tests/golden/%s/config.json", d->d_name);
    return d->d_name[0] != '.' && access(path, R_OK) == 0 &&
           (!only || strcmp(only, d->d_name) == 0);
}

static int is_weights(const struct dirent *d)
{
    if (strcmp(d->d_name, "hf_quant_config.json") == 0) {
        return true;
    }
    return strncmp(d->d_name, "model", 5) == 0 && strstr(d->d_name, ".safetensors");
}

/* Calls `each` for every file of weights in a directory. */
static void each_file(const char *golden, const char *dir,
                      void (*each)(const char *golden, const char *dir, const char *name))
{
    struct dirent **file;
    int n = scandir(dir, &file, is_weights, alphasort);

    for (int i = 0; i < n; i++) {
        each(golden, dir, file[i]->d_name);
        free(file[i]);
    }
    free(file);
}

static void drop_file(const char *golden, const char *dir, const char *name)
{
    char path[600];

    (void)golden;
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    unlink(path);
}

static void copy_file(const char *golden, const char *dir, const char *name)
{
    struct buf data;

    (void)golden;
    changed_read(&data, dir, name);
    changed_write(name, data.data, data.len);
    buf_release(&data);
}

static void change_file(const char *golden, const char *dir, const char *name)
{
    struct buf data;
    char called[600];

    if (strstr(name, ".json")) {
        return;
    }
    snprintf(called, sizeof(called), "%s/%s", golden, name);
    changed_read(&data, dir, name);
    change_header(called, &data);
    changed_write(name, data.data, data.len);
    buf_release(&data);
}

static void change_golden(const char *name, bool headers)
{
    struct buf config;
    char dir[300];

    snprintf(dir, sizeof(dir), "tests/golden/%s", name);
    changed_read(&config, dir, "config.json");
    buf_putc(&config, '\0');
    config.len--;
    changed_write("config.json", config.data, config.len);
    each_file(name, changed.dir, drop_file);
    each_file(name, dir, copy_file);
    print_message("%s\n", name);
    changed_serve(changed.dir);
    if (headers) {
        each_file(name, dir, change_file);
    } else {
        change_config(name, &config);
    }
    buf_release(&config);
}

static void change_goldens(bool headers)
{
    struct dirent **golden;
    int n = scandir("tests/golden", &golden, is_golden, alphasort);

    assert_true(n >= 1);
    for (int i = 0; i < n; i++) {
        change_golden(golden[i]->d_name, headers);
        free(golden[i]);
    }
    free(golden);
    assert_int_equal(changed.wrong, 0);
}

static void a_changed_configuration_is_refused_by_a_line_or_served(void **state)
{
    (void)state;
    change_goldens(false);
}

static void changed_tensors_are_refused_by_a_line_or_served(void **state)
{
    (void)state;
    change_goldens(true);
}

static int begin_config(void **state)
{
    (void)state;
    return changed_begin(ONE_OF_CONFIG);
}

static int begin_header(void **state)
{
    (void)state;
    return changed_begin(ONE_OF_HEADER);
}

static int end(void **state)
{
    (void)state;
    return changed_end();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_changed_configuration_is_refused_by_a_line_or_served,
                                        begin_config, end),
        cmocka_unit_test_setup_teardown(changed_tensors_are_refused_by_a_line_or_served,
                                        begin_header, end),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
