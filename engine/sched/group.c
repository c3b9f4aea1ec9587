/* Makes and frees groups, on the submitting thread. A request that could never run is
 * refused here, before it takes any block. */
#include "engine/sched/seq.h"

#include <stdlib.h>
#include <string.h>

#include "config/base/slab.h"
#include "engine/sched/decode/beam.h"
#include "engine/sched/decode/beam_text.h"
#include "engine/sched/sched.h"

static struct slab groups = SLAB_OF(struct group); /* a step walks over those that run */
_Static_assert(offsetof(struct group, first) % 64 == 0, "`first` begins a cache line");

void word_list_release(struct word_list *w)
{
    free(w->token);
    free(w->first);
    *w = (struct word_list){0};
}

/* ---- refusals ---- */

static int check_ids(const int32_t *id, int32_t n, const char *field, const struct sched_config *c,
                     struct err *e)
{
    for (int32_t i = 0; i < n; i++) {
        if (id[i] < 0 || id[i] >= c->vocab) {
            return err_set_param(e, ERR_INVALID, field,
                                 "%s: token id %d is outside the vocabulary (0 to %d)", field,
                                 id[i], c->vocab - 1);
        }
    }
    return 0;
}

static int check_bias_ids(const struct gen_params *p, const struct sched_config *c, struct err *e)
{
    for (int32_t i = 0; i < p->n_bias; i++) {
        if (check_ids(&p->bias[i].token, 1, "logit_bias", c, e) < 0) {
            return ERR_INVALID;
        }
    }
    return 0;
}

static int check_tokens(const struct request *r, const struct sched_config *c, struct err *e)
{
    const struct gen_params *p = &r->params;
    int rc = check_ids(r->prompt, r->n_prompt, "prompt", c, e);

    if (r->shared && r->shared->checked) {
        return rc;
    }
    if (rc == 0) {
        rc = check_ids(p->stop_token, p->n_stop_token, "stop_token_ids", c, e);
    }
    if (rc == 0) {
        rc = check_ids(p->allowed_token, p->n_allowed, "allowed_token_ids", c, e);
    }
    if (rc == 0) {
        rc = check_bias_ids(p, c, e);
    }
    if (rc == 0 && r->shared) {
        r->shared->checked = true;
    }
    return rc;
}

/* Blocks of one sequence at its longest; its last token is never computed. */
static int32_t blocks_of(int32_t n_prompt, int32_t max_tokens, int32_t block_size)
{
    return (int32_t)div_ceil((int64_t)n_prompt + MAX(max_tokens - 1, 0), block_size);
}

/* The most blocks that a group holds at a time, in all KV groups: after a recompute
 * (struct demand, sched_admit.c), with at most the blocks of each sequence's window. */
static int64_t blocks_needed(int32_t n_prompt, int32_t max_tokens, int32_t width,
                             const struct sched_config *c)
{
    int64_t most = blocks_of(n_prompt, max_tokens, c->block_size), n = 0;
    int64_t shared = (n_prompt - 1) / c->block_size;

    for (int32_t k = 0; k < sched_kv_groups(c); k++) {
        int64_t seq = sched_window_blocks(c, k);
        n += MIN(shared + width * (most - shared), width * seq);
    }
    return n;
}

/* Whether a group of `width` sequences could run alone. */
static int check_fit(const struct request *r, int32_t width, int32_t max_tokens,
                     const struct sched_config *c, struct err *e)
{
    const struct gen_params *p = &r->params;
    const char *field = !p->max_tokens_yields ? "max_tokens" : width > 1 ? "n" : "prompt";

    if (r->n_prompt < 1) {
        return err_set_param(e, ERR_INVALID, "prompt", "the prompt has no tokens");
    }
    if (max_tokens < 0 || (int64_t)r->n_prompt + max_tokens > c->max_len) {
        return err_set_param(
            e, ERR_INVALID, field,
            "%d prompt tokens and max_tokens %d are %lld, more than the model length of %d tokens",
            r->n_prompt, max_tokens, (long long)r->n_prompt + max_tokens, c->max_len);
    }
    if (width < 1 || width > c->max_num_seqs) {
        return err_set_param(
            e, ERR_INVALID, p->beam_width > 0 ? "beam_width" : "n",
            "%d sequences of one request are more than the %d that run at a time (max_num_seqs)",
            width, c->max_num_seqs);
    }
    int64_t need = blocks_needed(r->n_prompt, max_tokens, width, c);
    if (need > c->n_blocks - c->n_pinned) {
        return err_set_param(e, ERR_INVALID, field,
                             "%d prompt tokens and %d sequences of up to %d tokens need %lld KV "
                             "blocks of %d tokens; "
                             "there are %d",
                             r->n_prompt, width, max_tokens, (long long)need, c->block_size,
                             c->n_blocks - c->n_pinned);
    }
    if (c->preemption == PREEMPT_SWAP && need > c->n_host_blocks) {
        return err_set_param(e, ERR_INVALID, field,
                             "%d prompt tokens and %d sequences of up to %d tokens need %lld KV "
                             "blocks; preemption is swap, "
                             "and swap_space holds %d",
                             r->n_prompt, width, max_tokens, (long long)need, c->n_host_blocks);
    }
    struct reserve_rule rule = sched_reserve_rule(c);
    if (c->kv_policy != KV_PAGED && width > reserve_most(&rule, r->n_prompt, max_tokens)) {
        return err_set_param(e, ERR_INVALID, field,
                             "%d prompt tokens and %d sequences of up to %d tokens do not fit into "
                             "the contiguous memory of kv_policy (%d tokens)",
                             r->n_prompt, width, max_tokens, rule.slots);
    }
    return 0;
}

/* The request's max_tokens. A default is lowered to the most that fits, but not below
 * min_tokens. */
static int32_t tokens_of(const struct request *r, int32_t width, const struct sched_config *c)
{
    const struct gen_params *p = &r->params;
    int32_t most = p->max_tokens, least = MIN(MAX(p->min_tokens, 1), most);

    if (!p->max_tokens_yields || check_fit(r, width, most, c, NULL) == 0) {
        return most;
    }
    while (least < most) { /* `most` does not fit */
        int32_t half = least + (most - least) / 2;
        if (half > least && check_fit(r, width, half, c, NULL) == 0) {
            least = half;
        } else {
            most = half;
        }
    }
    return least;
}

/* Every list is within what the packer holds for a row (LIMIT_ROW_BIASES). */
static int check_lists(const struct gen_params *p, const struct word_list *words, struct err *e)
{
    const struct {
        const char *field;
        int32_t n, most;
    } list[] = {{"logit_bias", p->n_bias, LIMIT_LOGIT_BIAS},
                {"stop_token_ids", p->n_stop_token, LIMIT_STOP_TOKEN_IDS},
                {"bad_words", words ? words->n : 0, 2 * LIMIT_BAD_WORDS}};

    for (size_t i = 0; i < ARRAY_LEN(list); i++) {
        if (list[i].n > list[i].most) {
            return err_set_param(e, ERR_INVALID, list[i].field,
                                 "%s has %d entries; at most %d are allowed", list[i].field,
                                 list[i].n, list[i].most);
        }
    }
    return 0;
}

/* ---- making a group ---- */

/* Set the fields that follow from the request. */
static void group_read_params(struct group *g, int32_t max_tokens, const struct sched_config *c)
{
    const struct gen_params *p = &g->request->params;

    g->n_prompt = g->request->n_prompt;
    g->max_tokens = max_tokens;
    g->priority = c->policy == POLICY_PRIORITY ? p->priority : 0;
    g->tenant = c->policy == POLICY_FAIR ? g->request->tenant : 0;
    g->max_blocks = blocks_of(g->n_prompt, g->max_tokens, c->block_size);
    g->scores = p->n_prompt_logprobs >= 0 || (p->echo && p->n_logprobs >= 0);
    g->wait_index = g->resume_need = g->mask = -1;
    g->beams = p->beam_width > 0;
    g->lookahead = p->beam_width == 0; /* the host ranks the candidates of beams */
    for (int32_t w = 0; w < g->words.n; w++) {
        if (g->words.first[w + 1] - g->words.first[w] > 1) {
            /* whether its last token is banned depends on tokens that the host must
             * know */
            g->lookahead = false;
        }
    }
}

static void first_init(struct group *g)
{
    g->first = (struct seq){.group = g, .slot = -1, .n_tokens = g->n_prompt};
    g->first.seed = seq_seed(g->request->seed, 0);
    g->seq = &g->first;
    g->n_seqs = 1;
}

/* Its memory must fit if it runs alone. */
static int check_memory(const struct group *g, const struct sched_config *c, struct err *e)
{
    if (c->group_bytes == 0 || g->n_bytes <= c->group_bytes) {
        return 0;
    }
    return err_set_param(
        e, ERR_INVALID, "max_tokens",
        "%d sequences of up to %d tokens need %lld bytes of tables; there are %lld", g->width,
        g->max_tokens, (long long)g->n_bytes, (long long)c->group_bytes);
}

int group_new(struct group **ret, struct request *r, const struct word_list *words,
              const struct sched_config *c, struct err *e)
{
    const struct gen_params *p = &r->params;
    int32_t width = p->beam_width > 0 ? p->beam_width : p->best_of;
    int32_t max_tokens = tokens_of(r, width, c);
    int rc = check_fit(r, width, max_tokens, c, e);

    if (rc == 0) {
        rc = check_tokens(r, c, e);
    }
    if (rc == 0) {
        rc = check_lists(p, words, e);
    }
    if (rc == 0 && words) {
        rc = check_ids(words->token, words->n ? words->first[words->n] : 0, "bad_words", c, e);
    }
    if (rc == 0) {
        rc = group_check_allowed(r, words, c, e);
    }
    if (rc < 0) {
        return rc;
    }
    struct group *g = slab_take(&groups);
    if (!g) {
        return err_nomem(e, "a request");
    }
    g->request = r;
    g->width = width;
    if (words) {
        g->words = *words;
    }
    group_read_params(g, max_tokens, c);
    first_init(g);
    g->n_bytes = group_lay_out(g, c, NULL);
    rc = check_memory(g, c, e);
    if (rc == 0 && g->beams) {
        rc = beam_text_start(&g->text_start, r, c->tokenizer, e);
    }
    if (rc < 0) {
        group_free(g);
        return rc;
    }
    *ret = g;
    return 0;
}

void group_free(struct group *g)
{
    if (!g) {
        return;
    }
    free(g->text_start);
    slab_give(&groups, g);
}
