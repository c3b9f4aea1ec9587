/* Every pair of every golden GGUF file's metadata, and every tensor of its directory,
 * changed one at a time: what does not fit is refused with one line before anything
 * computes, and what is served computes.
 *
 * Of the changes one in a few is tried, always the same ones; QUIRE_TEST_WHOLE=1 tries
 * all. QUIRE_TEST_ONLY names one golden. */
#include "tests/unit/changed_model.h"

#include <dirent.h>
#include <math.h>

#include "models/checkpoint/gguf/gguf.h"

enum { ONE_OF = 40, MAX_PARTS = 512, HEAD = 24, ALIGN = 32 };

/* A pair or a tensor in the file: its key is at `at`, the rest of it at `value`. */
struct part {
    size_t at, value, end;
};

struct file {
    const char *golden;
    struct buf all;
    struct part pair[MAX_PARTS], tensor[MAX_PARTS];
    uint64_t n_pairs, n_tensors;
    size_t data; /* where the tensors' values begin */
};

static uint64_t u64_at(const struct file *f, size_t at)
{
    uint64_t n;

    memcpy(&n, f->all.data + at, 8);
    return n;
}

static uint32_t u32_at(const struct file *f, size_t at)
{
    uint32_t n;

    memcpy(&n, f->all.data + at, 4);
    return n;
}

/* Bytes of a number; 0: a text or an array. */
static size_t width(uint32_t type)
{
    static const size_t WIDTH[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

    assert_true(type < ARRAY_LEN(WIDTH));
    return WIDTH[type];
}

/* Where the value of a type that begins at `at` ends. */
static size_t value_end(const struct file *f, uint32_t type, size_t at)
{
    if (type == GGUF_STRING) {
        return at + 8 + (size_t)u64_at(f, at);
    }
    if (type != GGUF_ARRAY) {
        return at + width(type);
    }
    uint32_t item = u32_at(f, at);
    uint64_t n = u64_at(f, at + 4);
    at += 12;
    for (uint64_t i = 0; i < n; i++) {
        at = value_end(f, item, at);
    }
    return at;
}

static void open_file(struct file *f, const char *golden)
{
    char dir[300];
    size_t at = HEAD;

    *f = (struct file){.golden = golden};
    snprintf(dir, sizeof(dir), "tests/golden/%s", golden);
    changed_read(&f->all, dir, "model.gguf");
    f->n_tensors = u64_at(f, 8), f->n_pairs = u64_at(f, 16);
    assert_true(f->n_tensors <= MAX_PARTS && f->n_pairs <= MAX_PARTS);
    for (uint64_t i = 0; i < f->n_pairs; i++) {
        size_t value = at + 8 + (size_t)u64_at(f, at);
        f->pair[i] = (struct part){at, value, value_end(f, u32_at(f, value), value + 4)};
        at = f->pair[i].end;
    }
    for (uint64_t i = 0; i < f->n_tensors; i++) {
        size_t value = at + 8 + (size_t)u64_at(f, at);
        f->tensor[i] = (struct part){at, value, value + 4 + 8 * u32_at(f, value) + 12};
        at = f->tensor[i].end;
    }
    f->data = (at + ALIGN - 1) / ALIGN * ALIGN;
}

/* Tries the file with `value` in place of [at, end). */
static void try_file(const struct file *f, const struct part *p, size_t at, size_t end,
                     const void *value, size_t n, const char *what)
{
    size_t directory = f->n_tensors ? f->tensor[f->n_tensors - 1].end : f->data;
    struct buf b;

    if (!changed_due()) {
        return;
    }
    snprintf(changed.what, sizeof(changed.what), "%s: %.*s -> %s", f->golden,
             (int)MIN(p->value - p->at - 8, (size_t)100), f->all.data + p->at + 8, what);
    buf_init(&b, 64 << 20);
    buf_append(&b, f->all.data, at);
    buf_append(&b, value, n);
    buf_append(&b, f->all.data + end, directory - end);
    while (b.len % ALIGN) {
        buf_putc(&b, 0);
    }
    buf_append(&b, f->all.data + f->data, f->all.len - f->data);
    assert_false(b.failed);
    changed_write("model.gguf", b.data, b.len);
    buf_release(&b);
    char path[96];
    snprintf(path, sizeof(path), "%s/model.gguf", changed.dir);
    changed_try(path, true);
}

/* ---- metadata ---- */

static void put(struct buf *b, const void *data, size_t n)
{
    buf_append(b, data, n);
}

static void put_u32(struct buf *b, uint32_t n)
{
    put(b, &n, 4);
}

/* A number as a value of a type. */
static void put_number(struct buf *b, uint32_t type, double real)
{
    int64_t whole = real >= 0x1p63 ? INT64_MAX : real <= -0x1p63 ? INT64_MIN : (int64_t)real;
    float narrow = (float)real;

    if (type == GGUF_STRING) {
        put(b, "\1\0\0\0\0\0\0\0x", 9);
    } else if (type == GGUF_F32) {
        put(b, &narrow, 4);
    } else if (type == GGUF_F64) {
        put(b, &real, 8);
    } else {
        put(b, &whole, width(type)); /* little endian */
    }
}

static const double NUMBERS[] = {0,      -1,     1,       2,   3,     1000, 65536,   2147483647.0,
                                 0x1p31, 0x1p62, -0x1p62, 0.5, 1e-30, 1e30, INFINITY};
static const uint32_t TYPES[] = {GGUF_U8,  GGUF_I8,   GGUF_U16,    GGUF_I16, GGUF_U32, GGUF_I32,
                                 GGUF_F32, GGUF_BOOL, GGUF_STRING, GGUF_U64, GGUF_I64, GGUF_F64};

static void change_numbers(const struct file *f, const struct part *p)
{
    struct buf b;
    char what[96];

    buf_init(&b, 1 << 20);
    for (size_t t = 0; t < ARRAY_LEN(TYPES); t++) {
        for (size_t i = 0; i < ARRAY_LEN(NUMBERS); i++) {
            buf_clear(&b);
            put_u32(&b, TYPES[t]);
            put_number(&b, TYPES[t], NUMBERS[i]);
            snprintf(what, sizeof(what), "type %u, %g", TYPES[t], NUMBERS[i]);
            try_file(f, p, p->value, p->end, b.data, b.len, what);
        }
    }
    buf_clear(&b);
    put_u32(&b, GGUF_F32);
    put_number(&b, GGUF_F32, NAN);
    try_file(f, p, p->value, p->end, b.data, b.len, "NaN");
    buf_release(&b);
}

/* Arrays of n items of each type; said: how many the file says there are. */
static void change_arrays(const struct file *f, const struct part *p)
{
    static const struct {
        uint64_t n, said;
    } LENGTHS[] = {{0, 0}, {1, 1}, {2, 2}, {3, 3}, {600, 600}, {1, 1ull << 62}, {1, UINT64_MAX}};
    struct buf b;
    char what[96];

    buf_init(&b, 1 << 20);
    for (size_t t = 0; t < ARRAY_LEN(TYPES); t++) {
        for (size_t i = 0; i < ARRAY_LEN(LENGTHS); i++) {
            buf_clear(&b);
            put_u32(&b, GGUF_ARRAY);
            put_u32(&b, TYPES[t]);
            put(&b, &LENGTHS[i].said, 8);
            for (uint64_t k = 0; k < LENGTHS[i].n; k++) {
                put_number(&b, TYPES[t], (double)(k % 3) - (t % 2));
            }
            snprintf(what, sizeof(what), "%llu of %llu items of type %u",
                     (unsigned long long)LENGTHS[i].n, (unsigned long long)LENGTHS[i].said,
                     TYPES[t]);
            try_file(f, p, p->value, p->end, b.data, b.len, what);
        }
    }
    buf_clear(&b);
    put_u32(&b, GGUF_ARRAY);
    put_u32(&b, GGUF_ARRAY);
    put(&b, "\0\0\0\0\0\0\0", 8);
    try_file(f, p, p->value, p->end, b.data, b.len, "an array of arrays");
    buf_release(&b);
}

/* An array that is there, one item shorter and one longer. */
static void change_length(const struct file *f, const struct part *p)
{
    size_t body = p->value + 4;
    uint64_t n;
    struct buf b;

    if (u32_at(f, p->value) != GGUF_ARRAY || width(u32_at(f, body)) == 0) {
        return;
    }
    size_t bytes = width(u32_at(f, body));
    n = u64_at(f, body + 4);
    for (uint64_t other = n > 0 ? n - 1 : 0; other <= n + 1; other += 2) {
        buf_init(&b, 1 << 20);
        buf_append(&b, f->all.data + p->value, 8);
        put(&b, &other, 8);
        buf_append(&b, f->all.data + body + 12, MIN(other, n) * bytes);
        if (other > n && n > 0) {
            buf_append(&b, f->all.data + p->end - bytes, bytes);
        }
        try_file(f, p, p->value, p->end, b.data, b.len, other < n ? "shorter" : "longer");
        buf_release(&b);
    }
}

/* ---- tensors ---- */

static void change_tensor(const struct file *f, const struct part *p)
{
    uint32_t n_dims = u32_at(f, p->value);
    size_t dims = p->value + 4, encoding = dims + 8 * n_dims, offset = encoding + 4;
    static const uint64_t SIZES[] = {0, 1, 2, 7, 1000, 1ull << 31, 1ull << 62, UINT64_MAX};
    static const uint64_t OFFSETS[] = {0, 1, 32, 1ull << 20, 1ull << 62, UINT64_MAX - 31};
    char what[96];

    for (uint32_t e = 0; e <= 40; e++) {
        snprintf(what, sizeof(what), "encoding %u", e);
        try_file(f, p, encoding, offset, &e, 4, what);
    }
    for (uint32_t d = 0; d < n_dims; d++) {
        uint64_t now = u64_at(f, dims + 8 * d);
        for (size_t i = 0; i < ARRAY_LEN(SIZES) + 3; i++) {
            const uint64_t near[] = {now + 1, now - 1, now * 2};
            uint64_t size = i < 3 ? near[i] : SIZES[i - 3];
            snprintf(what, sizeof(what), "axis %u of %llu", d, (unsigned long long)size);
            try_file(f, p, dims + 8 * d, dims + 8 * d + 8, &size, 8, what);
        }
    }
    for (size_t i = 0; i < ARRAY_LEN(OFFSETS); i++) {
        snprintf(what, sizeof(what), "at %llu", (unsigned long long)OFFSETS[i]);
        try_file(f, p, offset, offset + 8, &OFFSETS[i], 8, what);
    }
    if (n_dims == 2) {
        const uint64_t turned[] = {u64_at(f, dims + 8), u64_at(f, dims)};
        try_file(f, p, dims, dims + 16, turned, 16, "turned");
    }
    for (uint32_t n = 0; n <= 5; n++) {
        snprintf(what, sizeof(what), "%u axes", n);
        try_file(f, p, p->value, dims, &n, 4, what);
    }
    try_file(f, p, p->at + 8, p->at + 9, "?", 1, "another name");
}

/* ---- goldens ---- */

static int is_golden(const struct dirent *d)
{
    const char *only = getenv("QUIRE_TEST_ONLY");
    char path[300];

    snprintf(path, sizeof(path), "tests/golden/%s/model.gguf", d->d_name);
    return d->d_name[0] != '.' && strncmp(d->d_name, "gguf-", 5) != 0 && access(path, R_OK) == 0 &&
           (!only || strcmp(only, d->d_name) == 0);
}

static void change_goldens(void (*change)(const struct file *f))
{
    static struct file f;
    struct dirent **golden;
    int n = scandir("tests/golden", &golden, is_golden, alphasort);

    assert_true(n >= 1);
    for (int i = 0; i < n; i++) {
        char path[300];
        snprintf(path, sizeof(path), "tests/golden/%s/model.gguf", golden[i]->d_name);
        changed_serve(path);
        open_file(&f, golden[i]->d_name);
        change(&f);
        buf_release(&f.all);
        free(golden[i]);
    }
    free(golden);
    assert_int_equal(changed.wrong, 0);
}

static void change_metadata(const struct file *f)
{
    for (uint64_t i = 0; i < f->n_pairs; i++) {
        change_numbers(f, &f->pair[i]);
        change_arrays(f, &f->pair[i]);
        change_length(f, &f->pair[i]);
        try_file(f, &f->pair[i], f->pair[i].at + 8, f->pair[i].at + 9, "?", 1, "another key");
    }
}

static void change_directory(const struct file *f)
{
    for (uint64_t i = 0; i < f->n_tensors; i++) {
        change_tensor(f, &f->tensor[i]);
    }
}

static void changed_metadata_is_refused_by_a_line_or_served(void **state)
{
    (void)state;
    change_goldens(change_metadata);
}

static void changed_tensors_are_refused_by_a_line_or_served(void **state)
{
    (void)state;
    change_goldens(change_directory);
}

static int begin(void **state)
{
    (void)state;
    return changed_begin(ONE_OF);
}

static int end(void **state)
{
    (void)state;
    return changed_end();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(changed_metadata_is_refused_by_a_line_or_served, begin,
                                        end),
        cmocka_unit_test_setup_teardown(changed_tensors_are_refused_by_a_line_or_served, begin,
                                        end),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
