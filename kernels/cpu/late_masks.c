#include "kernels/cpu/late_masks.h"

#include <stdlib.h>
#include <string.h>

int late_masks_init(struct late_masks *m, int32_t max, int32_t vocab, struct err *e)
{
    pthread_mutex_init(&m->lock, NULL);
    pthread_cond_init(&m->changed, NULL);
    m->max = vocab > 0 ? max : 0;
    m->words = mask_words(vocab);
    size_t n = (size_t)MAX(m->max, 1);
    for (int i = 0; i < LATE_SLOTS; i++) {
        struct late_slot *s = &m->slot[i];
        s->word = malloc(n * (size_t)MAX(m->words, 1) * sizeof(*s->word));
        s->there = calloc(n, sizeof(*s->there));
        if (!s->word || !s->there) {
            return err_nomem(e, "masks of a step");
        }
    }
    return 0;
}

void late_masks_release(struct late_masks *m)
{
    for (int i = 0; i < LATE_SLOTS; i++) {
        free(m->slot[i].word);
        free(m->slot[i].there);
    }
    pthread_mutex_destroy(&m->lock);
    pthread_cond_destroy(&m->changed);
}

static void fill_slot(const struct late_masks *m, struct late_slot *s, uint64_t step,
                      const struct late_mask *mask, int32_t n)
{
    size_t n_bytes = (size_t)m->words * sizeof(*s->word);

    for (int32_t i = 0; i < n; i++) {
        s->there[i] = mask[i].word != NULL;
        if (s->there[i]) {
            memcpy(s->word + (int64_t)i * m->words, mask[i].word, n_bytes);
        }
    }
    s->n = n;
    s->step = step;
}

int late_masks_put(struct late_masks *m, uint64_t step, const struct late_mask *mask, int32_t n,
                   struct err *e)
{
    if (mask && (n < 0 || n > m->max)) {
        return err_set(e, ERR_INVALID, "step %llu has %d masks; there is room for %d",
                       (unsigned long long)step, n, m->max);
    }
    pthread_mutex_lock(&m->lock);
    if (mask) {
        fill_slot(m, &m->slot[step % LATE_SLOTS], step, mask, n);
    } else {
        m->given_up = true;
    }
    pthread_cond_broadcast(&m->changed);
    pthread_mutex_unlock(&m->lock);
    return 0;
}

void late_masks_wait(struct late_masks *m, const struct batch *b, int32_t from, int32_t end)
{
    const struct late_slot *s = &m->slot[b->step % LATE_SLOTS];

    m->now = NULL;
    while (from < end && b->sample[from].late_mask == 0) {
        from++;
    }
    if (from >= end) {
        return;
    }
    pthread_mutex_lock(&m->lock);
    while (s->step != b->step && !m->given_up) {
        pthread_cond_wait(&m->changed, &m->lock);
    }
    m->now = s->step == b->step ? s : NULL;
    pthread_mutex_unlock(&m->lock);
}

const uint32_t *late_masks_row(const struct late_masks *m, int32_t number)
{
    const struct late_slot *s = m->now;
    int32_t i = number - 1;

    return s && i >= 0 && i < s->n && s->there[i] ? s->word + (int64_t)i * m->words : NULL;
}
