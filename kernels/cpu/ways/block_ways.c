/* See block_ways.h. */
#include "kernels/cpu/ways/block_ways.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/ways/kept_ways.h"

enum {
    SETS = 3,
    REPEATS = 12, /* the least time counts: others are those of interruptions */
    NAME_BYTES = 48
};

/* Those that have functions of their own for blocks, newest first. */
static const enum cpu_isa set_isa[SETS] = {CPU_AMX, CPU_AVX512_VNNI, CPU_AVX2};
static const char *const class_names[] = {
    [BLOCKS_ONE_ROW] = "one-row", [BLOCKS_FEW_ROWS] = "few-rows", [BLOCKS_PANELS] = "panels"};

/* The functions of some instruction sets for a format that differ, newest first. */
struct candidates {
    enum weight_format_id format;
    enum cpu_block_class class;
    const struct cpu_kernels *of[SETS]; /* [n] */
    const char *name[SETS];             /* [n] of their instruction sets */
    int32_t n;
};

int32_t cpu_block_fastest(const double *us, int32_t n)
{
    const double margin = 1.05;
    int32_t best = 0;

    for (int32_t i = 1; i < n; i++) {
        best = us[i] * margin < us[0] && us[i] < us[best] ? i : best;
    }
    return best;
}

static bool has_sets(enum cpu_isa isa)
{
    return isa >= CPU_AVX512_VNNI && isa <= CPU_AMX;
}

int cpu_block_ways_init(struct cpu_block_ways *w, enum cpu_isa isa, struct err *e)
{
    const char *asked = getenv("QUIRE_CPU_WAYS"), *set = getenv("QUIRE_CPU_ISA");

    asked = asked && asked[0] != '\0' ? asked : set && set[0] != '\0' ? "own" : "timed";
    *w = (struct cpu_block_ways){.isa = isa, .most = isa, .timed = strcmp(asked, "timed") == 0};
    if (w->timed || strcmp(asked, "own") == 0) {
        return 0;
    }
    bool known = cpu_isa_named(&w->most, asked) && w->most >= CPU_AVX2 && w->most <= CPU_AMX;
    if (!known || isa > CPU_AMX || w->most > isa) {
        return err_set(e, ERR_INVALID,
                       "QUIRE_CPU_WAYS: \"%.32s\" is neither \"timed\" nor \"own\", nor an "
                       "instruction set for weights in blocks that %s has",
                       asked, cpu_isa_name(isa));
    }
    return 0;
}

/* Whether the two tables have the same functions for what c is of. */
static bool same(const struct candidates *c, const struct cpu_kernels *x,
                 const struct cpu_kernels *y)
{
    return c->class == BLOCKS_PANELS
               ? x->code_panels[c->format].dots == y->code_panels[c->format].dots
               : x->blocks.dots[c->format] == y->blocks.dots[c->format];
}

static void add_candidate(struct candidates *c, const struct cpu_kernels *k, enum cpu_isa isa)
{
    if (c->n == 0 || !same(c, c->of[c->n - 1], k)) {
        c->of[c->n] = k;
        c->name[c->n++] = cpu_isa_name(isa);
    }
}

static int32_t measure(void *arg)
{
    const struct candidates *c = arg;
    struct block_product *p = block_product_new(c->format);
    double least[SETS];

    if (!p) {
        return -1;
    }
    for (int r = 0; r < REPEATS; r++) { /* in turns: the clock rate rises meanwhile */
        for (int32_t i = 0; i < c->n; i++) {
            double us =
                block_product_us(p, c->class, &c->of[i]->blocks, &c->of[i]->code_panels[c->format]);
            least[i] = r == 0 ? us : MIN(least[i], us);
        }
    }
    block_product_free(p);
    return cpu_block_fastest(least, c->n);
}

static const struct cpu_kernels *choose(const struct cpu_block_ways *w, struct candidates *c)
{
    char name[NAME_BYTES];
    int32_t i = 0;

    if (w->timed && c->n > 1) {
        snprintf(name, sizeof(name), "%s.%s.%s", cpu_isa_name(w->isa), class_names[c->class],
                 weight_format_of(c->format)->name);
        i = cpu_way_kept(&(struct kept_choice){
            .name = name, .value = c->name, .n = c->n, .measure = measure, .arg = c});
    }
    return c->of[MAX(i, 0)];
}

void cpu_block_ways(struct cpu_block_ways *w, struct cpu_kernels *k, enum weight_format_id f)
{
    struct cpu_kernels set[SETS];

    if (!has_sets(w->isa) || w->known[f]) {
        return;
    }
    w->known[f] = true;
    for (int32_t i = 0; i < SETS; i++) {
        cpu_kernels_for(&set[i], set_isa[i], CPU_BF16_PAIRS);
    }
    for (int class = 0; class < BLOCK_CLASSES; class ++) {
        struct candidates c = {.format = f, .class = (enum cpu_block_class) class};
        for (int32_t i = 0; i < SETS; i++) {
            if (set_isa[i] <= w->most) {
                add_candidate(&c, &set[i], set_isa[i]);
            }
        }
        const struct cpu_kernels *best = choose(w, &c);
        if (class == BLOCKS_PANELS) {
            k->code_panels[f] = best->code_panels[f];
        } else {
            k->by_older[f][class == BLOCKS_FEW_ROWS] = best->blocks.dots[f] != k->blocks.dots[f];
        }
    }
}
