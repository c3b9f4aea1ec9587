/* Unicode's general categories as ranges of code points, made once of utf8proc's. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "engine/constrain/builder.h"

enum { N_CATEGORIES = 30, MAX_RANGES = 1 << 13, LAST_CODE = 0x10ffff };

/* The names in the order of utf8proc_category_t. */
static const char names[N_CATEGORIES][3] = {
    "Cn", "Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No", "Pc", "Pd", "Ps",
    "Pe", "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So", "Zs", "Zl", "Zp", "Cc", "Cf", "Cs", "Co",
};
/* Long names that patterns use, and the short ones. */
static const char *const aliases[][2] = {
    {"Letter", "L"},
    {"Lowercase_Letter", "Ll"},
    {"Uppercase_Letter", "Lu"},
    {"Mark", "M"},
    {"Number", "N"},
    {"Decimal_Number", "Nd"},
    {"digit", "Nd"},
    {"Punctuation", "P"},
    {"punct", "P"},
    {"Symbol", "S"},
    {"Separator", "Z"},
    {"Space_Separator", "Zs"},
    {"Other", "C"},
    {"Control", "Cc"},
};

struct category {
    char name[3];             /* one letter: all that begin with it */
    struct code_range *range; /* [n], sorted, apart */
    int32_t n;                /* ranges */
};

static struct category table[N_CATEGORIES + 7];
static int n_table;

static void add(struct category *c, uint32_t code)
{
    if (c->n > 0 && c->range[c->n - 1].last == code - 1) {
        c->range[c->n - 1].last = code;
    } else if (c->n < MAX_RANGES && c->range) {
        c->range[c->n++] = (struct code_range){code, code};
    }
}

static int find(const char *name, size_t len)
{
    for (int i = 0; i < n_table; i++) {
        if (strlen(table[i].name) == len && memcmp(table[i].name, name, len) == 0) {
            return i;
        }
    }
    return -1;
}

static void make_table(void)
{
    int of_letter[N_CATEGORIES];

    for (int i = 0; i < N_CATEGORIES; i++) {
        memcpy(table[n_table++].name, names[i], 3);
    }
    for (int i = 0; i < N_CATEGORIES; i++) {
        of_letter[i] = find(names[i], 1);
        if (of_letter[i] < 0) {
            of_letter[i] = n_table;
            table[n_table++].name[0] = names[i][0];
        }
    }
    for (int i = 0; i < n_table; i++) {
        table[i].range = malloc(MAX_RANGES * sizeof(*table[i].range));
    }
    for (uint32_t code = 0; code <= LAST_CODE; code++) {
        int category = (int)utf8proc_category((utf8proc_int32_t)code);
        if (category >= 0 && category < N_CATEGORIES) {
            add(&table[category], code);
            add(&table[of_letter[category]], code);
        }
    }
    for (int i = 0; i < n_table; i++) {
        void *less = realloc(table[i].range, ((size_t)table[i].n + 1) * sizeof(*table[i].range));
        table[i].range = less ? less : table[i].range;
    }
}

const struct code_range *unicode_category(const char *name, size_t len, int32_t *ret_n)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, make_table);
    for (size_t i = 0; i < ARRAY_LEN(aliases); i++) {
        if (strlen(aliases[i][0]) == len && memcmp(aliases[i][0], name, len) == 0) {
            name = aliases[i][1];
            len = strlen(name);
        }
    }
    int i = find(name, len);
    if (i < 0) {
        return NULL;
    }
    *ret_n = table[i].n;
    return table[i].range;
}
