/* The executor that computes nothing. What remains is HTTP, scheduling, packing and
 * output, whose cost can so be measured (`quire serve --model null`, `quire bench
 * offline --model null`) and tested without a model.
 *
 * Its tokens are bytes of the byte tokenizer, letters and spaces in about the
 * proportions of English text, chosen by a hash of (seed, position): a request gives
 * the same text whenever it is sent with the same seed. Bans, allowed ids and late
 * masks are respected; a step with late masks is answered when it is waited for. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "config/base/limits.h"
#include "config/settings/settings.h"
#include "engine/workers/batch_copy.h"
#include "engine/workers/executor.h"

enum {
    NULL_VOCAB = 256,
    NULL_WORDS = NULL_VOCAB / 32, /* of a mask */
    NULL_BLOCKS = 1 << 16,
    NULL_MAX_LEN = 1 << 15,
    NULL_SLOTS = 4,
    NULL_STEP_MAX_US = 60000000
};

/* The results of one step. Four slots rotate, so that the results of the last two waits
 * stay valid. */
struct null_slot {
    struct results results;
    int32_t *token;     /* [max_samples] */
    float *logprob;     /* [max_samples] */
    int32_t *top_token; /* [max_samples, LIMIT_CANDIDATES] */
    float *top_logprob; /* [max_samples, LIMIT_CANDIDATES] */
    int64_t ready_us;   /* when the step ends, clock_us */
    /* with late masks, until it is waited for: its batch, and a mask a row */
    struct batch_copy batch;
    uint32_t (*word)[NULL_WORDS]; /* [max_samples] */
    bool waits;
};

/* The late masks that came last. */
struct null_masks {
    pthread_mutex_t lock; /* guards the rest */
    pthread_cond_t changed;
    uint64_t step;                /* that they are of */
    bool given_up;                /* none will come any more */
    uint32_t (*word)[NULL_WORDS]; /* [max_num_seqs] */
};

struct null_executor {
    struct executor base;
    struct null_slot slot[NULL_SLOTS];
    uint64_t n_launched, n_waited;
    int64_t step_us; /* 0: at once */
    int64_t free_us; /* when the newest step ends, clock_us */
    struct null_masks masks;
};

static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static bool is_banned(const struct batch *b, const struct sample_row *s, int32_t token)
{
    for (int32_t i = 0; i < s->n_bias; i++) {
        const struct token_bias *t = &b->token_bias[s->bias_first + i];
        if (t->token == token && t->bias == -INFINITY) {
            return true;
        }
    }
    return false;
}

/* An id that the mask allows, selected by h; 0: it allows none. */
static int32_t pick_allowed(const uint32_t *mask, uint64_t h)
{
    int32_t id[NULL_VOCAB], n = 0;

    for (int32_t t = 0; t < NULL_VOCAB; t++) {
        id[n] = t;
        n += mask[t / 32] >> t % 32 & 1;
    }
    return n > 0 ? id[h % (uint64_t)n] : 0;
}

/* The k-th token to try for a row. With n bans, one of the first n + 1 is not
 * banned. */
static int32_t nth_choice(const struct batch *b, const struct sample_row *s, int32_t k)
{
    static const char letters[] = "etaoinshrdlu etaoinshrd cumwfgypbvk etaoins hrdleta oin etao nt";
    uint64_t h = mix(s->seed + (uint64_t)s->position * 0x9e3779b97f4a7c15u) + (uint64_t)k;

    if (s->mask_first >= 0) {
        return pick_allowed(b->mask_word + s->mask_first, h);
    }
    return k < 64 ? (unsigned char)letters[h % (sizeof(letters) - 1)] : (int32_t)(h % NULL_VOCAB);
}

static int32_t sample_token(const struct batch *b, const struct sample_row *s)
{
    for (int32_t k = 0; k <= s->n_bias + 64 + NULL_VOCAB; k++) {
        int32_t t = nth_choice(b, s, k);
        if (!is_banned(b, s, t)) {
            return t;
        }
    }
    return TOKEN_NONE_ALLOWED;
}

/* Whether a beam may continue with a token: it is neither banned nor masked out. */
static bool is_allowed(const struct batch *b, const struct sample_row *s, int32_t token)
{
    bool left_out =
        s->mask_first >= 0 && !(b->mask_word[s->mask_first + token / 32] >> token % 32 & 1);

    return !left_out && !is_banned(b, s, token);
}

/* Fills the top tokens of a row: `first`, then the ids after it, without candidates
 * that are not allowed; columns without a token hold -1 and -infinity. */
static void fill_top(const struct batch *b, const struct sample_row *s, int32_t first,
                     int32_t *token, float *logprob)
{
    bool beam = s->kind == SAMPLE_CANDIDATES;
    int32_t n = beam ? s->n_candidates : s->n_logprobs;
    int32_t ahead = 0;

    for (int32_t k = 0; k < n; k++, ahead++) {
        while (beam && ahead > 0 && ahead < NULL_VOCAB &&
               !is_allowed(b, s, (first + ahead) % NULL_VOCAB)) {
            ahead++;
        }
        bool left = first >= 0 && ahead < NULL_VOCAB;
        token[k] = left ? (first + ahead) % NULL_VOCAB : -1;
        logprob[k] = left ? -1 - (float)k : -INFINITY;
    }
}

static void fill_rows(const struct batch *b, struct null_slot *ret)
{
    for (int32_t i = 0; i < b->n_samples; i++) {
        const struct sample_row *s = &b->sample[i];
        ret->token[i] = s->kind == SAMPLE_SCORE ? s->target : sample_token(b, s);
        ret->logprob[i] = -1;
        fill_top(b, s, ret->token[i], ret->top_token + (int64_t)i * LIMIT_CANDIDATES,
                 ret->top_logprob + (int64_t)i * LIMIT_CANDIDATES);
    }
}

/* ---- late masks ---- */

static int null_masks(struct executor *base, uint64_t step, const struct late_mask *mask, int32_t n,
                      struct err *e)
{
    (void)e;
    struct null_masks *m = &CONTAINER_OF(base, struct null_executor, base)->masks;
    pthread_mutex_lock(&m->lock);
    m->step = mask ? step : m->step;
    m->given_up = m->given_up || !mask;
    for (int32_t i = 0; mask && i < MIN(n, base->info.max_num_seqs); i++) {
        memset(m->word[i], 0xFF, sizeof(m->word[i]));
        if (mask[i].word) {
            memcpy(m->word[i], mask[i].word, sizeof(m->word[i]));
        }
    }
    pthread_cond_broadcast(&m->changed);
    pthread_mutex_unlock(&m->lock);
    return 0;
}

/* Gives each row one mask: what its own and its late mask both allow. */
static void merge_masks(const struct null_masks *m, struct null_slot *slot)
{
    struct batch *b = &slot->batch.batch;
    struct sample_row *row = (struct sample_row *)(uintptr_t)b->sample; /* the copy's */

    for (int32_t i = 0; i < b->n_samples; i++) {
        const uint32_t *own = row[i].mask_first < 0 ? NULL : b->mask_word + row[i].mask_first;
        const uint32_t *late = row[i].late_mask > 0 ? m->word[row[i].late_mask - 1] : NULL;
        row[i].mask_first = own || late ? i * NULL_WORDS : -1;
        for (int32_t w = 0; w < NULL_WORDS; w++) {
            slot->word[i][w] = (own ? own[w] : UINT32_MAX) & (late ? late[w] : UINT32_MAX);
        }
    }
    b->mask_word = slot->word[0];
}

static void fill_when_masked(struct null_masks *m, struct null_slot *slot)
{
    uint64_t step = slot->batch.batch.step;

    pthread_mutex_lock(&m->lock);
    while (m->step != step && !m->given_up) {
        pthread_cond_wait(&m->changed, &m->lock);
    }
    if (m->step == step) {
        merge_masks(m, slot);
    }
    pthread_mutex_unlock(&m->lock);
    fill_rows(&slot->batch.batch, slot);
    slot->waits = false;
}

static int null_launch(struct executor *base, const struct batch *b, struct err *e)
{
    struct null_executor *x = CONTAINER_OF(base, struct null_executor, base);
    struct null_slot *slot = &x->slot[x->n_launched++ % NULL_SLOTS];

    slot->waits = b->n_late_mask > 0;
    if (slot->waits && batch_copy_set(&slot->batch, b, e) < 0) {
        return ERR_NOMEM;
    }
    if (!slot->waits) {
        fill_rows(b, slot);
    }
    if (x->step_us > 0) {
        slot->ready_us = x->free_us = MAX(x->free_us, clock_us()) + x->step_us;
    }
    slot->results = (struct results){
        .step = b->step,
        .device_us = x->step_us,
        .n_samples = b->n_samples,
        .top_stride = LIMIT_CANDIDATES,
        .token = slot->token,
        .logprob = slot->logprob,
        .top_token = slot->top_token,
        .top_logprob = slot->top_logprob,
    };
    return 0;
}

static int null_wait(struct executor *base, struct results *ret, struct err *e)
{
    (void)e;
    struct null_executor *x = CONTAINER_OF(base, struct null_executor, base);
    struct null_slot *slot = &x->slot[x->n_waited++ % NULL_SLOTS];
    if (slot->waits) {
        fill_when_masked(&x->masks, slot);
    }
    int64_t left_us = x->step_us > 0 ? slot->ready_us - clock_us() : 0;
    if (left_us > 0) {
        nanosleep(
            &(struct timespec){.tv_sec = left_us / 1000000, .tv_nsec = left_us % 1000000 * 1000},
            NULL);
    }
    *ret = slot->results;
    return 0;
}

static void null_free(struct executor *base)
{
    struct null_executor *x = CONTAINER_OF(base, struct null_executor, base);

    for (int i = 0; i < NULL_SLOTS; i++) {
        free(x->slot[i].token);
        free(x->slot[i].logprob);
        free(x->slot[i].top_token);
        free(x->slot[i].top_logprob);
        free(x->slot[i].word);
        batch_copy_release(&x->slot[i].batch);
    }
    free(x->masks.word);
    pthread_mutex_destroy(&x->masks.lock);
    pthread_cond_destroy(&x->masks.changed);
    free(x);
}

static void null_info(struct executor_info *ret, const struct settings *s)
{
    *ret = (struct executor_info){
        .vocab = NULL_VOCAB,
        .max_len = s->max_model_len ? (int32_t)s->max_model_len : NULL_MAX_LEN,
        .n_blocks = s->kv_blocks ? (int32_t)s->kv_blocks : NULL_BLOCKS,
        .block_size = (int32_t)s->block_size,
        .max_num_seqs = s->max_num_seqs ? (int32_t)s->max_num_seqs : 1024,
        .max_num_batched_tokens =
            s->max_num_batched_tokens ? (int32_t)s->max_num_batched_tokens : 8192,
        .depth = 1,
        .device = "null: answers at once",
        .dtype = "none",
    };
    ret->max_samples = ret->max_num_seqs + MIN(ret->max_num_batched_tokens, 1024);
    /* only on request, as on a CPU; nothing is copied */
    if (s->preemption == PREEMPT_SWAP && s->swap_space > 0) {
        ret->n_host_blocks = ret->n_blocks;
    }
    int64_t holds = (int64_t)ret->n_blocks * ret->block_size;
    if (!s->max_model_len && holds < ret->max_len) {
        ret->max_len = (int32_t)holds;
    }
}

bool is_null_model(const char *model)
{
    return model && (strcmp(model, "null") == 0 || strncmp(model, "null:", 5) == 0);
}

/* Reads a step's duration from the model's name. */
static int read_step_us(int64_t *ret, const char *model, struct err *e)
{
    long long us = 0;
    char rest;
    if (model && model[4] == ':' &&
        (sscanf(model + 5, "%lld%c", &us, &rest) != 1 || us < 0 || us > NULL_STEP_MAX_US)) {
        return err_set_param(e, ERR_INVALID, "model",
                             "\"%.100s\": null, or null:MICROSECONDS a step up to %d", model,
                             NULL_STEP_MAX_US);
    }
    *ret = us;
    return 0;
}

int null_open(struct executor **ret, const struct settings *s, struct err *e)
{
    struct null_executor *x = calloc(1, sizeof(*x));

    if (!x) {
        return err_nomem(e, "the null executor");
    }
    if (read_step_us(&x->step_us, is_null_model(s->model) ? s->model : NULL, e) < 0) {
        free(x);
        return ERR_INVALID;
    }
    null_info(&x->base.info, s);
    x->base.launch = null_launch;
    x->base.wait = null_wait;
    x->base.masks = null_masks;
    x->base.free = null_free;
    pthread_mutex_init(&x->masks.lock, NULL);
    pthread_cond_init(&x->masks.changed, NULL);
    size_t n = (size_t)x->base.info.max_samples;
    x->masks.word = malloc((size_t)x->base.info.max_num_seqs * sizeof(*x->masks.word));
    bool there = x->masks.word != NULL;
    for (int i = 0; i < NULL_SLOTS; i++) {
        struct null_slot *slot = &x->slot[i];
        slot->token = malloc(n * sizeof(int32_t));
        slot->logprob = malloc(n * sizeof(float));
        slot->top_token = malloc(n * LIMIT_CANDIDATES * sizeof(int32_t));
        slot->top_logprob = malloc(n * LIMIT_CANDIDATES * sizeof(float));
        slot->word = malloc(n * sizeof(*slot->word));
        there = there && slot->token && slot->logprob && slot->top_token && slot->top_logprob &&
                slot->word;
    }
    if (!there) {
        null_free(&x->base);
        return err_nomem(e, "the null executor's results");
    }
    *ret = &x->base;
    return 0;
}
