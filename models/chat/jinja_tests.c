/* Tests (`x is …`), and the functions that transformers provides to templates. */
#include <string.h>
#include <time.h>

#include "models/chat/jinja_strings.h"

#define TEST(name, expression)                                                              \
    static struct jvalue is_##name(struct jrun *r, struct jvalue in, const struct jargs *a) \
    {                                                                                       \
        (void)r, (void)in, (void)a;                                                         \
        return jbool(expression);                                                           \
    }

static bool is_list(struct jvalue v)
{
    return v.type == J_LIST || v.type == J_TUPLE;
}

static int64_t whole(struct jrun *r, struct jvalue v)
{
    if (v.type != J_INT && v.type != J_BOOL) {
        jfail(r, "a test needs a whole number, not %s", jtype_name(v));
    }
    return v.type == J_INT ? v.i : v.type == J_BOOL ? v.b : 0;
}

static bool divides(struct jrun *r, struct jvalue in, struct jvalue by)
{
    int64_t n = whole(r, in), d = whole(r, by);

    return d != 0 && (d == -1 || n % d == 0);
}

TEST(defined, in.type != J_UNDEFINED)
TEST(undefined, in.type == J_UNDEFINED)
TEST(none, in.type == J_NONE)
TEST(string, in.type == J_STRING)
TEST(mapping, in.type == J_DICT)
TEST(iterable, in.type == J_STRING || in.type == J_DICT || in.type == J_UNDEFINED || is_list(in))
TEST(sequence, in.type == J_STRING || in.type == J_DICT || in.type == J_UNDEFINED || is_list(in))
TEST(number, in.type == J_INT || in.type == J_FLOAT || in.type == J_BOOL)
TEST(integer, in.type == J_INT)
TEST(float, in.type == J_FLOAT)
TEST(boolean, in.type == J_BOOL)
TEST(true, in.type == J_BOOL && in.b)
TEST(false, in.type == J_BOOL && !in.b)
TEST(callable, in.type == J_FUNCTION || in.type == J_MACRO)
TEST(odd, whole(r, in) % 2 != 0)
TEST(even, whole(r, in) % 2 == 0)
TEST(divisibleby, divides(r, in, jarg(a, 0, "num")))
TEST(equal, jequal(r, in, jarg(a, 0, NULL)))
TEST(unequal, !jequal(r, in, jarg(a, 0, NULL)))
TEST(less, jcompare(r, in, jarg(a, 0, NULL)) < 0)
TEST(less_equal, jcompare(r, in, jarg(a, 0, NULL)) <= 0)
TEST(greater, jcompare(r, in, jarg(a, 0, NULL)) > 0)
TEST(greater_equal, jcompare(r, in, jarg(a, 0, NULL)) >= 0)
TEST(in, jcontains(r, jarg(a, 0, NULL), in))

static const struct jbuiltin tests[] = {
    {"defined", is_defined, 0},
    {"undefined", is_undefined, 0},
    {"none", is_none, 0},
    {"string", is_string, 0},
    {"mapping", is_mapping, 0},
    {"iterable", is_iterable, 0},
    {"sequence", is_sequence, 0},
    {"number", is_number, 0},
    {"integer", is_integer, 0},
    {"float", is_float, 0},
    {"boolean", is_boolean, 0},
    {"true", is_true, 0},
    {"false", is_false, 0},
    {"callable", is_callable, 0},
    {"odd", is_odd, 0},
    {"even", is_even, 0},
    {"divisibleby", is_divisibleby, 0},
    {"eq", is_equal, 0},
    {"equalto", is_equal, 0},
    {"==", is_equal, 0},
    {"ne", is_unequal, 0},
    {"!=", is_unequal, 0},
    {"lt", is_less, 0},
    {"lessthan", is_less, 0},
    {"<", is_less, 0},
    {"le", is_less_equal, 0},
    {"<=", is_less_equal, 0},
    {"gt", is_greater, 0},
    {"greaterthan", is_greater, 0},
    {">", is_greater, 0},
    {"ge", is_greater_equal, 0},
    {">=", is_greater_equal, 0},
    {"in", is_in, 0},
};

const struct jbuiltin *jinja_test_find(const char *name)
{
    for (size_t i = 0; i < ARRAY_LEN(tests); i++) {
        if (strcmp(tests[i].name, name) == 0) {
            return &tests[i];
        }
    }
    return NULL;
}

/* ---- functions ---- */

static struct jvalue do_range(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    struct jvalue l = jlist_new(r, J_LIST);
    int64_t from = a->n > 1 ? whole(r, a->at[0]) : 0, to = a->n ? whole(r, a->at[a->n > 1]) : 0;
    int64_t step = a->n > 2 ? whole(r, a->at[2]) : 1;

    (void)in;
    if (a->n < 1 || a->n > 3 || step == 0) {
        return jfail(r, "range takes one to three whole numbers, and no step of 0");
    }
    for (int64_t i = from; (step > 0 ? i < to : i > to) && !r->failed;) {
        jlist_push(r, l.list, jint(i));
        if (__builtin_add_overflow(i, step, &i)) {
            break;
        }
    }
    return l;
}

static struct jvalue make_dict(struct jrun *r, const struct jargs *a, enum jtype type)
{
    struct jvalue d = jdict_new(r, type);

    for (int32_t i = 0; i < a->n && !r->failed; i++) {
        if (a->name[i]) {
            jdict_set(r, d.dict, jtext(a->name[i]), a->at[i]);
            continue;
        }
        if (a->at[i].type != J_DICT) {
            return jfail(r, "dict and namespace take names with values, or a dict");
        }
        for (int32_t k = 0; k < a->at[i].dict->n && !r->failed; k++) {
            jdict_set(r, d.dict, a->at[i].dict->key[k], a->at[i].dict->value[k]);
        }
    }
    return d;
}

static struct jvalue do_dict(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    (void)in;
    return make_dict(r, a, J_DICT);
}

static struct jvalue do_namespace(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    (void)in;
    return make_dict(r, a, J_NAMESPACE);
}

static struct jvalue do_raise(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    struct jvalue text = jto_string(r, jarg(a, 0, "message"));

    (void)in;
    return r->failed ? text : jfail(r, "it refuses: %.*s", (int)MIN(text.len, (size_t)300), text.s);
}

static struct jvalue do_strftime_now(struct jrun *r, struct jvalue in, const struct jargs *a)
{
    struct jvalue format = jarg(a, 0, "format");
    char text[256];
    time_t now = time(NULL);
    struct tm local;

    (void)in;
    if (!jneed_string(r, format, "strftime_now") || format.len > 64) {
        return jfail(r, "strftime_now needs a format of at most 64 bytes");
    }
    struct jvalue copy = jcopy(r, format.s, format.len);
    if (r->failed || !localtime_r(&now, &local)) {
        return copy;
    }
    return jcopy(r, text, strftime(text, sizeof(text), copy.s, &local));
}

static const struct jbuiltin functions[] = {
    {"range", do_range, 0},
    {"dict", do_dict, 0},
    {"namespace", do_namespace, 0},
    {"raise_exception", do_raise, 0},
    {"strftime_now", do_strftime_now, 0},
};

const struct jbuiltin *jinja_function_find(const char *name)
{
    for (size_t i = 0; i < ARRAY_LEN(functions); i++) {
        if (strcmp(functions[i].name, name) == 0) {
            return &functions[i];
        }
    }
    return NULL;
}
