/* A sink that keeps what it was given, a recording a request (request->user), for tests
 * of the output side and the engine. */
#ifndef QUIRE_TESTS_SIM_RECORDER_H
#define QUIRE_TESTS_SIM_RECORDER_H

#include <pthread.h>

#include "engine/engine.h"

enum { RECORD_CHOICES = 16, RECORD_TOKENS = 4096 };

struct recorded_choice {
    struct buf text;           /* prompt pieces too */
    int32_t n_prompt;          /* tokens of prompt pieces */
    int32_t n_tokens;          /* generated */
    int32_t id[RECORD_TOKENS]; /* prompt and generated, in order of arrival */
    int32_t offset[RECORD_TOKENS];
    float logprob[RECORD_TOKENS];
    int32_t n_top[RECORD_TOKENS];
    int32_t top0[RECORD_TOKENS]; /* best of the top, or -1 */
    int32_t n_pieces;
    int32_t n_ends; /* pieces with a finish reason */
    enum finish_reason finish;
    char stop_string[64];
    char error[128];
    int32_t stop_token;
};

struct recording {
    struct recorded_choice choice[RECORD_CHOICES];
    int32_t n_after_last; /* outputs that came after `last`: none should */
    int32_t n_after_end;  /* pieces of a choice that had ended: none should */
    bool last;
    struct usage usage; /* of the latest output */
};

struct recorder {
    struct sink sink;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int64_t n_flushes, n_outputs;
};

void recorder_init(struct recorder *r);
void recorder_release(struct recorder *r);
struct recording *recording_new(void);
void recording_free(struct recording *r);
/* Has the recording seen `last`? */
bool recorder_ended(struct recorder *r, const struct recording *rec);
/* Wait until the recording saw `last` (seconds: true) or gave up (false). */
bool recorder_wait(struct recorder *r, struct recording *rec, double seconds);
/* Wait until choice 0 of the recording has n tokens. */
bool recorder_wait_tokens(struct recorder *r, struct recording *rec, int32_t n, double seconds);

#endif
