/* A sink that stores all outputs, in one recording a request (request->user), for tests
 * of the output side and the engine. */
#ifndef QUIRE_TESTS_SIM_RECORDER_H
#define QUIRE_TESTS_SIM_RECORDER_H

#include <pthread.h>

#include "engine/engine.h"

enum { RECORD_CHOICES = 16, RECORD_TOKENS = 4096 };

struct recorded_choice {
    struct buf text;  /* of all outputs, prompt included */
    int32_t n_prompt; /* tokens of the prompt */
    int32_t n_tokens; /* generated tokens */
    /* By token, prompt and generated ones in order of arrival: */
    int32_t id[RECORD_TOKENS];
    int32_t offset[RECORD_TOKENS]; /* text_offset of struct token_out */
    float logprob[RECORD_TOKENS];
    int32_t n_top[RECORD_TOKENS]; /* number of top log-probabilities */
    int32_t top0[RECORD_TOKENS];  /* the best of these; -1: none */

    int32_t n_pieces; /* outputs */
    int32_t n_ends;   /* outputs with a finish reason */
    /* Of the output with a finish reason: */
    enum finish_reason finish;
    char stop_string[64]; /* "": none */
    char error[128];      /* "": none */
    int32_t stop_token;   /* as in struct output */
};

struct recording {
    struct recorded_choice choice[RECORD_CHOICES]; /* by output.choice */
    int32_t n_after_last;                          /* outputs after `last`; must be 0 */
    int32_t n_after_end;                           /* outputs of ended choices; must be 0 */
    bool last;                                     /* an output had `last` set */
    struct usage usage;                            /* of the latest output */
};

struct recorder {
    struct sink sink;             /* to pass to the engine */
    pthread_mutex_t lock;         /* protects all recordings and counters */
    pthread_cond_t changed;       /* an output was recorded */
    int64_t n_flushes, n_outputs; /* calls of the sink */
};

void recorder_init(struct recorder *r);
void recorder_release(struct recorder *r);
struct recording *recording_new(void);
void recording_free(struct recording *r);
/* Whether the recording has seen `last`. */
bool recorder_ended(struct recorder *r, const struct recording *rec);
/* Wait until the recording has seen `last`; false: not within `seconds`. */
bool recorder_wait(struct recorder *r, struct recording *rec, double seconds);
/* Wait until choice 0 of the recording has n tokens; false: not within `seconds`. */
bool recorder_wait_tokens(struct recorder *r, struct recording *rec, int32_t n, double seconds);

#endif
