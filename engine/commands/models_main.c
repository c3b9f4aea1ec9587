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

static void print_names(const char *models, const char *name)
{
    printf("%-48s %-34s", models, name);
}

static void print_row(const struct architecture *a)
{
    print_names(a->models, a->name);
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

/* The same of checkpoints of a text model behind an encoder. */
static void print_wrappers(bool json)
{
    for (const struct wrapper *w = model_wrappers; w->name; w++) {
        if (json) {
            printf(",\n {\"models\":\"%s\",\"architecture\":\"%s\",\"gguf\":[],\"experts\":false,"
                   "\"latent\":false,\"recurrent\":false,\"two_head_sizes\":false}",
                   w->models, w->name);
        } else {
            print_names(w->models, w->name);
            putchar('\n');
        }
    }
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
            if (json) {
                print_json(a, first);
            } else {
                print_row(a);
            }
            first = false;
        }
    }
    print_wrappers(json);
    if (json) {
        puts("]");
    }
    return 0;
}
