/* Draft heads: MTP from the model's own checkpoint, EAGLE-3 from a directory of its
 * own. A head drafts as a draft model does (speculate/draft_model.h), from the
 * model's hidden states, which the model keeps in the blocks of its cache. */
#include <stdio.h>

#include "engine/drafts.h"

int engine_draft_head_fit(struct model_config *head, const struct settings *s,
                          const struct model_config *c, struct err *err)
{
    bool mtp = s->speculate == SPECULATE_MTP;
    const char *setting = mtp ? "speculate" : "draft_model";
    int rc = mtp ? model_mtp_config(head, c, err) : model_eagle3_fit(head, c, err);

    if (rc < 0) {
        err_prefix(err, "%s", setting);
        snprintf(err->param, sizeof(err->param), "%s", setting);
        return rc;
    }
    if (s->dtype == 0) {
        head->dtype = c->dtype; /* hidden states have the type of the model's activations */
    }
    return 0;
}
