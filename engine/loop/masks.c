#include "engine/loop/masks.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- nodes ---- */

int constraint_node_new(struct constraint_node **ret, const struct constraint_ops *ops,
                        struct constraint *state, struct err *e)
{
    struct constraint_node *n = calloc(1, sizeof(*n));

    if (!n) {
        ops->free(state);
        return err_nomem(e, "a grammar's state");
    }
    n->ops = ops;
    n->state = state;
    n->n_held = 1;
    pthread_mutex_init(&n->lock, NULL);
    *ret = n;
    return 0;
}

void constraint_node_free(struct constraint_node *n)
{
    if (!n) {
        return;
    }
    n->ops->free(n->state);
    pthread_mutex_destroy(&n->lock);
    free(n);
}

static void free_all(struct constraint_node *n)
{
    for (struct constraint_node *next; n; n = next) {
        next = n->next;
        constraint_node_free(n);
    }
}

/* ---- a job ---- */

/* A node of the job's own to go on from. */
static int copy_node(struct mask_job *j)
{
    struct constraint_node *from = j->node;
    struct constraint *state;
    struct err e;

    pthread_mutex_lock(&from->lock);
    int rc = from->ops->fork(&state, from->state, &e);
    pthread_mutex_unlock(&from->lock);
    if (rc == 0) {
        rc = constraint_node_new(&j->made, from->ops, state, &e);
    }
    if (rc == 0) {
        j->made->n_held = 0; /* the sequence takes it when the job is collected */
        j->made->n_read = from->n_read;
    }
    return rc;
}

static bool has_bits(const uint32_t *word, int32_t words)
{
    for (int32_t i = 0; i < words; i++) {
        if (word[i] != 0) {
            return true;
        }
    }
    return false;
}

/* With ignore_eos a text goes on where it could end. */
static void ban_ends(const struct sched_config *c, uint32_t *word)
{
    for (int32_t i = 0; i < c->n_eos; i++) {
        if (c->eos[i] >= 0 && c->eos[i] < c->vocab) {
            word[c->eos[i] / 32] &= ~(UINT32_C(1) << c->eos[i] % 32);
        }
    }
}

/* What a mask is computed for. */
struct place {
    const struct constraint_ops *ops;
    struct constraint *state;
    bool ends_ignored;
    int64_t work;    /* that is left */
    int32_t n_taken; /* set by advance: tokens that the state has taken */
    bool ended;      /* likewise: there is no mask, the text is complete */
};

/* The state takes n tokens, and gives the mask behind them. MASK_UNFINISHED: it
 * has taken some, and there is no mask. */
static int advance(struct place *p, const int32_t *token, int32_t n, const struct sched_config *c,
                   uint32_t *word)
{
    int rc = 0;

    for (p->n_taken = 0; p->n_taken < n && rc == 0; p->n_taken += rc == 0) {
        rc = p->ops->accept(p->state, token[p->n_taken], &p->work);
    }
    p->ops->settle(p->state);
    rc = rc == 0 ? p->ops->ended(p->state, &p->work) : rc;
    p->ended = rc == 1;
    if (rc != 0) {
        return rc == 1 ? 0 : rc;
    }
    memset(word, 0, (size_t)mask_words(c->vocab) * sizeof(*word));
    rc = p->ops->mask(p->state, word, &p->work);
    if (rc == 0 && p->ends_ignored) {
        ban_ends(c, word);
        p->ended = !has_bits(word, mask_words(c->vocab));
    }
    return rc;
}

/* The masks behind drafts, of a copy of the state that is thrown away. They end at a
 * draft that the grammar does not allow, which the row before cannot sample, and where
 * there is no mask: what follows is left to a step without drafts. */
static void mask_drafts(struct mask_job *j, struct place *from, const struct sched_config *c,
                        uint32_t *word)
{
    struct place p = *from;
    struct err e;

    if (j->n == 1 || p.ops->fork(&p.state, from->state, &e) < 0) {
        return;
    }
    while (j->n_masked < j->n &&
           advance(&p, &j->draft[j->n_masked - 1], 1, c,
                   word + (int64_t)j->n_masked * mask_words(c->vocab)) == 0 &&
           !p.ended) {
        j->n_masked++;
    }
    from->work = p.work;
    p.ops->free(p.state);
}

/* Notes what a job has taken of its step's and its token's work. */
static void account(struct mask_job *j, int64_t used)
{
    struct constraint_node *n = j->made;

    j->late = j->rc == MASK_UNFINISHED;
    n->work = j->late ? n->work + used : 0;
    j->rc = j->late ? 0 : j->rc;
    if (j->late && n->work >= MASK_WORK_MOST) {
        j->late = false;
        j->rc = ERR_FULL;
    }
}

int64_t mask_job_run(struct mask_job *j, const struct sched_config *c, int64_t work, uint32_t *word)
{
    bool shared = !j->in_place && j->n_tokens > 0;

    j->made = j->node;
    j->rc = shared ? copy_node(j) : 0;
    if (j->rc < 0) {
        j->made = j->node;
        return 0;
    }
    pthread_mutex_lock(&j->made->lock);
    work = j->awaited ? MASK_WORK_MOST - j->made->work : work;
    struct place p = {j->made->ops, j->made->state, .ends_ignored = j->ends_ignored, .work = work};
    j->rc = advance(&p, j->token, j->n_tokens, c, word);
    j->n_taken = p.n_taken;
    j->ended = p.ended;
    account(j, work - p.work);
    if (j->rc == 0 && !j->ended && !j->late) {
        if (j->wants_forced && p.ops->forced) {
            j->n_forced = p.ops->forced(p.state, j->forced, LIMIT_DRAFT);
        }
        j->n_masked = 1;
        mask_drafts(j, &p, c, word);
    }
    pthread_mutex_unlock(&j->made->lock);
    return work - p.work;
}

/* ---- the threads ---- */

/* Gives the executor the masks of the set under way. An error shows when the step is
 * waited for. */
static void deliver(struct masks *m, const struct mask_set *set)
{
    struct err ignored;

    for (int32_t i = 0; i < set->n; i++) {
        const struct mask_job *j = &set->job[i];
        for (int32_t k = 0; k < j->n; k++) {
            bool there = j->node && k < j->n_masked;
            m->late[j->first + k].word =
                there ? m->word + (int64_t)(j->first + k) * m->words : NULL;
        }
    }
    m->executor->masks(m->executor, set->step, m->late, set->n_masks, &ignored);
    hist_add(m->took_s, (double)(clock_us() - m->begun_us) * 1e-6);
}

static bool has_jobs(struct masks *m)
{
    uint64_t jobs = atomic_load(&m->jobs);

    return (uint32_t)jobs < jobs >> 32;
}

/* The last job of the set under way is done. */
static void end_set(struct masks *m)
{
    deliver(m, m->work);
    pthread_mutex_lock(&m->lock);
    m->work = NULL;
    pthread_cond_broadcast(&m->changed);
    pthread_mutex_unlock(&m->lock);
}

/* The work of the next job, of `left` for all that follow. A single step of an
 * automaton may take more than its job has; where such steps took the work of another
 * set, the remaining jobs give only masks that are known. */
static int64_t share_of(int64_t left)
{
    return left < -MASK_WORK_SET ? 0 : MAX(MIN(left, MASK_WORK_STEP), MASK_WORK_LEAST);
}

/* Jobs are short, so threads take them without the lock. */
static void run_jobs(struct masks *m)
{
    while (has_jobs(m)) {
        uint64_t jobs = atomic_fetch_add(&m->jobs, 1);
        if ((uint32_t)jobs >= jobs >> 32) {
            break;
        }
        uint32_t at = (uint32_t)jobs + m->turn / (uint32_t)m->n_sets;
        struct mask_job *j = &m->work->job[at % (uint32_t)m->work->n];
        if (j->node) { /* else its sequence has ended */
            int64_t used = mask_job_run(j, &m->config, share_of(atomic_load(&m->work_left)),
                                        m->word + (int64_t)j->first * m->words);
            atomic_fetch_sub(&m->work_left, used);
        }
        if (atomic_fetch_sub(&m->n_left, 1) == 1) {
            end_set(m);
        }
    }
}

static void *masks_main(void *arg)
{
    struct masks *m = arg;

    pthread_mutex_lock(&m->lock);
    while (!m->stopping) {
        struct constraint_node *dropped = m->dropped;
        if (has_jobs(m)) {
            pthread_mutex_unlock(&m->lock);
            run_jobs(m);
            pthread_mutex_lock(&m->lock);
        } else if (dropped) {
            m->dropped = NULL;
            pthread_mutex_unlock(&m->lock);
            free_all(dropped);
            pthread_mutex_lock(&m->lock);
        } else {
            pthread_cond_wait(&m->changed, &m->lock);
        }
    }
    pthread_mutex_unlock(&m->lock);
    return NULL;
}

/* ---- the engine's side ---- */

static struct mask_set *set_at(struct masks *m, uint64_t n)
{
    return &m->set[n % (uint64_t)m->n_sets];
}

void masks_planned(struct masks *m, const struct plan *p)
{
    struct mask_set *set = set_at(m, m->n_planned++);

    set->n = 0;
    if (p) {
        mask_set_plan(set, p);
    }
}

static void begin_set(struct masks *m, struct mask_set *set)
{
    if (set->n == 0) {
        return;
    }
    m->begun_us = clock_us();
    if (mask_set_begin(set) == 0) { /* all have ended; the step waits nevertheless */
        deliver(m, set);
        return;
    }
    pthread_mutex_lock(&m->lock);
    m->turn++;
    m->work = set;
    atomic_store(&m->n_left, set->n);
    atomic_store(&m->work_left, (int64_t)MASK_WORK_SET * m->n_threads);
    atomic_store(&m->jobs, (uint64_t)set->n << 32);
    pthread_cond_broadcast(&m->changed);
    pthread_mutex_unlock(&m->lock);
}

void masks_begin(struct masks *m, uint64_t n_committed)
{
    while (m->n_begun < m->n_planned && m->n_begun <= n_committed) {
        begin_set(m, set_at(m, m->n_begun++));
    }
}

/* Waits until no job is under way. */
static void settle(struct masks *m)
{
    pthread_mutex_lock(&m->lock);
    while (m->work) {
        pthread_cond_wait(&m->changed, &m->lock);
    }
    pthread_mutex_unlock(&m->lock);
}

void masks_collect(struct masks *m, uint64_t n, struct sched *s)
{
    struct mask_set *set = set_at(m, n);

    if (set->n == 0) {
        return;
    }
    settle(m);
    mask_set_collect(s, set);
}

void masks_abandon(struct masks *m, uint64_t n, struct sched *s)
{
    struct err ignored;

    settle(m);
    m->executor->masks(m->executor, 0, NULL, 0, &ignored);
    m->n_begun = m->n_planned;
    for (; n < m->n_planned; n++) {
        mask_set_drop(s, set_at(m, n));
    }
}

void masks_reap(struct masks *m, struct sched *s)
{
    struct constraint_node *first = sched_take_dropped(s), *last = first;

    if (!first) {
        return;
    }
    while (last->next) {
        last = last->next;
    }
    pthread_mutex_lock(&m->lock);
    last->next = m->dropped;
    m->dropped = first;
    pthread_cond_broadcast(&m->changed);
    pthread_mutex_unlock(&m->lock);
}

/* ---- start and stop ---- */

static int start_threads(struct masks *m, struct err *e)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);

    for (int32_t i = 0; i < MAX(1, MIN(cores / 2, MASKS_THREADS)); i++) {
        if (pthread_create(&m->thread[i], NULL, masks_main, m) != 0) {
            break;
        }
        pthread_setname_np(m->thread[i], "quire-masks");
        m->n_threads++;
    }
    return m->n_threads > 0 ? 0 : err_set(e, ERR_IO, "cannot start a thread for masks");
}

int masks_open(struct masks **ret, struct executor *x, const struct sched_config *c, bool forced,
               struct hist *took_s, struct err *e)
{
    struct masks *m = calloc(1, sizeof(*m));
    size_t seqs = (size_t)c->max_num_seqs;

    if (!m) {
        return err_nomem(e, "masks");
    }
    pthread_mutex_init(&m->lock, NULL);
    pthread_cond_init(&m->changed, NULL);
    m->executor = x;
    m->took_s = took_s;
    m->config = *c;
    m->words = mask_words(c->vocab);
    m->n_sets = x->info.depth + 1;
    m->word = malloc(seqs * (size_t)m->words * sizeof(*m->word)); /* touched where needed */
    m->late = calloc(seqs, sizeof(*m->late));
    bool there = m->word && m->late;
    for (int32_t i = 0; i < m->n_sets; i++) {
        m->set[i].wants_forced = forced;
        m->set[i].all_awaited = sched_kv_groups(c) > 1;
        m->set[i].job = calloc(seqs, sizeof(*m->set[i].job));
        there = there && m->set[i].job;
    }
    int rc = there ? start_threads(m, e) : err_nomem(e, "masks");
    if (rc < 0) {
        masks_free(m);
        return rc;
    }
    *ret = m;
    return 0;
}

void masks_free(struct masks *m)
{
    if (!m) {
        return;
    }
    pthread_mutex_lock(&m->lock);
    m->stopping = true;
    pthread_cond_broadcast(&m->changed);
    pthread_mutex_unlock(&m->lock);
    for (int32_t i = 0; i < m->n_threads; i++) {
        pthread_join(m->thread[i], NULL);
    }
    free_all(m->dropped);
    for (int32_t i = 0; i < MASKS_SETS; i++) {
        free(m->set[i].job);
    }
    free(m->word);
    free(m->late);
    pthread_mutex_destroy(&m->lock);
    pthread_cond_destroy(&m->changed);
    free(m);
}
