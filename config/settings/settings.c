/* The sources of settings: defaults, the YAML file, the environment, flags. Each
 * overwrites the one before, so the order of the calls in settings_load is the
 * precedence. */
#include "config/settings/settings.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "config/base/limits.h"
#include "config/settings/settings_table.h"

#define DEFAULT_CONFIG "/etc/quire/quire.yaml"

enum { WHERE_BYTES = 96 };

static int set_defaults(struct settings *s, struct err *e)
{
    for (int i = 0; i < setting_count; i++) {
        const struct setting *row = &setting_table[i];
        int rc = !row->preset ? 0 : setting_set(s, row, row->preset, FROM_DEFAULT, row->key, e);
        if (rc < 0) {
            return rc;
        }
    }
    return 0;
}

/* ---- flags ---- */

struct flag {
    const struct setting *row;
    const char *value; /* after '=', or the next argument, or "true"/"false"; NULL: missing */
    int n_args;        /* arguments consumed */
};

/* Whether the argument behind such a flag is its value. */
static bool is_switch_word(const struct setting *row, const char *text)
{
    return text && (strcasecmp(text, "true") == 0 || strcasecmp(text, "false") == 0 ||
                    (row->type == SETTING_SWITCH && strcasecmp(text, "auto") == 0));
}

static bool has_prefix(const char *text, const char *prefix)
{
    return strncmp(text, prefix, strlen(prefix)) == 0;
}

/* The switch that --no-NAME sets to false. */
static const struct setting *find_negated(const char *name, size_t len)
{
    if (len < 4 || (!has_prefix(name, "no-") && !has_prefix(name, "no_"))) {
        return NULL;
    }
    const struct setting *row = setting_find(name + 3, len - 3);
    return row && setting_is_switch(row) ? row : NULL;
}

/* `argument` begins with "--"; `next` is the one after it, or NULL. */
static int read_flag(const char *argument, const char *next, struct flag *ret, struct err *e)
{
    const char *name = argument + 2;
    size_t len = strcspn(name, "=");
    const char *given = name[len] == '=' ? name + len + 1 : NULL;

    *ret = (struct flag){.row = setting_find(name, len), .value = given, .n_args = 1};

    if (!ret->row && (ret->row = find_negated(name, len)) != NULL) {
        if (given) {
            return err_set(e, ERR_INVALID, "%s: a negated flag takes no value", argument);
        }
        ret->value = "false";
        return 0;
    }
    if (!ret->row) {
        char nearest[WHERE_BYTES];
        snprintf(nearest, sizeof(nearest), "%s", setting_nearest(name, len));
        for (char *c = nearest; *c != '\0'; c++) {
            *c = *c == '_' ? '-' : *c;
        }
        return err_set(e, ERR_INVALID,
                       "--%.*s is not a flag; the nearest is --%s (--help lists all)",
                       (int)MIN(len, (size_t)64), name, nearest);
    }
    if (given) {
        return 0;
    }
    bool bare = setting_is_switch(ret->row) && !is_switch_word(ret->row, next);
    bool missing = !next || has_prefix(next, "--");
    ret->value = bare ? "true" : missing ? NULL : next;
    ret->n_args = bare ? 1 : 2;
    return 0;
}

static int set_flag(struct settings *s, const struct flag *f, const char *argument, struct err *e)
{
    char where[WHERE_BYTES];

    snprintf(where, sizeof(where), "%.*s", (int)MIN(strcspn(argument, "="), sizeof(where) - 1),
             argument);
    if (!f->value) {
        return err_set_param(e, ERR_INVALID, f->row->key, "%s: a value must follow", where);
    }
    return setting_set(s, f->row, f->value, FROM_FLAG, where, e);
}

/* Set all flags and the one positional MODEL; with `only`, just that row (to find
 * --config first). */
static int set_from_flags(struct settings *s, int argc, char **argv, const struct setting *only,
                          struct err *e)
{
    const struct setting *model = setting_find("model", 5);
    const char *positional = NULL;

    for (int i = 0; i < argc;) {
        if (argv[i][0] == '-' && argv[i][1] != '-') {
            return err_set(e, ERR_INVALID,
                           "'%.64s' is not a flag: flags begin with two dashes (--help lists them)",
                           argv[i]);
        }
        struct flag f = {.row = model, .value = argv[i], .n_args = 1};
        if (argv[i][0] != '-') {
            if (positional) {
                return err_set(e, ERR_INVALID,
                               "'%.64s': only one MODEL is allowed, and '%.64s' was given before",
                               argv[i], positional);
            }
            positional = argv[i];
        } else {
            int rc = read_flag(argv[i], i + 1 < argc ? argv[i + 1] : NULL, &f, e);
            if (rc < 0) {
                return rc;
            }
        }
        int rc =
            !only || only == f.row ? set_flag(s, &f, argv[i][0] == '-' ? argv[i] : "MODEL", e) : 0;
        if (rc < 0) {
            return rc;
        }
        i += f.n_args;
    }
    return 0;
}

static bool asks_for_help(int argc, char **argv)
{
    for (int i = 0; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            return true;
        }
    }
    return false;
}

/* ---- environment ---- */

/* The row that "QUIRE_NAME=value" sets; NULL if there is none, since other programs may
 * use the same prefix. */
static const struct setting *find_variable(const char *entry, size_t name_len)
{
    char lower[WHERE_BYTES];

    if (!has_prefix(entry, "QUIRE_") || name_len - 6 >= sizeof(lower)) {
        return NULL;
    }
    for (size_t i = 6; i < name_len; i++) {
        lower[i - 6] = entry[i] >= 'A' && entry[i] <= 'Z' ? (char)(entry[i] - 'A' + 'a') : entry[i];
    }
    return setting_find(lower, name_len - 6);
}

static int set_from_environment(struct settings *s, char **env, const struct setting *only,
                                struct err *e)
{
    for (; env != NULL && *env != NULL; env++) {
        size_t len = strcspn(*env, "=");
        const struct setting *row = (*env)[len] == '=' ? find_variable(*env, len) : NULL;
        if (!row || (only && row != only)) {
            continue;
        }
        const char *value = *env + len + 1;
        /* Kubernetes sets QUIRE_PORT=tcp://... in every container of a namespace with a
         * service named "quire". */
        if (row->offset == offsetof(struct settings, port) && has_prefix(value, "tcp://")) {
            s->kubernetes_port = true;
            continue;
        }
        char where[WHERE_BYTES];
        snprintf(where, sizeof(where), "%.*s", (int)MIN(len, sizeof(where) - 1), *env);
        int rc = setting_set(s, row, value, FROM_ENV, where, e);
        if (rc < 0) {
            return rc;
        }
    }
    return 0;
}

/* ---- files ---- */

static int set_from_file(struct settings *s, struct err *e)
{
    bool chosen = s->config != NULL;

    if (chosen && strcmp(s->config, "none") == 0) {
        return 0;
    }
    const char *path = chosen ? s->config : DEFAULT_CONFIG;
    struct buf text;
    buf_init(&text, LIMIT_YAML_BYTES);
    int rc = buf_read_file(&text, path, e);
    if (rc == ERR_NOT_FOUND && !chosen) {
        err_set(e, 0, "%s", "");
        rc = 0;
    } else if (rc < 0) {
        err_prefix(e, "config");
    } else {
        rc = settings_parse_yaml(s, !text.data ? "" : text.data, text.len, path, e);
    }
    if (rc == 0 && !chosen && text.data) {
        rc = setting_set(s, setting_find("config", 6), path, FROM_DEFAULT, "config", e);
    }
    buf_release(&text);
    return rc;
}

/* ---- all together ---- */

static int check_smoothing(const struct settings *s, struct err *e)
{
    bool smooth = s->quantization_smooth > 0;

    if (smooth != (s->quantization_text != NULL)) {
        return err_set_param(e, ERR_INVALID, smooth ? "quantization_text" : "quantization_smooth",
                             "quantization_smooth and quantization_text must both be set: %s is "
                             "missing",
                             smooth ? "quantization_text" : "quantization_smooth");
    }
    if (smooth && s->quantization != QUANTIZE_INT8 && s->quantization != QUANTIZE_INT8_ASYMMETRIC) {
        return err_set_param(e, ERR_UNSUPPORTED, "quantization_smooth",
                             "quantization_smooth goes with quantization int8 or int8-asymmetric, "
                             "with no other");
    }
    if (smooth && (s->load_format == LOAD_DUMMY || s->load_format == LOAD_GGUF)) {
        return err_set_param(e, ERR_UNSUPPORTED, "quantization_smooth",
                             "quantization_smooth: load_format must be auto or safetensors");
    }
    return 0;
}

static int check_together(const struct settings *s, struct err *e)
{
    if ((!s->ssl_certfile) != (!s->ssl_keyfile)) {
        return err_set_param(e, ERR_INVALID, !s->ssl_certfile ? "ssl_certfile" : "ssl_keyfile",
                             "ssl_certfile and ssl_keyfile must both be set: %s is missing",
                             !s->ssl_certfile ? "ssl_certfile" : "ssl_keyfile");
    }
    if (s->max_num_seqs > 0 && s->max_num_batched_tokens > 0 &&
        s->max_num_batched_tokens < s->max_num_seqs) {
        return err_set_param(e, ERR_INVALID, "max_num_batched_tokens",
                             "max_num_batched_tokens is %lld, less than max_num_seqs, %lld: each "
                             "running sequence needs one token per step",
                             (long long)s->max_num_batched_tokens, (long long)s->max_num_seqs);
    }
    int rc = check_smoothing(s, e);
    return rc < 0 ? rc : settings_check_nodes(s, e);
}

int settings_load(struct settings *ret, int argc, char **argv, char **env, bool *ret_help,
                  struct err *e)
{
    struct settings s = {0};

    *ret_help = asks_for_help(argc, argv);
    if (*ret_help) {
        *ret = s; /* the caller may release it */
        return 0;
    }
    const struct setting *config = setting_find("config", 6);
    int rc = set_defaults(&s, e);
    if (rc == 0) {
        rc = set_from_environment(&s, env, config, e);
    }
    if (rc == 0) {
        rc = set_from_flags(&s, argc, argv, config, e);
    }
    if (rc == 0) {
        rc = set_from_file(&s, e);
    }
    if (rc == 0) {
        rc = set_from_environment(&s, env, NULL, e);
    }
    if (rc == 0) {
        rc = set_from_flags(&s, argc, argv, NULL, e);
    }
    if (rc == 0) {
        rc = settings_speculation(&s, e);
    }
    if (rc == 0) {
        rc = settings_cluster(&s, env, e);
    }
    if (rc == 0) {
        rc = check_together(&s, e);
    }
    if (rc < 0) {
        settings_release(&s);
        return rc;
    }
    *ret = s;
    return 0;
}
