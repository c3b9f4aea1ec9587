/* Lists of modules in a quantization_config (see quant_config.h). */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <fnmatch.h>
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

#include "models/checkpoint/quantised/quant_config.h"

/* Steps of one match, and bytes that it may take: a pattern is not trusted. */
enum { MATCH_STEPS = 10000, MATCH_KIB = 64 };

static bool is_pattern(const char *name)
{
    return strncmp(name, "re:", 3) == 0;
}

int quant_names_add(struct quant_names *l, const char *name, struct err *e)
{
    l->n_patterns += is_pattern(name);
    if (l->n == QUANT_MAX_NAMES || l->n_patterns > QUANT_MAX_PATTERNS) {
        return err_set(e, ERR_FULL, "a list of more than %d modules, or of %d patterns",
                       QUANT_MAX_NAMES, QUANT_MAX_PATTERNS);
    }
    if (l->n == l->cap) {
        int32_t cap = l->cap > 0 ? 2 * l->cap : 16;
        char **list = realloc(l->name, (size_t)cap * sizeof(*list));
        if (!list) {
            return err_nomem(e, "quantization_config");
        }
        l->name = list;
        l->cap = cap;
    }
    l->name[l->n] = strdup(name);
    if (!l->name[l->n]) {
        return err_nomem(e, "quantization_config");
    }
    l->n++;
    return 0;
}

void quant_names_release(struct quant_names *l)
{
    for (int32_t i = 0; i < l->n; i++) {
        free(l->name[i]);
    }
    free(l->name);
    *l = (struct quant_names){0};
}

/* Python's re.match. A pattern that does not compile matches nothing. */
static bool pattern_matches(const char *pattern, const char *module)
{
    int code;
    size_t at;
    pcre2_code *re =
        pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_ANCHORED, &code, &at, NULL);
    pcre2_match_context *limits = pcre2_match_context_create(NULL);
    pcre2_match_data *match = re ? pcre2_match_data_create(1, NULL) : NULL;
    int rc = -1;

    if (re && limits && match) {
        pcre2_set_match_limit(limits, MATCH_STEPS);
        pcre2_set_heap_limit(limits, MATCH_KIB);
        rc = pcre2_match(re, (PCRE2_SPTR)module, strlen(module), 0, 0, match, limits);
    }
    pcre2_match_data_free(match);
    pcre2_match_context_free(limits);
    pcre2_code_free(re);
    return rc >= 0;
}

bool quant_names_match(const struct quant_names *l, const char *module)
{
    for (int32_t i = 0; i < l->n; i++) {
        const char *name = l->name[i];
        if (is_pattern(name)               ? pattern_matches(name + 3, module)
            : strpbrk(name, "*?[") != NULL ? fnmatch(name, module, 0) == 0
                                           : strcmp(name, module) == 0) {
            return true;
        }
    }
    return false;
}
