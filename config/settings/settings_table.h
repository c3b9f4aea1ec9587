/* The internal interface of the settings: the table's rows, and the conversion between
 * a row's text and its value. Included only by config/settings and its tests. */
#ifndef QUIRE_CONFIG_SETTINGS_SETTINGS_TABLE_H
#define QUIRE_CONFIG_SETTINGS_SETTINGS_TABLE_H

#include "config/base/buf.h"
#include "config/settings/settings.h"

enum setting_type {
    SETTING_STRING,   /* char * */
    SETTING_INT,      /* int64_t */
    SETTING_BYTES,    /* int64_t; text may carry KiB, MiB, GiB, TiB, or kB, MB, GB, TB */
    SETTING_FLOAT,    /* double */
    SETTING_SECONDS,  /* double; text may carry ms, s, m, h */
    SETTING_BOOL,     /* bool */
    SETTING_SWITCH,   /* int, enum switch_choice */
    SETTING_CHOICE,   /* int, one of `choice` */
    SETTING_KEYS,     /* api_key: char *[], its length in n_api_keys */
    SETTING_PREFIXES, /* prefixes: YAML only */
};

enum setting_origin { FROM_DEFAULT, FROM_FILE, FROM_ENV, FROM_FLAG };

struct setting_choice {
    const char *name;
    int value; /* equal to an earlier choice's value: an undocumented synonym */
};

struct setting {
    /* The YAML key; with dashes for underscores the flag; in capitals after QUIRE_ the
     * environment variable. */
    const char *key;
    const char *alias;                   /* a second name, as in vLLM, or NULL */
    enum setting_type type;              /* of the member at `offset` */
    size_t offset;                       /* in struct settings */
    const char *preset;                  /* the default as text; NULL: none */
    double min, max;                     /* bounds of numbers, inclusive */
    const struct setting_choice *choice; /* ends at a NULL name */
    const char *metavar;                 /* placeholder of the value in --help */
    const char *group;                   /* heading; the rows of a group are adjacent */
    const char *help;                    /* one phrase, without a full stop */
    bool gib_without_unit; /* a number below 1024 without a unit means GiB, as in vLLM */
};

/* Whether a flag without a value sets the row to true, and --no-NAME to false. */
static inline bool setting_is_switch(const struct setting *row)
{
    return row->type == SETTING_BOOL || row->type == SETTING_SWITCH;
}

extern const struct setting setting_table[];
extern const int setting_count;

/* The row with this name or alias; dashes equal underscores. NULL: none. */
const struct setting *setting_find(const char *name, size_t len);
/* The name or alias with the least edit distance from `name`, with underscores. */
const char *setting_nearest(const char *name, size_t len);

/* Set the row's value from `text`. `where` names the source in messages: "--port",
 * "QUIRE_PORT", "quire.yaml line 3: port". A list is appended to while values come from
 * the same origin, and replaced by the first value of a higher one. */
int setting_set(struct settings *s, const struct setting *row, const char *text,
                enum setting_origin from, const char *where, struct err *e);
enum setting_origin setting_origin(const struct settings *s, const struct setting *row);
/* Append one key. */
int setting_add_key(struct settings *s, const char *key, size_t len, const char *where,
                    struct err *e);
/* Append one entry to `prefixes`. */
int setting_add_prefix(struct settings *s, const char *text, const char *where, struct err *e);
/* The value as YAML, keys masked. */
void setting_format(const struct settings *s, const struct setting *row, struct buf *out);

/* The settings of a YAML text; `name` stands for the file in messages. */
int settings_parse_yaml(struct settings *s, const char *text, size_t len, const char *name,
                        struct err *e);

/* settings_cluster.c: take nodes and ranks from a launcher's environment; check
 * them. */
int settings_cluster(struct settings *s, char **env, struct err *e);
int settings_check_nodes(const struct settings *s, struct err *e);
/* Set speculate, draft_model and max_draft by speculative_config, if that is set, and
 * check them. */
int settings_speculation(struct settings *s, struct err *e);

#endif
