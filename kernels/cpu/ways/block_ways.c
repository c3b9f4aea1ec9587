/* See block_ways.h. */
#include "kernels/cpu/ways/block_ways.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/ways/kept_ways.h"

enum {
    SETS = 3,
    WAYS = MAX(SETS, 1 + OTHER_BLOCKS),
    REPEATS = 12, /* the least time counts: others are those of interruptions */
    NAME_BYTES = 48
};

/* Those that have panels of their own for blocks, newest first. */
static const enum cpu_isa set_isa[SETS] = {CPU_AMX, CPU_AVX512_VNNI, CPU_AVX2};
static const char *const class_names[] = {
    [BLOCKS_ONE_ROW] = "one-row", [BLOCKS_FEW_ROWS] = "few-rows", [BLOCKS_PANELS] = "panels"};

/* Functions for a format that differ, those of the newest set first. */
struct candidates {
    enum weight_format_id format;
    enum cpu_block_class class;
    const struct cpu_blocks *blocks[WAYS];      /* [n] of rows */
    const struct cpu_code_panels *panels[WAYS]; /* [n] of panels */
    const char *name[WAYS];                     /* [n] */
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
    w->halved = strcmp(asked, "avx512vnni-256") == 0;
    bool known = cpu_isa_named(&w->most, w->halved ? "avx512vnni" : asked) && w->most >= CPU_AVX2 &&
                 w->most <= CPU_AMX;
    if (!known || isa > CPU_AMX || w->most > isa) {
        return err_set(e, ERR_INVALID,
                       "QUIRE_CPU_WAYS: \"%.32s\" is neither \"timed\" nor \"own\", nor an "
                       "instruction set for weights in blocks that %s has",
                       asked, cpu_isa_name(isa));
    }
    return 0;
}

static int32_t measure(void *arg)
{
    const struct candidates *c = arg;
    struct block_product *p = block_product_new(c->format);
    double least[WAYS];

    if (!p) {
        return -1;
    }
    for (int r = 0; r < REPEATS; r++) { /* in turns: the clock rate rises meanwhile */
        for (int32_t i = 0; i < c->n; i++) {
            double us = block_product_us(p, c->class, c->blocks[i], c->panels[i]);
            least[i] = r == 0 ? us : MIN(least[i], us);
        }
    }
    block_product_free(p);
    return cpu_block_fastest(least, c->n);
}

/* Returns the index of the candidate that is taken. */
static int32_t choose(const struct cpu_block_ways *w, struct candidates *c)
{
    char name[NAME_BYTES];

    if (!w->timed || c->n < 2) {
        return 0;
    }
    snprintf(name, sizeof(name), "%s.%s.%s", cpu_isa_name(w->isa), class_names[c->class],
             weight_format_of(c->format)->name);
    int32_t i = cpu_way_kept(&(struct kept_choice){
        .name = name, .value = c->name, .n = c->n, .measure = measure, .arg = c});
    return MAX(i, 0);
}

static void choose_rows(const struct cpu_block_ways *w, struct cpu_kernels *k,
                        enum weight_format_id f, enum cpu_block_class class)
{
    struct candidates c = {.format = f, .class = class};
    uint8_t number[WAYS]; /* [c.n] in by_other */

    for (uint8_t i = 0; i <= OTHER_BLOCKS; i++) {
        const struct cpu_blocks *b = i > 0 ? &k->other[i - 1] : &k->blocks;
        bool known = b->dots[f] && (i == 0 || b->dots[f] != k->blocks.dots[f]);
        bool asked = w->most == CPU_AVX2 ? i == 1 + OTHER_BLOCKS_AVX2
                     : w->halved         ? i == 1 + OTHER_BLOCKS_256
                                         : true;
        if (known && asked) {
            c.blocks[c.n] = b;
            c.name[c.n] = b->way;
            number[c.n++] = i;
        }
    }
    k->by_other[f][class == BLOCKS_FEW_ROWS] = c.n > 0 ? number[choose(w, &c)] : 0;
}

static void choose_panels(const struct cpu_block_ways *w, struct cpu_kernels *k,
                          enum weight_format_id f)
{
    struct candidates c = {.format = f, .class = BLOCKS_PANELS};
    struct cpu_kernels set[SETS];

    for (int32_t i = 0; i < SETS; i++) {
        cpu_kernels_for(&set[i], set_isa[i], CPU_BF16_PAIRS);
        const struct cpu_code_panels *p = &set[i].code_panels[f];
        if (set_isa[i] <= w->most && (c.n == 0 || p->dots != c.panels[c.n - 1]->dots)) {
            c.panels[c.n] = p;
            c.name[c.n++] = cpu_isa_name(set_isa[i]);
        }
    }
    k->code_panels[f] = *c.panels[choose(w, &c)];
}

void cpu_block_ways(struct cpu_block_ways *w, struct cpu_kernels *k, enum weight_format_id f)
{
    if (!has_sets(w->isa) || w->known[f] || f == FORMAT_F32) {
        return;
    }
    w->known[f] = true;
    choose_rows(w, k, f, BLOCKS_ONE_ROW);
    choose_rows(w, k, f, BLOCKS_FEW_ROWS);
    if (f < FORMAT_FP8) {
        choose_panels(w, k, f);
    }
}
