/* The settings as text: --help, the table as JSON, the manual page's reference, and
 * `quire config`. */
#include <string.h>

#include "config/settings/settings_table.h"

enum { HELP_COLUMN = 34, HELP_WIDTH = 100, VALUE_MAX_BYTES = 1 << 22 };

static bool begins_group(int i)
{
    return i == 0 || strcmp(setting_table[i].group, setting_table[i - 1].group) != 0;
}

/* Append a name with dashes for underscores, or in capitals. */
static void spell(struct buf *out, const char *key, bool capitals)
{
    for (; *key != '\0'; key++) {
        bool letter = *key >= 'a' && *key <= 'z';
        buf_putc(out, capitals      ? (char)(letter ? *key - 'a' + 'A' : *key)
                      : *key == '_' ? '-'
                                    : *key);
    }
}

/* Whether this choice is the first with its value; later ones are undocumented
 * synonyms. */
static bool is_shown(const struct setting_choice *first, const struct setting_choice *c)
{
    for (; first != c; first++) {
        if (first->value == c->value) {
            return false;
        }
    }
    return true;
}

static void put_choices(struct buf *out, const struct setting *row, const char *between)
{
    for (const struct setting_choice *c = row->choice; c->name != NULL; c++) {
        if (is_shown(row->choice, c)) {
            buf_printf(out, "%s%s", c == row->choice ? "" : between, c->name);
        }
    }
}

/* "--port N" */
static void put_flag(struct buf *out, const struct setting *row)
{
    buf_puts(out, setting_is_switch(row) ? "--[no-]" : "--");
    spell(out, row->key, false);
    if (row->choice) {
        buf_putc(out, ' ');
        put_choices(out, row, "|");
    } else if (row->metavar) {
        buf_printf(out, " %s", row->metavar);
    }
}

/* Print `text` wrapped and indented by HELP_COLUMN; the first line begins at
 * `column`. */
static void put_wrapped(FILE *out, const char *text, int column)
{
    if (column >= HELP_COLUMN) {
        fputc('\n', out);
        column = 0;
    }
    fprintf(out, "%*s", HELP_COLUMN - column, "");
    int at = HELP_COLUMN;
    while (*text != '\0') {
        int len = (int)strcspn(text, " ");
        if (at > HELP_COLUMN && at + 1 + len > HELP_WIDTH) {
            fprintf(out, "\n%*s", HELP_COLUMN, "");
            at = HELP_COLUMN;
        }
        if (at > HELP_COLUMN) {
            at += fprintf(out, " ");
        }
        at += fprintf(out, "%.*s", len, text);
        text += len;
        text += strspn(text, " ");
    }
    fputc('\n', out);
}

/* "port to listen on; 0: any free one [8000]" */
static void put_help(struct buf *out, const struct setting *row)
{
    buf_puts(out, row->help);
    if (row->preset) {
        buf_printf(out, " [%s]", row->preset);
    }
    if (row->alias) {
        buf_puts(out, " (also --");
        spell(out, row->alias, false);
        buf_putc(out, ')');
    }
}

static void help_row(FILE *out, const struct setting *row)
{
    struct buf flag, text;

    buf_init(&flag, 256);
    buf_init(&text, 1024);
    put_flag(&flag, row);
    put_help(&text, row);
    if (flag.data && text.data) {
        put_wrapped(out, text.data, fprintf(out, "  %s", flag.data));
    }
    buf_release(&flag);
    buf_release(&text);
}

void settings_help(FILE *out)
{
    for (int i = 0; i < setting_count; i++) {
        if (begins_group(i)) {
            fprintf(out, "%s%s\n", i == 0 ? "" : "\n", setting_table[i].group);
        }
        if (setting_table[i].type != SETTING_PREFIXES) {
            help_row(out, &setting_table[i]);
        }
    }
    fprintf(out, "\nEach can also be set in the YAML file (max_num_seqs: 8) or in the environment "
                 "(QUIRE_MAX_NUM_SEQS=8).\n"
                 "Flags override the environment, and the environment overrides the file. `quire "
                 "config` shows the\nresult.\n");
}

/* ---- the table for programs ---- */

/* `"name": "text"`, or null for a text that is absent. */
static void put_member(struct buf *out, const char *name, const char *text)
{
    buf_printf(out, ", \"%s\": ", name);
    if (!text) {
        buf_puts(out, "null");
        return;
    }
    buf_json_puts(out, text);
}

static void put_spelled(struct buf *out, const char *name, const char *prefix, const char *key,
                        bool capitals)
{
    buf_printf(out, ", \"%s\": \"%s", name, prefix);
    spell(out, key, capitals);
    buf_putc(out, '"');
}

static void put_choice_list(struct buf *out, const struct setting *row)
{
    const char *before = "\"";

    buf_puts(out, ", \"choices\": [");
    for (const struct setting_choice *c = row->choice; c && c->name; c++) {
        if (is_shown(row->choice, c)) {
            buf_printf(out, "%s%s\"", before, c->name);
            before = ", \"";
        }
    }
    buf_putc(out, ']');
}

static void list_row(FILE *out, const struct setting *row)
{
    static const char *const type_name[] = {
        [SETTING_STRING] = "string",     [SETTING_INT] = "int",         [SETTING_BYTES] = "bytes",
        [SETTING_FLOAT] = "float",       [SETTING_SECONDS] = "seconds", [SETTING_BOOL] = "bool",
        [SETTING_SWITCH] = "switch",     [SETTING_CHOICE] = "choice",   [SETTING_KEYS] = "keys",
        [SETTING_PREFIXES] = "prefixes",
    };
    struct buf line;

    buf_init(&line, 4096);
    buf_printf(&line, "{\"key\": \"%s\", \"type\": \"%s\"", row->key, type_name[row->type]);
    put_member(&line, "group", row->group);
    if (row->type != SETTING_PREFIXES) {
        put_spelled(&line, "flag", "--", row->key, false);
        put_spelled(&line, "env", "QUIRE_", row->key, true);
    }
    if (row->alias) {
        put_spelled(&line, "alias", "--", row->alias, false);
    }
    put_member(&line, "metavar", row->metavar);
    put_member(&line, "default", row->preset);
    put_choice_list(&line, row);
    put_member(&line, "help", row->help);
    fprintf(out, "%s}", !line.data ? "" : line.data);
    buf_release(&line);
}

void settings_list(FILE *out)
{
    for (int i = 0; i < setting_count; i++) {
        fputs(i == 0 ? "[" : ",\n ", out);
        list_row(out, &setting_table[i]);
    }
    fputs("]\n", out);
}

/* ---- the manual page ---- */

/* Escape text for troff: a plain dash would be a hyphen and a possible line break, and
 * a backslash starts a command. */
static void put_roff(FILE *out, const char *text, size_t len)
{
    for (size_t i = 0; i < len; i++) {
        if (text[i] == '-') {
            fputs("\\-", out);
        } else if (text[i] == '\\') {
            fputs("\\e", out);
        } else {
            fputc(text[i], out);
        }
    }
}

/* The flag in bold and its value, then the help as in help_row. */
static void man_row(FILE *out, const struct setting *row)
{
    struct buf flag, text;

    buf_init(&flag, 256);
    buf_init(&text, 1024);
    put_flag(&flag, row);
    put_help(&text, row);
    if (flag.data && text.data) {
        size_t name = strcspn(flag.data, " ");
        fputs(".TP\n\\fB", out);
        put_roff(out, flag.data, name);
        fputs("\\fR", out);
        put_roff(out, flag.data + name, flag.len - name);
        fputc('\n', out);
        put_roff(out, text.data, text.len);
        fputc('\n', out);
    }
    buf_release(&flag);
    buf_release(&text);
}

void settings_man(FILE *out)
{
    for (int i = 0; i < setting_count; i++) {
        if (begins_group(i)) {
            fprintf(out, ".SS %s\n", setting_table[i].group);
        }
        if (setting_table[i].type != SETTING_PREFIXES) {
            man_row(out, &setting_table[i]);
        }
    }
}

/* "from --port", "from QUIRE_PORT", "from /etc/quire/quire.yaml", "default" */
static void put_origin(struct buf *out, const struct settings *s, const struct setting *row)
{
    switch (setting_origin(s, row)) {
    case FROM_DEFAULT:
        buf_puts(out, "default");
        break;
    case FROM_FILE:
        buf_printf(out, "from %s", !s->config ? "the file" : s->config);
        break;
    case FROM_ENV:
        buf_puts(out, "from QUIRE_");
        spell(out, row->key, true);
        break;
    case FROM_FLAG:
        buf_puts(out, "from --");
        spell(out, row->key, false);
        break;
    }
}

void settings_print(const struct settings *s, FILE *out)
{
    for (int i = 0; i < setting_count; i++) {
        const struct setting *row = &setting_table[i];
        struct buf line;
        buf_init(&line, VALUE_MAX_BYTES);
        /* The setting config is not allowed in a file, so it is printed as a
         * comment. */
        buf_printf(&line, "%s%s: ", row->offset == offsetof(struct settings, config) ? "# " : "",
                   row->key);
        setting_format(s, row, &line);
        buf_puts(&line, "  # ");
        put_origin(&line, s, row);
        fprintf(out, "%s\n", !line.data ? "" : line.data);
        buf_release(&line);
    }
}
