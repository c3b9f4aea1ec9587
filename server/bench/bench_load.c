/* The load: lengths, arrival times and prompts, all determined by the options and one
 * seed. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "server/bench/bench.h"

/* splitmix64: any state starts a good sequence, so each item's prompt can be generated
 * independently of the others. */
static uint64_t next(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;

    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static double uniform(uint64_t *state)
{
    return ((double)(next(state) >> 11) + 0.5) * 0x1p-53;
}

static int add(struct bench_load *l, int32_t *cap, int64_t n_prompt, int64_t max_tokens,
               struct err *e)
{
    if (l->n == *cap) {
        *cap = MAX(*cap * 2, 256);
        struct bench_item *p = realloc(l->item, (size_t)*cap * sizeof(*p));
        if (!p) {
            return err_nomem(e, "the workload");
        }
        l->item = p;
    }
    l->item[l->n++] =
        (struct bench_item){.n_prompt = (int32_t)n_prompt, .max_tokens = (int32_t)max_tokens};
    return 0;
}

/* Read a line "PROMPT OUTPUT". Empty lines and comments after # are skipped. */
static int read_line(struct bench_load *l, int32_t *cap, char *line, const char *file, int number,
                     struct err *e)
{
    long long prompt, output;
    char rest;
    line[strcspn(line, "#\n")] = '\0';
    if (line[strspn(line, " \t\r")] == '\0') {
        return 0;
    }
    if (sscanf(line, "%lld %lld %c", &prompt, &output, &rest) != 2 || prompt < 1 || output < 1 ||
        prompt > 1 << 20 || output > 1 << 20) {
        return err_set(e, ERR_INVALID, "%s, line %d: must be two lengths from 1 to 1048576", file,
                       number);
    }
    return add(l, cap, prompt, output, e);
}

static int read_file(struct bench_load *l, const struct bench_options *o, struct err *e)
{
    FILE *f = fopen(o->workload, "r");

    if (!f) {
        return err_set(e, ERR_IO, "%s: %s", o->workload, strerror(errno));
    }
    char line[256];
    int32_t cap = 0;
    int rc = 0;
    for (int number = 1;
         rc == 0 && (o->requests == 0 || l->n < o->requests) && fgets(line, sizeof(line), f);
         number++) {
        rc = read_line(l, &cap, line, o->workload, number, e);
    }
    fclose(f);
    if (rc == 0 && l->n == 0) {
        rc = err_set(e, ERR_INVALID, "%s holds no request", o->workload);
    }
    return rc;
}

/* The ids of a line, up to its end or a mark that is no number; false: no memory. */
static bool read_ids(char **line, int32_t **ids, int32_t *n)
{
    int32_t cap = 0;

    for (char *end; *n < 1 << 20; *line = end) {
        long id = strtol(*line, &end, 10);
        if (end == *line) {
            break;
        }
        if (*n >= cap) {
            cap = MAX(2 * cap, *n + 256);
            int32_t *more = realloc(*ids, (size_t)cap * sizeof(*more));
            if (!more) {
                return false;
            }
            *ids = more;
        }
        (*ids)[(*n)++] = (int32_t)id;
    }
    return true;
}

/* Read a line "ID ID … | ID ID …". */
static int read_scene(struct bench_load *l, int32_t *cap, char *line, const char *file, int number,
                      struct err *e)
{
    int32_t *ids = NULL, n_prompt = 0, n = 0;
    bool read = read_ids(&line, &ids, &n);

    n_prompt = n;
    line += strspn(line, " ");
    bool divided = *line == '|';
    line += divided;
    read = read && read_ids(&line, &ids, &n);
    int rc = !read ? err_nomem(e, "the script")
             : !divided || n_prompt < 1 || n == n_prompt
                 ? err_set(e, ERR_INVALID, "%s, line %d: must be ids, |, and ids", file, number)
                 : add(l, cap, n_prompt, n - n_prompt, e);
    if (rc < 0) {
        free(ids);
        return rc;
    }
    l->item[l->n - 1].prompt = ids;
    l->item[l->n - 1].answer = ids + n_prompt;
    return 0;
}

static int read_script(struct bench_load *l, const struct bench_options *o, struct err *e)
{
    FILE *f = fopen(o->script, "r");
    char *line = NULL;
    size_t size = 0;
    int32_t cap = 0;
    int rc = 0;

    if (!f) {
        return err_set(e, ERR_IO, "%s: %s", o->script, strerror(errno));
    }
    for (int number = 1;
         rc == 0 && (o->requests == 0 || l->n < o->requests) && getline(&line, &size, f) > 0;
         number++) {
        rc = read_scene(l, &cap, line, o->script, number, e);
    }
    free(line);
    fclose(f);
    return rc == 0 && l->n == 0 ? err_set(e, ERR_INVALID, "%s holds no request", o->script) : rc;
}

int bench_load_make(struct bench_load *ret, const struct bench_options *o, struct err *e)
{
    struct bench_load l = {.seed = (uint64_t)o->seed,
                           .vocab = (int32_t)(o->vocab ? o->vocab : 256)};
    int32_t cap = 0;
    int rc = o->script ? read_script(&l, o, e) : o->workload ? read_file(&l, o, e) : 0;

    for (int64_t i = 0; !o->script && !o->workload && i < o->requests && rc == 0; i++) {
        rc = add(&l, &cap, o->input_len, o->output_len, e);
    }
    if (rc < 0) {
        bench_load_release(&l);
        return rc;
    }
    uint64_t state = l.seed ^ 0x5157; /* of the arrivals */
    double at_s = 0;
    for (int32_t i = 0; i < l.n; i++) {
        struct bench_item *it = &l.item[i];
        l.max_prompt = MAX(l.max_prompt, it->n_prompt);
        l.prompt_tokens += it->n_prompt;
        l.output_tokens += (int64_t)it->max_tokens * o->n;
        if (o->request_rate > 0) {
            it->start_us = (int64_t)((at_s += -log(uniform(&state)) / o->request_rate) * 1e6);
        }
    }
    *ret = l;
    return 0;
}

void bench_load_release(struct bench_load *l)
{
    for (int32_t i = 0; i < l->n; i++) {
        free(l->item[i].prompt);
    }
    free(l->item);
    *l = (struct bench_load){0};
}

void bench_load_prompt(const struct bench_load *l, int32_t i, int32_t *ret)
{
    uint64_t state = l->seed * 0xd1342543de82ef95u + (uint64_t)i * 0x2545f4914f6cdd1du;

    if (l->item[i].prompt) {
        memcpy(ret, l->item[i].prompt, (size_t)l->item[i].n_prompt * sizeof(*ret));
        return;
    }
    for (int32_t k = 0; k < l->item[i].n_prompt; k++) {
        ret[k] = (int32_t)(next(&state) % (uint64_t)l->vocab);
    }
}
