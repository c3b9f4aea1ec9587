/* Draft heads: MTP from the model's own checkpoint, EAGLE-3 from a directory of its
 * own. A head drafts as a draft model does (speculate/draft_model.h), from the
 * model's hidden states, which the model keeps in the blocks of its cache. */
#include <string.h>

#include "engine/drafts.h"
#include "engine/engine_state.h"

static const char *setting_of(const struct settings *s)
{
    return s->speculate == SPECULATE_MTP ? "speculate" : "draft_model";
}

static int refuse(const struct settings *s, const char *why, struct err *err)
{
    return err_set_param(err, ERR_UNSUPPORTED, setting_of(s), "%s: %s", setting_of(s), why);
}

static int check(const struct settings *s, const struct model_config *c, struct err *err)
{
    if (s->tensor_parallel_size > 1 || s->pipeline_parallel_size > 1) {
        return refuse(s,
                      "a model on several ranks has no draft head; tensor_parallel_size and "
                      "pipeline_parallel_size must be 1",
                      err);
    }
    if (c->recurrent.n_heads > 0) {
        return refuse(s, "a model with recurrent states has no draft head", err);
    }
    return s->kv_policy == KV_PAGED ? 0 : refuse(s, "kv_policy must be paged", err);
}

struct model_taps engine_draft_taps(const struct engine *e)
{
    return model_head_taps(&e->draft_head);
}

int engine_draft_head_load(struct engine *e, const struct settings *s, const struct model_config *c,
                           const struct model_config *draft, struct err *err)
{
    struct model_config head = draft ? *draft : (struct model_config){0};
    int rc = check(s, c, err);

    if (rc < 0) {
        return rc;
    }
    rc = draft ? model_eagle3_fit(&head, c, err) : model_mtp_config(&head, c, err);
    if (rc < 0) {
        err_prefix(err, "%s", setting_of(s));
        snprintf(err->param, sizeof(err->param), "%s", setting_of(s));
        return rc;
    }
    struct settings own = engine_draft_settings(s, c);
    if (s->dtype == 0) {
        head.dtype = c->dtype; /* hidden states have the type of the model's activations */
    }
    const char *path = draft ? e->draft_path : e->model_path;
    rc = runner_open_draft(&e->draft_executor, &own, path, &head, c, err);
    if (rc == 0) {
        e->draft_head = head;
    }
    return rc;
}
