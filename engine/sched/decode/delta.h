/* From commit (engine's thread) to emit (output thread): what happened to one choice in
 * one step. */
#ifndef QUIRE_ENGINE_SCHED_DECODE_DELTA_H
#define QUIRE_ENGINE_SCHED_DECODE_DELTA_H

#include "engine/request.h"

enum delta_kind {
    DELTA_TOKEN, /* one generated token of `choice` */
    /* One prompt token's log-probability (echo with logprobs, prompt_logprobs); token 0
     * first. */
    DELTA_PROMPT,
    /* `choice` ends with `finish`; after its last token, and of a beam search after the
     * tokens of all choices. */
    DELTA_FINISH,
    DELTA_END, /* the group is freed: the last delta of the request */
};

struct delta {
    struct request *request; /* borrowed */
    int32_t kind;            /* enum delta_kind */
    int32_t choice;          /* sequence: 0 .. best_of-1, or beam rank 0 .. n-1; -1: DELTA_END */
    int32_t token;           /* DELTA_TOKEN, DELTA_PROMPT; else -1 */
    /* DELTA_TOKEN: an end of sequence or a stop id, which ends the choice and is not
     * text, unless the request asks for it. */
    bool is_stop;
    bool drafted;             /* DELTA_TOKEN: it was a draft that held */
    float logprob;            /* of `token`; NaN: prompt token 0 */
    int32_t n_top;            /* of the two arrays */
    const int32_t *top_token; /* [n_top]; copied by output_push */
    const float *top_logprob; /* [n_top] */
    int32_t finish;           /* DELTA_FINISH, DELTA_END: enum finish_reason */
    int32_t stop_token; /* DELTA_FINISH with FINISH_STOP: the stop id, or -1 for end of sequence */
    int32_t cached_tokens; /* prompt tokens that came from the prefix cache */
    const char *error;     /* static sentence, or NULL */
};

#endif
