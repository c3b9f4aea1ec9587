#include "engine/speculate/script.h"

#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

struct scene {
    uint64_t key; /* of the prompt */
    int32_t *token, n;
};

struct script {
    struct scene *scene; /* [cap] */
    int32_t n, cap;      /* of these */
    int32_t *token;      /* [max_samples] of a step */
    int32_t max_samples;
    /* The sequence asked about last, by its group's number, and its scene. */
    uint64_t order;
    const struct scene *last;
};

int script_open(struct script **ret, int32_t max_samples, struct err *e)
{
    struct script *s = calloc(1, sizeof(*s));

    if (s) {
        s->token = malloc((size_t)max_samples * sizeof(*s->token));
    }
    if (!s || !s->token) {
        script_free(s);
        return err_nomem(e, "the script");
    }
    s->max_samples = max_samples;
    s->order = UINT64_MAX;
    *ret = s;
    return 0;
}

void script_free(struct script *s)
{
    if (!s) {
        return;
    }
    for (int32_t i = 0; i < s->n; i++) {
        free(s->scene[i].token);
    }
    free(s->scene);
    free(s->token);
    free(s);
}

static uint64_t key_of(const int32_t *prompt, int32_t n)
{
    return XXH3_64bits(prompt, (size_t)n * sizeof(*prompt));
}

int script_add(struct script *s, const int32_t *prompt, int32_t n_prompt, const int32_t *answer,
               int32_t n_answer, struct err *e)
{
    if (s->n == s->cap) {
        int32_t cap = MAX(2 * s->cap, 64);
        struct scene *more = realloc(s->scene, (size_t)cap * sizeof(*more));
        if (!more) {
            return err_nomem(e, "the script");
        }
        s->scene = more;
        s->cap = cap;
    }
    int32_t *token = malloc((size_t)MAX(n_answer, 1) * sizeof(*token));
    if (!token) {
        return err_nomem(e, "the script");
    }
    memcpy(token, answer, (size_t)n_answer * sizeof(*token));
    s->scene[s->n++] = (struct scene){key_of(prompt, n_prompt), token, n_answer};
    s->order = UINT64_MAX;
    return 0;
}

static const struct scene *scene_of(struct script *s, const struct group *g)
{
    if (g->order == s->order) {
        return s->last;
    }
    uint64_t key = key_of(g->request->prompt, g->n_prompt);
    s->order = g->order;
    s->last = NULL;
    for (int32_t i = 0; i < s->n && !s->last; i++) {
        s->last = s->scene[i].key == key ? &s->scene[i] : NULL;
    }
    return s->last;
}

static void apply_item(struct script *s, const struct plan_item *it)
{
    const struct seq *q = it->seq;
    int32_t n = it->n_sampled == 1 ? it->n_verify + 1 : it->n_sampled;
    const struct scene *scene;

    if (it->n_sampled == 0 || q->group->state == GROUP_ENDED || q->state != SEQ_LIVE ||
        !(scene = scene_of(s, q->group))) {
        return;
    }
    for (int32_t i = 0; i < n; i++) {
        int32_t at = q->n_out + (it->n_sampled == 1 ? i : 0);
        if (at < scene->n) {
            s->token[it->sample_first + it->n_scores + i] = scene->token[at];
        }
    }
}

void script_apply(struct script *s, const struct plan *p, struct results *r)
{
    memcpy(s->token, r->token, (size_t)MIN(r->n_samples, s->max_samples) * sizeof(*s->token));
    for (int32_t i = 0; i < p->n_items; i++) {
        apply_item(s, &p->item[i]);
    }
    r->token = s->token;
}
