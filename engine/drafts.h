/* Speculative decoding: opens the sources of drafts that the settings name, and the
 * draft model beside its model. */
#ifndef QUIRE_ENGINE_DRAFTS_H
#define QUIRE_ENGINE_DRAFTS_H

#include "config/settings/settings.h"
#include "models/model.h"

struct engine;

/* The configuration of the settings' draft model or draft head beside the model `c` in
 * model_dir, and the directory of its files, *ret_dir, malloc'd; NULL: there is none.
 * ERR_INVALID, ERR_UNSUPPORTED: they do not go together, and why. */
int engine_draft_config(struct model_config *ret, char **ret_dir, const struct settings *s,
                        const char *model_dir, const struct model_config *c, struct err *err);
/* draft_heads.c: for a head: fits the configuration of an EAGLE-3 head to its target
 * `c`, or makes that of its MTP head. */
int engine_draft_head_fit(struct model_config *head, const struct settings *s,
                          const struct model_config *c, struct err *err);
/* The settings of a draft model or head: the model's slots, blocks and length, and
 * steps large enough for a few tokens of each sequence. */
struct settings engine_draft_settings(const struct settings *s, const struct model_config *c);
/* Open the model `c` in e->model_path on its executor, on one rank or several, with
 * what drafts for it. */
int engine_open_executors(struct engine *e, const struct settings *s, const struct model_config *c,
                          struct err *err);
/* Whether, and how far, the model speculates. */
void engine_set_speculation(struct engine *e, const struct settings *s);
/* The sources, for the scheduler. */
int engine_drafts_open(struct engine *e, struct err *err);
void engine_drafts_close(struct engine *e);

#endif
