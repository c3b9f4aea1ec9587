/* Schemas, expressions and grammars made to cost: each is compiled or refused in one
 * sentence, within the processor time and the memory that the limits for clients' text
 * promise, and leaks nothing; a state of what was compiled stays small. */
#include "tests/unit/nomem.h"

#include <string.h>
#include <time.h>

#include "config/base/buf.h"
#include "tests/unit/byte_vocab.h"

/* What may be allocated beyond the limit's bytes: of the front ends' reading, which
 * ends with the compilation, and the allocator's rounding. */
enum { SLACK_BYTES = 1 << 20 };
/* Work is counted, and its limit takes far less than this: only a loop that charges
 * nothing can take so long. */
enum { LATEST_US = 400000 };

static int open_both(void **state)
{
    struct grammar_limits l;
    struct grammar *g;
    struct err e = {0};
    int rc = open_vocab(state);

    if (rc == 0) { /* Unicode's categories are tables of the process, made when first used */
        grammar_limits_init(&l);
        rc = grammar_new(&g, vocab, GRAMMAR_REGEX, "\\pL", 3, &l, &e);
        grammar_unref(rc == 0 ? g : NULL);
    }
    return rc;
}

/* Processor time of the thread, which others on the machine do not add to. */
static int64_t cpu_us(void)
{
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

/* ---- the table ---- */

/* A text: `head`, `each` n times, `middle`, `close` n times, `tail`. In `each`, ~ is
 * the number of the repetition from 0, and @ that of the next one. */
struct hostile {
    const char *name;
    enum grammar_kind kind;
    bool refused; /* else it may be compiled */
    int n;
    const char *head, *each, *middle, *close, *tail;
};

#define SCHEMA GRAMMAR_JSON_SCHEMA
#define REGEX GRAMMAR_REGEX
#define LARK GRAMMAR_LARK
#define CHOICE GRAMMAR_CHOICE

static const struct hostile ROWS[] = {
    /* nesting */
    {"brackets", SCHEMA, true, 20000, "", "[", "", "]", ""},
    {"open brackets", SCHEMA, true, 400000, "", "[", "", "", ""},
    {"open objects", SCHEMA, true, 50000, "", "{\"a\":", "", "", ""},
    {"items in items", SCHEMA, true, 20000, "", "{\"items\":", "{}", "}", ""},
    {"not in not", SCHEMA, true, 20000, "", "{\"not\":", "{}", "}", ""},
    {"allOf in allOf", SCHEMA, true, 10000, "", "{\"allOf\":[", "{}", "]}", ""},
    {"properties in properties", SCHEMA, true, 5000, "", "{\"properties\":{\"a\":", "{}", "}}", ""},
    {"a quote without end", SCHEMA, true, 500000, "{\"title\":\"", "a", "", "", ""},
    {"ten megabytes", SCHEMA, true, 10 << 20, "{\"title\":\"", "a", "\"}", "", ""},
    {"a long description", SCHEMA, false, 500000, "{\"description\":\"", "a", "\"}", "", ""},
    /* numbers */
    {"minItems", SCHEMA, false, 0, "{\"items\":{\"type\":\"string\"},\"minItems\":999999999,", "",
     "\"maxItems\":1000000000000}", "", ""},
    {"maxItems in maxItems", SCHEMA, false, 60, "", "{\"maxItems\":100000,\"items\":", "{}", "}",
     ""},
    {"minLength", SCHEMA, false, 0, "{\"type\":\"string\",\"minLength\":100000000}", "", "", "",
     ""},
    {"maxLength", SCHEMA, false, 0, "{\"type\":\"string\",\"maxLength\":1000000000}", "", "", "",
     ""},
    {"a number of many digits", SCHEMA, false, 200000, "{\"minimum\":1", "0", "}", "", ""},
    {"a large exponent", SCHEMA, true, 0, "{\"minimum\":1e999999999}", "", "", "", ""},
    {"multipleOf a tiny number", SCHEMA, false, 0, "{\"multipleOf\":1e-300}", "", "", "", ""},
    {"many multiples", SCHEMA, false, 300, "{\"allOf\":[{}",
     ",{\"type\":\"integer\",\"multipleOf\":1~7}", "]}", "", ""},
    /* many */
    {"enum", SCHEMA, false, 30000, "{\"enum\":[0", ",\"x~\"", "]}", "", ""},
    {"enum of objects", SCHEMA, false, 5000, "{\"enum\":[0", ",{\"a\":{\"b\":~}}", "]}", "", ""},
    {"properties", SCHEMA, false, 10000, "{\"properties\":{\"a\":{}",
     ",\"p~\":{\"type\":\"string\"}", "}}", "", ""},
    {"required", SCHEMA, false, 20000, "{\"required\":[\"a\"", ",\"p~\"", "]}", "", ""},
    {"prefixItems and contains", SCHEMA, false, 5000,
     "{\"contains\":{\"const\":1},\"prefixItems\":[{}", ",{\"minimum\":~}", "]}", "", ""},
    {"maxProperties", SCHEMA, false, 300, "{\"maxProperties\":150,\"properties\":{\"a\":{}",
     ",\"p~\":{}", "}}", "", ""},
    {"dependencies", SCHEMA, false, 2000, "{\"dependentRequired\":{\"a\":[]", ",\"p~\":[\"p@\"]",
     "}}", "", ""},
    /* what multiplies */
    {"allOf of anyOf", SCHEMA, true, 40, "{\"type\":\"object\",\"allOf\":[{}",
     ",{\"anyOf\":[{\"required\":[\"a~\"]},{\"required\":[\"b~\"]}]}", "]}", "", ""},
    {"oneOf", SCHEMA, true, 60, "{\"oneOf\":[{}",
     ",{\"properties\":{\"p~\":{\"minimum\":~},\"q\":{\"type\":\"string\"}}}", "]}", "", ""},
    {"not oneOf", SCHEMA, false, 60, "{\"not\":{\"oneOf\":[{}",
     ",{\"properties\":{\"p~\":{\"minimum\":~}}}", "]}}", "", ""},
    {"if in else", SCHEMA, false, 60, "",
     "{\"if\":{\"required\":[\"a~\"]},\"then\":{\"required\":[\"b~\"]},\"else\":", "{}", "}", ""},
    {"patternProperties", SCHEMA, false, 40, "{\"patternProperties\":{\"q\":{}",
     ",\"x~\":{\"minimum\":~}", "}}", "", ""},
    {"dependentSchemas", SCHEMA, false, 40, "{\"dependentSchemas\":{\"q\":{}",
     ",\"x~\":{\"properties\":{\"y\":{\"minimum\":~}}}", "}}", "", ""},
    {"uniqueItems of an enum", SCHEMA, false, 40, "{\"uniqueItems\":true,\"items\":{\"enum\":[0",
     ",\"v~\"", "]}}", "", ""},
    /* references */
    {"$ref to itself", SCHEMA, true, 0, "{\"$ref\":\"#\"}", "", "", "", ""},
    {"a ring of $ref", SCHEMA, true, 500, "{\"$ref\":\"#/$defs/d0\",\"$defs\":{\"z\":{}",
     ",\"d~\":{\"$ref\":\"#/$defs/d@\"}", ",\"d500\":{\"$ref\":\"#/$defs/d0\"}}}", "", ""},
    {"a chain of $ref", SCHEMA, false, 5000, "{\"$ref\":\"#/$defs/d0\",\"$defs\":{\"d5000\":{}",
     ",\"d~\":{\"properties\":{\"x\":{\"$ref\":\"#/$defs/d@\"}}}", "}}", "", ""},
    {"doubling by $ref", SCHEMA, false, 60,
     "{\"$ref\":\"#/$defs/d0\",\"$defs\":{\"d60\":{\"type\":\"null\"}",
     ",\"d~\":{\"type\":\"array\",\"prefixItems\":[{\"$ref\":\"#/$defs/d@\"},{\"$ref\":\"#/$defs/"
     "d@\"}],\"minItems\":2}",
     "}}", "", ""},
    {"allOf of itself and another", SCHEMA, false, 30,
     "{\"$ref\":\"#/$defs/d0\",\"$defs\":{\"d30\":{}",
     ",\"d~\":{\"allOf\":[{\"properties\":{\"x\":{\"$ref\":\"#/$defs/"
     "d@\"}}},{\"properties\":{\"x\":{\"$ref\":\"#/$defs/d0\"}}}]}",
     "}}", "", ""},
    {"no sentence", SCHEMA, true, 0,
     "{\"type\":\"object\",\"required\":[\"a\"],\"properties\":{\"a\":{\"$ref\":\"#\"}}}", "", "",
     "", ""},
    /* patterns */
    {"nested quantifiers in a pattern", SCHEMA, false, 0,
     "{\"type\":\"string\",\"pattern\":\"^((((a{1,999}){1,999}){1,999}){1,999}){1,999}$\"}", "", "",
     "", ""},
    {"a pattern of many", SCHEMA, false, 0,
     "{\"type\":\"string\",\"pattern\":\"^(a|b)*a(a|b){5000}$\"}", "", "", "", ""},
    {"patterns together", SCHEMA, false, 60, "{\"type\":\"string\",\"allOf\":[{}",
     ",{\"pattern\":\"a.{~}b\"}", "]}", "", ""},
    /* expressions */
    {"groups", REGEX, true, 20000, "", "(", "a", ")", ""},
    {"stars of stars", REGEX, false, 100, "", "(", "a", "*)*", ""},
    {"counts of counts", REGEX, false, 100, "", "(", "a", "{1,9}){1,9}", ""},
    {"a large count", REGEX, false, 0, "(a{1000000}b?){1000000}", "", "", "", ""},
    {"alternatives", REGEX, false, 50000, "x", "|abc~", "", "", ""},
    {"optional ones", REGEX, false, 20000, "", "a?", "", "a", ""},
    {"an exponential automaton", REGEX, false, 5000, "(a|b)*a", "(a|b)", "", "", ""},
    {"classes of Unicode", REGEX, false, 2000, "", "\\p{L}{9}[^\\p{N}]", "", "", ""},
    /* grammars */
    {"groups", LARK, true, 20000, "start: ", "(", "\"a\"", ")", ""},
    {"ambiguity", LARK, false, 2000, "start: \"a\"", "|start start", "", "", ""},
    {"rules", LARK, false, 20000, "start: r0\nr20000: \"x\"\n", "r~: \"a\" r@ | \"b\"\n", "", "",
     ""},
    {"optional rules", LARK, false, 20000, "start: a\na: \"x\"", " a?", "", "", ""},
    {"a rule of a large count", LARK, false, 0, "start: r{1000000}\nr: \"(\" r? \")\"", "", "", "",
     ""},
    /* choices */
    {"choices", CHOICE, false, 20000, "[\"a\"", ",\"abcdefghi~\"", "]", "", ""},
    {"brackets", CHOICE, true, 20000, "", "[", "", "]", ""},
};

static void put_numbered(struct buf *b, const char *text, int number)
{
    for (; *text; text++) {
        if (*text == '~' || *text == '@') {
            buf_printf(b, "%d", number + (*text == '@'));
        } else {
            buf_putc(b, *text);
        }
    }
}

static void write_text(struct buf *b, const struct hostile *h)
{
    buf_clear(b);
    buf_puts(b, h->head);
    for (int i = 0; i < h->n; i++) {
        put_numbered(b, h->each, i);
    }
    buf_puts(b, h->middle);
    for (int i = 0; i < h->n; i++) {
        buf_puts(b, h->close);
    }
    buf_puts(b, h->tail);
    assert_false(b->failed);
}

/* The first tokens of a text, the smallest that is allowed each time. */
static void generate(const struct hostile *h, struct grammar *g)
{
    uint32_t mask[N_IDS / 32 + 1];
    struct constraint *c;
    struct err e = {0};

    assert_int_equal(constraint_new(&c, g, &e), 0);
    for (int i = 0; i < 40 && constraint_mask(c, mask, &(int64_t){INT64_MAX}) == 0; i++) {
        int32_t id = 0;
        while (id < EOS && !(mask[id / 32] >> (id % 32) & 1)) {
            id++;
        }
        if (id == EOS || constraint_accept(c, id, &(int64_t){INT64_MAX}) != 0) {
            break;
        }
    }
    if (constraint_bytes(c) > 4096) {
        fail_msg("%s: a state of %zu bytes", h->name, constraint_bytes(c));
    }
    constraint_free(c);
}

static void try_row(const struct hostile *h, const struct buf *text)
{
    struct grammar_limits l;
    struct grammar *g = NULL;
    struct err e = {0};

    grammar_limits_init(&l);
    live = live_bytes = peak_bytes = 0;
    counting = true;
    int64_t start = cpu_us();
    int rc = grammar_new(&g, vocab, h->kind, text->data, text->len, &l, &e);
    int64_t took = cpu_us() - start;
    counting = false;
    print_message("%-32s %9zu bytes: %6lld us, %8ld bytes at most: %s\n", h->name, text->len,
                  (long long)took, peak_bytes, rc == 0 ? "compiled" : e.text);
    if (took > LATEST_US) {
        fail_msg("%s: %lld us", h->name, (long long)took);
    }
    if (peak_bytes > (long)l.bytes + SLACK_BYTES) {
        fail_msg("%s: %ld bytes", h->name, peak_bytes);
    }
    if (rc == 0) {
        assert_false(h->refused);
        generate(h, g);
        grammar_unref(g);
        return;
    }
    assert_int_equal(live, 0);
    assert_true(rc == ERR_INVALID || rc == ERR_UNSUPPORTED);
    assert_true(e.text[0] != '\0');
}

static void each_is_refused_or_compiled_within_its_limits(void **state)
{
    struct buf text;

    (void)state;
    buf_init(&text, (size_t)16 << 20);
    for (size_t i = 0; i < ARRAY_LEN(ROWS); i++) {
        write_text(&text, &ROWS[i]);
        try_row(&ROWS[i], &text);
    }
    buf_release(&text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_is_refused_or_compiled_within_its_limits),
    };

    return cmocka_run_group_tests(tests, open_both, close_vocab);
}
