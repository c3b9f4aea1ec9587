/* What drafts bring on a device whose step times are given: the real scheduler and
 * sources of drafts, texts from a file, and no device. The same call gives the same
 * figures on every machine, so single answers can be compared.
 *
 *     build/tests/bench/draft_times [us=12000,12900,...] [many=900] [noise=3]
 *         [swing=10] [host=100] [model=100] [streams=1] [warm=0] [max=8] [chance=P] FILE
 *
 * FILE has a line an answer, the ids of its prompt, a bar, and its own
 * (tests/bench/edits --write, tests/bench/open_chat --write); no two prompts are the
 * same. A step of n rows takes the n-th of `us`, and `many` for each row more. The
 * scheduler sees these times disturbed by `noise` per cent from step to step and by
 * `swing` per cent over minutes, and was told at start that rows take `model` per cent
 * of what they do. A step that could not be planned ahead begins `host` microseconds
 * late. The first `warm` answers are only remembered. Drafts come from earlier text, or
 * with `chance` hold with that chance.
 *
 * Prints each answer's time without drafts over that with them, of the times
 * undisturbed.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/sched/decode/decode.h"
#include "engine/sched/sched_impl.h"
#include "engine/speculate/replay.h"
#include "engine/speculate/script.h"
#include "engine/speculate/text/suffix.h"
#include "tests/sim/rig.h"
#include "tests/sim/toy.h"

enum { ROWS = 64, BLOCK = 16, VOCAB = 1 << 18, MOST_LEN = 1 << 15, LINE_BYTES = 1 << 20 };

struct scene {
    int32_t *token, n_prompt, n_answer;
    double begin_us, us[2]; /* of decoding without drafts, and with them */
};

static struct options {
    double us[ROWS], many, noise, swing, host, model, chance;
    int32_t n_us, streams, warm, max;
} o = {.us = {12000},
       .many = 900,
       .noise = 3,
       .swing = 10,
       .host = 100,
       .model = 100,
       .chance = -1,
       .n_us = 1,
       .streams = 1,
       .max = 8};

static struct scene *scene;
static int32_t n_scenes;
static double now_us;
static _Atomic int32_t stop_at[LIMIT_CHOICES];

static void must(bool ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "draft_times: %s\n", what);
        exit(1);
    }
}

/* ---- the device ---- */

static double table_us(int32_t rows)
{
    return o.us[MIN(rows, o.n_us) - 1] + MAX(rows - o.n_us, 0) * o.many;
}

/* A normal number. */
static double normal(struct rng *rng)
{
    double sum = 0;

    for (int32_t i = 0; i < 12; i++) {
        sum += rng_range(rng, 0, 1 << 20) / (double)(1 << 20);
    }
    return sum - 6;
}

/* How much slower the device is than it should be, per cent. */
static double disturbed(struct rng *rng, double *swing)
{
    const double SLOW = 0.995;

    *swing = SLOW * *swing + sqrt(1 - SLOW * SLOW) * o.swing * normal(rng);
    return *swing + o.noise * normal(rng);
}

static struct step_cost cost_model(void)
{
    double row = (table_us(STEP_FEW_ROWS) - table_us(1)) / (STEP_FEW_ROWS - 1),
           many = (table_us(ROWS) - table_us(STEP_FEW_ROWS)) / (ROWS - STEP_FEW_ROWS);

    return (struct step_cost){.fixed_us = table_us(1),
                              .token_us = row / 4,
                              .row_us = row * o.model / 100,
                              .many_row_us = many * o.model / 100};
}

/* ---- runs ---- */

static void on_delta(struct delta_out *out, const struct group *g, const struct delta *d)
{
    struct scene *s = d->request->user;

    (void)out, (void)g;
    if (d->kind == DELTA_TOKEN && s->begin_us < 0) {
        s->begin_us = now_us;
    }
    if (d->kind == DELTA_FINISH) {
        s->us[1] += now_us - s->begin_us;
    }
}

static void add(struct sched *sched, struct scene *s, int32_t i)
{
    struct request *r = calloc(1, sizeof(*r)); /* kept until the process ends */
    struct group *g;
    struct err e = {0};

    must(r != NULL, "no memory");
    r->params = rig_params();
    r->params.max_tokens = s->n_answer;
    r->params.seed = r->seed = i;
    r->prompt = s->token;
    r->n_prompt = s->n_prompt;
    r->user = s;
    r->stop_at = stop_at;
    s->begin_us = -1;
    must(group_new(&g, r, NULL, sched_config(sched), &e) == 0, e.text);
    must(sched_add(sched, g, (int64_t)now_us) == 0, "the queue is full");
}

/* Answer scenes [first, end). */
static void run(struct sched *sched, struct script *script, int32_t first, int32_t end,
                struct rng *rng)
{
    static int32_t token[ROWS * 256];
    static float logprob[ARRAY_LEN(token)];
    static struct plan plan[2];
    struct delta_out out = {.emit = on_delta};
    struct err e;
    uint64_t launched = 0, committed = 0;
    int32_t active = 0, next = first;
    double swing = 0;

    must(plan[0].item || (plan_init(&plan[0], sched_config(sched), &e) == 0 &&
                          plan_init(&plan[1], sched_config(sched), &e) == 0),
         "no memory");
    while (active > 0 || next < end) {
        for (; active < o.streams && next < end; active++) {
            add(sched, &scene[next], next);
            next++;
        }
        bool runs = launched > committed;
        int32_t n =
            launched - committed < 2 ? sched_plan(sched, (int64_t)now_us, &plan[launched % 2]) : 0;
        if (n > 0) {
            launched++;
            now_us += runs ? 0 : o.host;
            if (!runs) {
                sched_observe_gap(sched, &plan[(launched - 1) % 2], (int64_t)o.host);
                continue; /* one more may be planned while it runs */
            }
        }
        struct plan *p = &plan[committed % 2];
        double us = table_us(p->n_tokens);
        now_us += p->n_tokens > p->n_items + p->n_verify ? 0 : us;
        struct results r = {
            .step = p->step, .n_samples = p->n_samples, .token = token, .logprob = logprob};
        script_apply(script, p, &r);
        sched_observe(sched, p, (int64_t)(us * (1 + disturbed(rng, &swing) / 100)));
        decode_commit(sched, p, &r, 0, &out);
        committed++;
        active -= decode_reap(sched, &out);
    }
}

static struct sched *open_sched(void)
{
    struct sched_config c = {.n_blocks = 2 * o.streams * (MOST_LEN / BLOCK),
                             .block_size = BLOCK,
                             .vocab = VOCAB,
                             .max_len = MOST_LEN,
                             .max_num_seqs = o.streams,
                             .max_num_batched_tokens = MOST_LEN,
                             .max_logits = o.streams + 256,
                             .max_waiting = o.streams + 1,
                             .preemption = PREEMPT_RECOMPUTE,
                             .cost = cost_model()};
    struct sched *sched;
    struct err e;

    must(sched_new(&sched, &c, &e) == 0, e.text);
    return sched;
}

/* ---- the command line ---- */

static int32_t *numbers(const char *text, int32_t *n, const char *end)
{
    int32_t *v = malloc((strlen(text) / 2 + 1) * sizeof(*v));
    char *next;

    must(v != NULL, "no memory");
    for (*n = 0; text < end; text = next) {
        long number = strtol(text, &next, 10);
        if (next == text) {
            break;
        }
        v[(*n)++] = (int32_t)number;
    }
    return v;
}

static void read_scenes(const char *path, struct script *script)
{
    static char line[LINE_BYTES];
    FILE *f = fopen(path, "r");
    struct err e;

    must(f != NULL, "cannot open the file");
    while (fgets(line, sizeof(line), f)) {
        char *bar = strchr(line, '|');
        must(bar != NULL, "a line without a bar");
        struct scene s = {0};
        s.token = numbers(line, &s.n_prompt, bar);
        int32_t *answer = numbers(bar + 1, &s.n_answer, line + strlen(line));
        must(script_add(script, s.token, s.n_prompt, answer, s.n_answer, &e) == 0, e.text);
        free(answer);
        scene = realloc(scene, ((size_t)n_scenes + 1) * sizeof(*scene));
        must(scene != NULL, "no memory");
        scene[n_scenes++] = s;
    }
    fclose(f);
}

static void parse(const char *word)
{
    static const struct {
        const char *name;
        double *value;
        int32_t *number;
    } OPTIONS[] = {
        {"many", &o.many, NULL},       {"noise", &o.noise, NULL}, {"swing", &o.swing, NULL},
        {"host", &o.host, NULL},       {"model", &o.model, NULL}, {"chance", &o.chance, NULL},
        {"streams", NULL, &o.streams}, {"warm", NULL, &o.warm},   {"max", NULL, &o.max},
    };
    const char *value = strchr(word, '=');

    must(value != NULL, word);
    if (strncmp(word, "us=", 3) == 0) {
        char *next = (char *)value;
        for (o.n_us = 0; o.n_us < ROWS && *next; o.n_us++) {
            o.us[o.n_us] = strtod(next + 1, &next);
        }
        return;
    }
    for (size_t i = 0; i < ARRAY_LEN(OPTIONS); i++) {
        if (strncmp(word, OPTIONS[i].name, (size_t)(value - word)) == 0) {
            if (OPTIONS[i].value) {
                *OPTIONS[i].value = atof(value + 1);
            } else {
                *OPTIONS[i].number = atoi(value + 1);
            }
        }
    }
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

static void report(const struct sched *sched)
{
    double *ratio = calloc((size_t)n_scenes + 1, sizeof(*ratio)), sum[2] = {0, 0};
    struct sched_counts c;
    int32_t n = 0;
    uint64_t held = 0;

    must(ratio != NULL, "no memory");
    for (int32_t i = o.warm; i < n_scenes; i++) {
        ratio[n++] = scene[i].us[0] / scene[i].us[1];
        sum[0] += scene[i].us[0];
        sum[1] += scene[i].us[1];
        printf("%s%.3f", n % 20 == 1 ? "\n" : " ", ratio[n - 1]);
    }
    sched_counts(sched, &c);
    for (int32_t i = 0; i < LIMIT_DRAFT; i++) {
        held += c.accepted_tokens[i];
    }
    qsort(ratio, (size_t)n, sizeof(*ratio), by_value);
    printf("\n%d answers: %.4f times, the least %.4f, the median %.4f; %llu of %llu drafts held\n",
           n, sum[0] / sum[1], ratio[0], ratio[n / 2], (unsigned long long)held,
           (unsigned long long)c.draft_tokens);
    free(ratio);
}

int main(int argc, char **argv)
{
    struct suffix_config drafts = {.n_seqs = 64,
                                   .max_len = MOST_LEN,
                                   .bytes = 64 << 20,
                                   .store_tokens = 1 << 20,
                                   .follower_sets = 1 << 18,
                                   .secret = 1};
    struct suffix_drafts *suffix;
    struct script *script;
    struct replay *replay;
    struct err e;
    struct rng rng = {1};

    must(argc >= 2, "usage: draft_times [NAME=VALUE]... FILE");
    must(script_open(&script, ROWS * 256, &e) == 0 && suffix_open(&suffix, &drafts, &e) == 0 &&
             replay_open(&replay, VOCAB, NULL, &e) == 0,
         "no memory");
    for (int i = 1; i < argc - 1; i++) {
        parse(argv[i]);
    }
    for (int32_t i = 0; i < LIMIT_CHOICES; i++) {
        atomic_init(&stop_at[i], INT32_MAX);
    }
    read_scenes(argv[argc - 1], script);
    struct sched *plain = open_sched(), *drafted = open_sched();
    sched_speculate(drafted, o.chance < 0 ? suffix_source(suffix) : replay_source(replay), o.max);
    run(plain, script, 0, n_scenes, &rng);
    for (int32_t i = 0; i < n_scenes; i++) {
        scene[i].us[0] = scene[i].us[1];
        scene[i].us[1] = 0;
    }
    float chance = (float)o.chance;
    if (o.chance >= 0) {
        run(drafted, script, 0, n_scenes, &rng);
        replay_set(replay, &chance, 1);
    } else {
        run(drafted, script, 0, o.warm, &rng);
    }
    for (int32_t i = 0; i < n_scenes; i++) {
        scene[i].us[1] = 0;
    }
    run(drafted, script, o.warm, n_scenes, &rng);
    report(drafted);
    sched_free(plain);
    sched_free(drafted);
    return 0;
}
