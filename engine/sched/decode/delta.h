/* From commit (stage 9, engine's thread) to emit (stage 10, output thread): what
 * happened to one choice in one step. */
#ifndef QUIRE_ENGINE_SCHED_DECODE_DELTA_H
#define QUIRE_ENGINE_SCHED_DECODE_DELTA_H

#include "engine/request.h"

enum delta_kind {
    DELTA_TOKEN, /* one generated token of `choice` */
    /* one prompt token's log-probability (echo with logprobs, prompt_logprobs); token 0
     * first */
    DELTA_PROMPT,
    /* `choice` ends with `finish`; after its last token. For beams the choices' tokens
     * come all before it */
    DELTA_FINISH,
    DELTA_END, /* the group is gone from the engine: nothing more comes for the request */
};

struct delta {
    struct request *request;
    int32_t kind;   /* enum delta_kind */
    int32_t choice; /* sequence: 0 .. best_of-1, or beam rank 0 .. n-1 */
    int32_t token;
    /* DELTA_TOKEN: an end of sequence or a stop id, which ends the choice and is no
     * text, unless the request asks for it. */
    bool is_stop;
    float logprob;
    int32_t n_top;
    const int32_t *top_token; /* [n_top]; copied by output_push */
    const float *top_logprob; /* [n_top] */
    int32_t finish;           /* DELTA_FINISH: enum finish_reason */
    int32_t stop_token; /* DELTA_FINISH with FINISH_STOP: the stop id, or -1 for end of sequence */
    /* DELTA_END and first token: prompt tokens that came from the prefix cache */
    int32_t cached_tokens;
    const char *error; /* static sentence, or NULL */
};

#endif
