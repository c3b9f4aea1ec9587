/* Speculative decoding: opens the sources of drafts that the settings name, and the
 * draft model. */
#ifndef QUIRE_ENGINE_DRAFTS_H
#define QUIRE_ENGINE_DRAFTS_H

#include "config/settings/settings.h"
#include "models/model.h"

struct engine;

/* The weights of the settings' draft model or draft head, which run beside the model
 * `c` opened next. Nothing without one. ERR_INVALID, ERR_UNSUPPORTED: they do not go
 * together, and why. */
int engine_draft_model_load(struct engine *e, const struct settings *s,
                            const struct model_config *c, struct err *err);
/* The hidden states that the model must keep for a draft head; none without one. */
struct model_taps engine_draft_taps(const struct engine *e);
/* The settings of a draft model or head: the model's slots, blocks and length, and
 * steps large enough for a few tokens of each sequence. */
struct settings engine_draft_settings(const struct settings *s, const struct model_config *c);
/* draft_heads.c: the weights of a draft head: of the EAGLE-3 head in e->draft_path
 * whose configuration is `draft`, or, where that is NULL, of the model's MTP head. */
int engine_draft_head_load(struct engine *e, const struct settings *s, const struct model_config *c,
                           const struct model_config *draft, struct err *err);
/* Its cache, once the model's is there. */
int engine_draft_model_start(struct engine *e, struct err *err);
/* Whether, and how far, the model speculates. */
void engine_set_speculation(struct engine *e, const struct settings *s);
/* The sources, for the scheduler. */
int engine_drafts_open(struct engine *e, struct err *err);
void engine_drafts_close(struct engine *e);

#endif
