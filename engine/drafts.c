#include "engine/drafts.h"

#include <stdlib.h>
#include <string.h>

#include "config/base/log.h"
#include "engine/engine_state.h"
#include "engine/model_path.h"
#include "models/checkpoint/file.h"
#include "models/checkpoint/gguf/gguf.h"

/* ---- a draft model and its model ---- */

static int refuse(struct err *err, const char *why)
{
    return err_set_param(err, ERR_UNSUPPORTED, "draft_model", "draft_model: %s", why);
}

/* The tokens of both models must be the same, id by id. Ids that only pad the logits do
 * not count. */
static int compare_tokens(const struct tokenizer *a, const struct tokenizer *b, struct err *err)
{
    int32_t n = tokenizer_vocab_size(a);

    if (tokenizer_vocab_size(b) != n) {
        return err_set_param(err, ERR_INVALID, "draft_model",
                             "draft_model: its vocabulary is another: %d tokens, the model has %d",
                             tokenizer_vocab_size(b), n);
    }
    for (int32_t i = 0; i < n; i++) {
        size_t n_a, n_b;
        const char *x = tokenizer_bytes(a, i, &n_a), *y = tokenizer_bytes(b, i, &n_b);
        if (n_a != n_b || (n_a > 0 && memcmp(x, y, n_a) != 0)) {
            return err_set_param(err, ERR_INVALID, "draft_model",
                                 "draft_model: its vocabulary is another: token %d differs from "
                                 "the model's",
                                 i);
        }
    }
    return 0;
}

static int check_vocabulary(const struct engine *e, const struct settings *s,
                            const struct model_config *c, const struct model_config *draft,
                            struct err *err)
{
    struct tokenizer *t;

    if (s->load_format == LOAD_DUMMY && !gguf_is_file(e->draft_path) &&
        !model_file_exists(e->draft_path, "tokenizer.json")) {
        return draft->vocab == c->vocab
                   ? 0
                   : err_set_param(err, ERR_INVALID, "draft_model",
                                   "draft_model: its vocabulary is another: %d tokens, the model "
                                   "has %d",
                                   draft->vocab, c->vocab);
    }
    int rc = tokenizer_open(&t, e->draft_path, err);
    if (rc < 0) {
        return rc;
    }
    int32_t n;
    rc = tokenizer_limit(t, draft->vocab, &n, err);
    rc = rc < 0 ? rc : compare_tokens(e->tokenizer, t, err);
    tokenizer_free(t);
    return rc;
}

struct settings engine_draft_settings(const struct settings *s, const struct model_config *c)
{
    enum { MANY_SEQS = 1024, LEAST_TOKENS = 512 };
    struct settings d = *s;
    int64_t seqs = s->max_num_seqs > 0 ? s->max_num_seqs : MANY_SEQS;

    d.max_model_len =
        s->max_model_len > 0 ? s->max_model_len : MIN(c->max_positions, LIMIT_MODEL_LEN);
    d.max_num_batched_tokens = MAX(2 * seqs, LEAST_TOKENS);
    d.quantization = 0; /* as it is stored */
    return d;
}

static int check_draft_model(const struct settings *s, const struct model_config *draft,
                             const struct model_config *c, struct err *err)
{
    int64_t max_len = engine_draft_settings(s, c).max_model_len;

    if (draft->recurrent.n_heads > 0) {
        return refuse(err, "it has recurrent states, which cannot be taken back behind a draft");
    }
    if (max_len > draft->max_positions) {
        return err_set_param(err, ERR_INVALID, "draft_model",
                             "draft_model: it was made for %d positions, sequences may have "
                             "%lld; lower max_model_len",
                             draft->max_positions, (long long)max_len);
    }
    return 0;
}

/* What no draft model and no head can do. */
static int check_settings(const struct settings *s, struct err *err)
{
    const char *setting = s->speculate == SPECULATE_MTP ? "speculate" : "draft_model";

    return s->kv_policy == KV_PAGED ? 0
                                    : err_set_param(err, ERR_UNSUPPORTED, setting,
                                                    "%s: kv_policy must be paged", setting);
}

static int find_config(struct model_config *ret, char **dir, const struct settings *s,
                       const char *model_dir, const struct model_config *c, struct err *err)
{
    struct generation_defaults unused;

    if (s->speculate == SPECULATE_MTP) {
        *dir = strdup(model_dir);
        return *dir ? engine_draft_head_fit(ret, s, c, err) : err_nomem(err, "a path");
    }
    int rc = model_path_find(dir, s->draft_model, MODEL_DRAFTS, err);
    if (rc == 0) {
        rc = model_config_read(ret, &unused, *dir, err);
    }
    if (rc < 0) {
        return rc;
    }
    return ret->head.kind != HEAD_NONE ? engine_draft_head_fit(ret, s, c, err)
                                       : check_draft_model(s, ret, c, err);
}

int engine_draft_config(struct model_config *ret, char **ret_dir, const struct settings *s,
                        const char *model_dir, const struct model_config *c, struct err *err)
{
    char *dir = NULL;

    *ret_dir = NULL;
    if (!s->draft_model && s->speculate != SPECULATE_MTP) {
        return 0;
    }
    int rc = check_settings(s, err);
    rc = rc ? rc : find_config(ret, &dir, s, model_dir, c, err);
    if (rc < 0) {
        free(dir);
        return rc;
    }
    *ret_dir = dir;
    return 0;
}

static bool has_head(const struct engine *e)
{
    return e->draft_config.head.kind != HEAD_NONE;
}

int engine_open_executors(struct engine *e, const struct settings *s, const struct model_config *c,
                          struct err *err)
{
    bool many = s->tensor_parallel_size > 1 || s->pipeline_parallel_size > 1;
    const char *dir = e->model_path;
    int rc = engine_draft_config(&e->draft_config, &e->draft_path, s, dir, c, err);

    if (rc == 0 && e->draft_path && !has_head(e)) {
        rc = check_vocabulary(e, s, c, &e->draft_config, err);
    }
    if (rc < 0) {
        return rc;
    }
    struct settings own = engine_draft_settings(s, c);
    struct runner_draft files = {e->draft_path, &e->draft_config, &own};
    const struct runner_draft *draft = e->draft_path ? &files : NULL;
    rc = many    ? ranks_open(&e->executor, &e->draft_executor, s, dir, c, draft, err)
         : draft ? runner_open_both(&e->executor, &e->draft_executor, s, dir, c, draft, err)
                 : runner_open(&e->executor, s, dir, c, err);
    if (rc == 0 && draft) {
        const struct executor_info *x = &e->draft_executor->info;
        log_event(LOG_INFO, has_head(e) ? "draft head" : "draft model",
                  LOG_STR("path", e->draft_path), LOG_STR("dtype", x->dtype),
                  LOG_I64("cache_mib", x->n_blocks * x->block_bytes >> 20));
    }
    return rc;
}

/* ---- the sources ---- */

void engine_set_speculation(struct engine *e, const struct settings *s)
{
    e->speculate = s->speculate;
    e->max_draft = s->speculate == SPECULATE_OFF ? 0 : (int32_t)s->max_draft;
}

static int open_text(struct engine *e, struct err *err)
{
    const struct sched_config *c = &e->config;
    struct suffix_config drafts = {.n_seqs = 2 * c->max_num_seqs,
                                   .max_len = c->max_len,
                                   .bytes = DRAFT_BYTES,
                                   .store_tokens = c->prefix_cache ? DRAFT_STORE_TOKENS : 0,
                                   .follower_sets = c->prefix_cache ? DRAFT_FOLLOWER_SETS : 0,
                                   .secret = c->secret};

    return e->speculate == SPECULATE_GRAMMAR || e->speculate == SPECULATE_DRAFT ||
                   e->speculate == SPECULATE_MTP
               ? 0
               : suffix_open(&e->drafts, &drafts, err);
}

static int open_model(struct engine *e, struct err *err)
{
    struct draft_model_config c = {
        .executor = e->draft_executor,
        .cost = e->draft_cost,
        .vocab = e->config.vocab,
        .max_draft = e->max_draft,
        .shift = has_head(e),
        .mask_token = e->draft_config.head.parallel ? e->draft_config.head.mask_token : -1,
        .secret = e->config.secret,
        .now_us = clock_us};

    return c.executor ? draft_model_open(&e->model_drafts, &c, err) : 0;
}

int engine_drafts_open(struct engine *e, struct err *err)
{
    if (e->max_draft == 0) {
        return 0;
    }
    int rc = open_text(e, err);
    if (rc == 0) {
        rc = open_model(e, err);
    }
    struct draft_source *text = e->drafts ? suffix_source(e->drafts) : NULL,
                        *model = e->model_drafts ? draft_model_source(e->model_drafts) : NULL;
    if (rc == 0 && text && model) {
        rc = mixed_drafts_init(&e->mixed, text, model, e->config.max_num_seqs, err);
        text = &e->mixed.base;
    }
    if (rc == 0) {
        forced_drafts_init(&e->forced, text ? text : model);
        sched_speculate(e->sched, &e->forced.base, e->max_draft);
    }
    return rc;
}

void engine_drafts_close(struct engine *e)
{
    suffix_free(e->drafts);
    draft_model_free(e->model_drafts);
    mixed_drafts_release(&e->mixed);
    replay_free(e->replay);
    script_free(e->script);
}

int engine_replay(struct engine *e, const float *acceptance, int32_t n, struct err *err)
{
    if (e->max_draft == 0 || n > LIMIT_DRAFT) {
        return err_set_param(err, ERR_INVALID, "speculate", "drafts need --speculate suffix");
    }
    int rc = e->replay ? 0 : replay_open(&e->replay, e->config.vocab, e->model_drafts, err);
    if (rc == 0) {
        replay_set(e->replay, acceptance, n);
        sched_speculate(e->sched, replay_source(e->replay), e->max_draft);
    }
    return rc;
}

int engine_script(struct engine *e, const int32_t *prompt, int32_t n_prompt, const int32_t *answer,
                  int32_t n_answer, struct err *err)
{
    int rc = e->script ? 0 : script_open(&e->script, e->config.max_logits, err);

    for (int32_t i = 0; i < n_answer && rc == 0; i++) {
        if (answer[i] < 0 || answer[i] >= e->config.vocab) {
            rc = err_set(err, ERR_INVALID, "the script has the id %d, the vocabulary %d tokens",
                         answer[i], e->config.vocab);
        }
    }
    return rc < 0 ? rc : script_add(e->script, prompt, n_prompt, answer, n_answer, err);
}
