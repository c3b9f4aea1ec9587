/* Flags and environment variables, as a person might mistype them. The input is a list
 * of words separated by NUL bytes: those that begin with QUIRE_ are the environment,
 * all others are flags. covers: config/settings/settings.c
 * config/settings/settings_value.c config/settings/settings_table.c
 * config/settings/settings_print.c */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/settings/settings_table.h"

enum { MAX_WORDS = 24 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct words {
    char *argv[MAX_WORDS + 1], *env[MAX_WORDS + 1];
    int argc, n_env;
};

/* A file that is named in the input is not opened: it might be any. */
static bool names_a_file(const char *word)
{
    return strstr(word, "config") || strstr(word, "CONFIG");
}

static void split(struct words *w, char *text, size_t size)
{
    for (size_t at = 0; at < size && w->argc + w->n_env < MAX_WORDS; at += strlen(text + at) + 1) {
        char *word = text + at;
        if (names_a_file(word)) {
            continue;
        }
        if (strncmp(word, "QUIRE_", 6) == 0) {
            w->env[w->n_env++] = word;
        } else {
            w->argv[w->argc++] = word;
        }
    }
}

/* What was accepted is inside its bounds and can be printed. */
static void check(const struct settings *s, FILE *nowhere)
{
    if (s->port < 0 || s->port > 65535 || s->block_size < 1 || s->max_queue < 1 ||
        !(s->step_timeout > 0)) {
        abort();
    }
    settings_print(s, nowhere);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static FILE *nowhere;

    if (!nowhere) {
        nowhere = fopen("/dev/null", "w");
    }
    char *text = malloc(size + 1);
    if (!text || !nowhere) {
        abort();
    }
    memcpy(text, data, size);
    text[size] = '\0';

    static char no_file[] = "--config=none";
    struct words w = {.argv = {no_file}, .argc = 1};
    split(&w, text, size);
    struct settings s;
    struct err e = {0};
    bool help = false;
    if (settings_load(&s, w.argc, w.argv, w.env, &help, &e) < 0) {
        if (e.code >= 0 || e.text[0] == '\0' || strchr(e.text, '\n')) {
            abort(); /* a refusal without its sentence */
        }
    } else if (help) {
        settings_help(nowhere);
        settings_list(nowhere);
        settings_man(nowhere);
    } else {
        check(&s, nowhere);
        settings_release(&s);
    }
    free(text);
    return 0;
}
