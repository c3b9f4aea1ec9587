/* Records runs of a real model for `quire simulate`: lengths of outputs, and how beams
 * fork and die.
 *
 *     build/tests/bench/record_runs PROMPTS WIDTH [quire's options, --model DIR among them]
 *
 * PROMPTS has one prompt per line, as a JSON string. With WIDTH 0 each is sampled once
 * (temperature 1) until it ends; its line "length PROMPT OUTPUT STOP" gives its tokens,
 * and whether it ended by itself. Otherwise each is a beam search of that width; its
 * line "beam WIDTH STEP STEP ..." has one word per step, with one letter for each live
 * beam, best first: the rank of its parent in the step before, a for the best. All
 * requests run together, as they would in the server.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>

#include "config/settings/settings.h"
#include "engine/sched/decode/beam.h"
#include "engine/sched/decode/decode.h"
#include "engine/sched/decode/pack.h"
#include "engine/sched/sched_impl.h"
#include "engine/workers/executor.h"
#include "models/model.h"
#include "models/tokenizer/tokenizer.h"
#include "tests/sim/rig.h"

enum { MAX_PROMPTS = 1024, BEAM_TOKENS = 192, SAMPLE_TOKENS = 512, LINE_BYTES = 1 << 16 };

extern char **environ;

struct prompt {
    struct request request;
    struct group *group;
    _Atomic int32_t stop_at[LIMIT_CHOICES];
    int32_t tip[LIMIT_CHOICES], n_tips; /* the live beams' nodes, best first */
    char *word;                         /* [BEAM_TOKENS * (width + 1) + 1] */
    size_t n_word;
    int32_t n_out, finish;
};

static struct prompt prompt[MAX_PROMPTS];
static int32_t n_prompts, n_left, width;
static struct sched *sched;

static void must(bool ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "record_runs: %s\n", what);
        exit(1);
    }
}

static void on_delta(struct delta_out *o, const struct group *g, const struct delta *d)
{
    struct prompt *p = d->request->user;

    (void)o, (void)g;
    p->n_out += d->kind == DELTA_TOKEN;
    if (d->kind == DELTA_FINISH) {
        p->finish = d->finish;
    }
    if (d->kind != DELTA_END) {
        return;
    }
    p->group = NULL;
    n_left--;
    if (width == 0) {
        printf("length %d %d %d\n", d->request->n_prompt, p->n_out, p->finish == FINISH_STOP);
    } else {
        printf("beam %d%s\n", width, p->word);
    }
    fflush(stdout);
    fprintf(stderr, "%d left\n", n_left);
}

static void add(struct prompt *p, const char *text, const struct tokenizer *t,
                const struct sched_config *c)
{
    struct token_list ids = {0};
    struct err e = {0};

    must(tokenizer_encode(t, text, strlen(text), true, c->max_len, &ids, &e) == 0, e.text);
    p->request.params = rig_params();
    p->request.params.max_tokens = width > 0 ? BEAM_TOKENS : SAMPLE_TOKENS;
    p->request.params.beam_width = width;
    p->request.params.temperature = width > 0 ? 0 : 1;
    p->request.seed = (uint64_t)n_prompts;
    p->request.prompt = ids.id;
    p->request.n_prompt = ids.n;
    p->request.user = p;
    p->request.stop_at = p->stop_at;
    for (int32_t i = 0; i < LIMIT_CHOICES; i++) {
        atomic_init(&p->stop_at[i], INT32_MAX);
    }
    p->word = calloc(1, (size_t)BEAM_TOKENS * (size_t)(width + 1) + 1);
    must(p->word != NULL, "no memory");
    must(group_new(&p->group, &p->request, NULL, c, &e) == 0, e.text);
    must(sched_add(sched, p->group, 0) == 0, "the queue is full");
    n_left = ++n_prompts;
}

static void read_prompts(const char *path, const struct tokenizer *t, const struct sched_config *c)
{
    static char line[LINE_BYTES];
    FILE *f = fopen(path, "r");

    must(f != NULL, "cannot read the prompts");
    while (n_prompts < MAX_PROMPTS && fgets(line, sizeof(line), f)) {
        cJSON *text = cJSON_Parse(line);
        must(cJSON_IsString(text), "a prompt is no JSON string");
        add(&prompt[n_prompts], text->valuestring, t, c);
        cJSON_Delete(text);
    }
    fclose(f);
}

/* The live beams' nodes, best first. */
static int32_t tips(const struct group *g, int32_t *ret)
{
    const struct seq *q[LIMIT_CHOICES];
    int32_t n = 0;

    for (int32_t k = 0; k < g->width; k++) {
        if (g->seq[k].state != SEQ_LIVE) {
            continue;
        }
        int32_t i = n++;
        for (; i > 0 && q[i - 1]->cum_logprob < g->seq[k].cum_logprob; i--) {
            q[i] = q[i - 1];
        }
        q[i] = &g->seq[k];
    }
    for (int32_t i = 0; i < n; i++) {
        ret[i] = g->beam->tip[q[i]->index];
    }
    return n;
}

/* Record the parents of the live beams, if the step advanced this search. */
static void record_step(struct prompt *p)
{
    int32_t now[LIMIT_CHOICES], n = tips(p->group, now);

    if (n == p->n_tips && memcmp(now, p->tip, (size_t)n * sizeof(*now)) == 0) {
        return;
    }
    p->word[p->n_word++] = ' ';
    for (int32_t i = 0; i < n; i++) {
        int32_t parent = p->group->beam->node[now[i]].parent, rank = 0;
        while (rank < p->n_tips && p->tip[rank] != parent) {
            rank++;
        }
        must(rank < p->n_tips, "a beam has no parent");
        p->word[p->n_word++] = (char)('a' + rank);
    }
    memcpy(p->tip, now, sizeof(now));
    p->n_tips = n;
}

static void run(struct executor *x, struct packer *packer, const struct sched_config *c)
{
    struct plan plan;
    struct batch batch;
    struct results r;
    struct err e = {0};
    struct delta_out out = {.emit = on_delta};

    must(plan_init(&plan, c, &e) == 0, e.text);
    for (int32_t i = 0; i < n_prompts; i++) {
        prompt[i].n_tips = width > 0; /* the root: node 0 */
    }
    while (n_left > 0) {
        if (sched_plan(sched, 0, &plan) > 0) {
            pack_batch(packer, &plan, &batch);
            must(x->launch(x, &batch, &e) == 0 && x->wait(x, &r, &e) == 0, e.text);
            decode_commit(sched, &plan, &r, 0, &out);
            for (int32_t i = 0; width > 0 && i < n_prompts; i++) {
                if (prompt[i].group && prompt[i].group->state != GROUP_ENDED) {
                    record_step(&prompt[i]);
                }
            }
        }
        decode_reap(sched, &out);
    }
    plan_release(&plan);
}

int main(int argc, char **argv)
{
    struct settings s;
    struct err e = {0};
    struct model_config model;
    struct generation_defaults defaults;
    struct executor *x = NULL;
    struct packer *packer = NULL;
    struct tokenizer *t = NULL;
    bool help = false;

    must(argc > 3, "usage: record_runs PROMPTS WIDTH --model DIR [options]");
    width = atoi(argv[2]);
    must(width >= 0 && width <= 26, "a width from 0 to 26 is wanted");
    must(settings_load(&s, argc - 3, argv + 3, environ, &help, &e) == 0, e.text);
    must(model_config_read(&model, &defaults, s.model, &e) == 0, e.text);
    must(tokenizer_open(&t, s.model, &e) == 0, e.text);
    must(runner_open(&x, &s, s.model, &model, &e) == 0, e.text);
    struct sched_config c = {.n_blocks = x->info.n_blocks,
                             .block_size = x->info.block_size,
                             .vocab = x->info.vocab,
                             .max_len = x->info.max_len,
                             .max_num_seqs = x->info.max_num_seqs,
                             .max_num_batched_tokens = x->info.max_num_batched_tokens,
                             .max_logits = x->info.max_samples,
                             .max_waiting = MAX_PROMPTS,
                             .preemption = PREEMPT_RECOMPUTE,
                             .n_eos = model.n_eos};
    memcpy(c.eos, model.eos, sizeof(c.eos));
    must(sched_new(&sched, &c, &e) == 0 && packer_new(&packer, &c, &e) == 0, e.text);
    read_prompts(argv[1], t, &c);
    run(x, packer, &c);
    sched_free(sched);
    packer_free(packer);
    x->free(x);
    tokenizer_free(t);
    for (int32_t i = 0; i < n_prompts; i++) {
        free(prompt[i].request.prompt);
        free(prompt[i].word);
    }
    settings_release(&s);
    return 0;
}
