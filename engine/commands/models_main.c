/* `quire models`: the architectures that can be served. */
#include <stdio.h>
#include <string.h>

#include "engine/commands.h"
#include "models/checkpoint/gguf/gguf.h"
#include "models/model.h"

static const char USAGE[] =
    "usage: quire models [--json]\n\n"
    "Lists what can be served: the models, their name in config.json's \"architectures\", and\n"
    "in a GGUF file's general.architecture.\n";

static void print_line(const struct architecture *a)
{
    printf("%-48s %-34s", a->models, a->name);
    for (int i = 0; gguf_name_of(a->name, i); i++) {
        printf("%s%s", i ? ", " : " ", gguf_name_of(a->name, i));
    }
    putchar('\n');
}

/* What scripts/make-docs prints docs/models.md from; the names need no escapes. */
static void print_json(const struct architecture *a, bool first)
{
    printf("%s{\"models\":\"%s\",\"architecture\":\"%s\",\"gguf\":[", first ? "[" : ",\n ",
           a->models, a->name);
    for (int i = 0; gguf_name_of(a->name, i); i++) {
        printf("%s\"%s\"", i ? "," : "", gguf_name_of(a->name, i));
    }
    printf("],\"experts\":%s,\"latent\":%s,\"recurrent\":%s,"
           "\"two_head_sizes\":%s}",
           a->experts ? "true" : "false", a->latent ? "true" : "false",
           a->delta || a->ssd || a->conv || a->scan ? "true" : "false",
           a->gemma4 ? "true" : "false");
}

static void print_row(const struct architecture *a, bool json, bool *first)
{
    if (json) {
        print_json(a, *first);
    } else {
        print_line(a);
    }
    *first = false;
}

int models_main(int argc, char **argv)
{
    bool json = argc == 1 && strcmp(argv[0], "--json") == 0, first = true;

    if (argc > 0 && !json) {
        bool help = strcmp(argv[0], "--help") == 0;
        fprintf(help ? stdout : stderr, "%s", USAGE);
        return help ? 0 : 2;
    }
    for (int i = 0; model_families[i]; i++) {
        for (const struct architecture *a = model_families[i]->architectures; a->name; a++) {
            print_row(a, json, &first);
        }
    }
    for (const struct wrapper *w = model_wrappers; w->name; w++) {
        print_row(&(struct architecture){.models = w->models, .name = w->name}, json, &first);
    }
    if (json) {
        puts("]");
    }
    return 0;
}
