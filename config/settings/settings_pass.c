/* The settings passed to worker processes as flags. Keys are never among them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/settings/settings_table.h"

enum { FLAG_BYTES = 8192 };

/* Whether a worker needs the setting: to compute the model, to wait for a step, to
 * log. */
static bool passes(const struct setting *row)
{
    static const char *const groups[] = {"Model", "Scheduling", "Memory", "Nodes"};
    static const char *const keys[] = {"log_format", "log_level", "step_timeout"};
    /* names that were resolved, and what was read already */
    static const char *const told[] = {"model", "draft_model", "speculative_config"};
    bool needed = false;

    for (size_t i = 0; i < ARRAY_LEN(keys); i++) {
        needed = needed || strcmp(row->key, keys[i]) == 0;
    }
    for (size_t i = 0; i < ARRAY_LEN(groups); i++) {
        needed = needed || strcmp(row->group, groups[i]) == 0;
    }
    for (size_t i = 0; i < ARRAY_LEN(told); i++) {
        needed = needed && strcmp(row->key, told[i]) != 0;
    }
    return needed && row->type != SETTING_PREFIXES && row->type != SETTING_KEYS;
}

/* --key=value, malloc'd; NULL: no value, or out of memory. */
static char *flag_of(const struct settings *s, const struct setting *row)
{
    const void *at = (const char *)s + row->offset;
    struct buf b;

    buf_init(&b, FLAG_BYTES);
    buf_printf(&b, "--%s=", row->key);
    if (row->type == SETTING_STRING) {
        if (!*(char *const *)at) {
            b.failed = true;
        } else {
            buf_puts(&b, *(char *const *)at);
        }
    } else if (row->type == SETTING_BYTES) {
        buf_printf(&b, "%lldb", (long long)*(const int64_t *)at);
    } else {
        setting_format(s, row, &b);
    }
    char *flag = b.failed ? NULL : strdup(b.data);
    buf_release(&b);
    return flag;
}

void settings_pass_on_free(char **flags)
{
    for (char **f = flags; f && *f; f++) {
        free(*f);
    }
    free(flags);
}

/* Add --key=value; false: out of memory. */
static bool add_flag(char **flags, int *n, const char *key, const char *value)
{
    if (asprintf(&flags[*n], "--%s=%s", key, value) < 0) {
        flags[*n] = NULL;
        return false;
    }
    (*n)++;
    return true;
}

int settings_pass_on(char ***ret, const struct settings *s, const char *model,
                     const char *draft_model, struct err *e)
{
    char **flags = calloc((size_t)setting_count + 4, sizeof(*flags));

    if (!flags) {
        return err_nomem(e, "settings");
    }
    int n = 0;
    for (int i = 0; i < setting_count; i++) {
        char *flag = passes(&setting_table[i]) ? flag_of(s, &setting_table[i]) : NULL;
        if (flag) {
            flags[n++] = flag;
        }
    }
    if (!add_flag(flags, &n, "config", "none") || !add_flag(flags, &n, "model", model) ||
        (draft_model && !add_flag(flags, &n, "draft_model", draft_model))) {
        settings_pass_on_free(flags);
        return err_nomem(e, "settings");
    }
    *ret = flags;
    return 0;
}
