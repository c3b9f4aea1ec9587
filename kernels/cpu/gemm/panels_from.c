/* From how many rows of x panels multiply plain weights in the place of tiles. Both
 * take the same sums, so that the choice changes no bits. Panels convert and turn rows
 * of w around first, which tiles do not, and how many rows of x that is worth depends
 * on the processor and its caches.
 *
 * A product of a few megabytes is timed as a step runs it, with half as many rows as
 * are built in, and with as many; the threshold is halved or doubled where that is
 * clearly faster. The choice is kept for the machine and the number of threads. */
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/ways/kept_ways.h"

enum {
    ROWS = 512, /* of w */
    COLS = 1024,
    MOST_FROM = 512, /* rows of x */
    REPEATS = 8,     /* the least time counts */
    NAME_BYTES = 64
};

static const char *const from_names[] = {
    [CPU_FROM_HALF] = "half", [CPU_FROM_BUILT] = "built", [CPU_FROM_TWICE] = "twice"};

struct trial {
    struct cpu_backend *c;
    struct cpu_panels *panels;
    struct mat out, x, w;
    int32_t from; /* as it is built */
};

enum cpu_from cpu_from_choice(const double tiles_us[2], const double panels_us[2])
{
    const double margin = 1.05;

    return panels_us[0] * margin < tiles_us[0]   ? CPU_FROM_HALF
           : tiles_us[1] * margin < panels_us[1] ? CPU_FROM_TWICE
                                                 : CPU_FROM_BUILT;
}

static double time_rows(const struct trial *t, int32_t rows, bool panels)
{
    const struct epilogue none = {0};
    int64_t began = clock_us();

    t->panels->from = panels ? 1 : INT32_MAX;
    cpu_linear_tiled(t->c, mat_rows(t->out, 0, rows), mat_rows(t->x, 0, rows), t->w, &none);
    return (double)(clock_us() - began);
}

static enum cpu_from time_both(const struct trial *t)
{
    double us[2][2] = {{0}}; /* tiles and panels */

    for (int r = 0; r < REPEATS; r++) { /* in turns: the clock rate rises meanwhile */
        for (int i = 0; i < 4; i++) {
            double *least = &us[i % 2][i / 2];
            double now = time_rows(t, i / 2 == 0 ? t->from / 2 : t->from, i % 2 == 1);
            *least = r == 0 ? now : MIN(*least, now);
        }
    }
    t->panels->from = t->from;
    return cpu_from_choice(us[0], us[1]);
}

static int32_t measure(void *arg)
{
    struct trial *t = arg;
    size_t n_w = (size_t)ROWS * COLS * (size_t)dtype_bytes(t->w.dtype),
           n_x = (size_t)t->from * COLS * sizeof(float),
           n_out = (size_t)t->from * ROWS * sizeof(float), all = n_w + n_x + n_out;
    char *data = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (data == MAP_FAILED) {
        return -1;
    }
    memset(data, 0x3f, all); /* an ordinary number of any type */
    t->w.data = data;
    t->x.data = data + n_w;
    t->out.data = data + n_w + n_x;
    enum cpu_from found = time_both(t);
    munmap(data, all);
    return t->c->failed.code == 0 ? (int32_t)found : -1;
}

void cpu_panels_from(struct cpu_backend *c, enum dtype t)
{
    bool pairs = t == DTYPE_BF16;
    struct cpu_panels *p = pairs ? &c->k.panels_bf16 : &c->k.panels;
    struct trial trial = {
        .c = c,
        .panels = p,
        .from = p->from,
        .out = {.stride = ROWS, .rows = p->from, .cols = ROWS, .dtype = DTYPE_F32},
        .x = {.stride = COLS, .rows = p->from, .cols = COLS, .dtype = DTYPE_F32},
        .w = {.stride = COLS, .rows = ROWS, .cols = COLS, .dtype = t}};
    char name[NAME_BYTES];

    /* tiles of all rows at once read w as one stream, whatever their arithmetic
     * takes */
    bool two = p->k_block > 0 && p->from <= MOST_FROM && p->from / 2 > cpu_tiles_of(&c->k, t)->rows;
    if (c->from_known[pairs] || !c->ways.timed || !two) {
        return;
    }
    c->from_known[pairs] = true;
    snprintf(name, sizeof(name), "%s.panels-from.%s.%d-threads", cpu_isa_name(c->ways.isa),
             pairs ? "bf16" : "floats", cpu_pool_threads(c->pool));
    int32_t found = cpu_way_kept(&(struct kept_choice){.name = name,
                                                       .value = from_names,
                                                       .n = (int32_t)ARRAY_LEN(from_names),
                                                       .measure = measure,
                                                       .arg = &trial});
    p->from = found == CPU_FROM_HALF    ? trial.from / 2
              : found == CPU_FROM_TWICE ? trial.from * 2
                                        : trial.from;
}
