/* Sampling against an implementation by full sort, token by token, and against the
 * expected distribution.
 *
 * Given the same logits every backend samples the same token (kernels/noise.h), so
 * tokens are compared exactly; log-probabilities are compared with float64.
 *
 *     build/tests/unit/kernels/test_sample [--device cpu|cuda]
 */
#include <pthread.h>
#include <time.h>

#include "kernels/noise.h"
#include "tests/unit/ops.h"

enum { CONTEXT = 200, MASK_WORDS = 1 << 17 };

/* The bias lists and masks of sampling rows, and the tokens of their sequences as the
 * backend's blocks hold them. */
struct table {
    struct token_bias bias[4096];
    uint32_t mask[MASK_WORDS];
    int32_t n_bias, n_mask;
    int32_t token[RIG_SEQS][CONTEXT];
};

static struct sample_row plain_row(int32_t logits_row)
{
    return (struct sample_row){.logits_row = logits_row,
                               .kind = SAMPLE_TOKEN,
                               .temperature = 1,
                               .top_p = 1,
                               .repetition_penalty = 1,
                               .n_logprobs = -1,
                               .mask_first = -1};
}

/* Run a step of n_logits rows (one token each) with these samples. Logits [n_logits,
 * vocab] are sampled in chunks, each in a matrix of at least QUIRE_TEST_ROWS rows: with
 * so many, a GPU's blocks do not share a row, which racecheck cannot follow. */
static struct results run_sampling(struct rig *r, const float *logits, int32_t n_logits,
                                   int32_t vocab, const struct sample_row *row, int32_t n,
                                   const struct table *t, int32_t chunk)
{
    static int32_t zero[RIG_TOKENS];
    int32_t minus[RIG_TOKENS], pick[RIG_TOKENS], q_start[2] = {0, n_logits};

    for (int32_t i = 0; i < n_logits; i++) {
        minus[i] = -1;
        pick[i] = i;
    }
    struct batch b = {.n_tokens = n_logits,
                      .token = zero,
                      .token_src = minus,
                      .position = zero,
                      .slot = minus,
                      .n_seqs = 1,
                      .q_start = q_start,
                      .kv_len = &n_logits,
                      .row = zero,
                      .lcp_blocks = zero,
                      .n_logits = n_logits,
                      .logits_token = pick,
                      .n_samples = n,
                      .sample = row};
    if (t) {
        b.token_bias = t->bias;
        b.mask_word = t->mask;
        b.n_token_bias = t->n_bias;
        b.n_mask_word = t->n_mask;
    }
    rig_begin(r, &b);
    const char *least = getenv("QUIRE_TEST_ROWS");
    for (int32_t first = 0; first < n_logits; first += chunk) {
        int32_t rows = MIN(chunk, n_logits - first);
        struct mat m =
            rig_mat(r, MAX(rows, least != NULL ? atoi(least) : 1), vocab, DTYPE_F32, NULL);
        rig_upload(r, mat_rows(m, 0, rows), logits + (int64_t)first * vocab);
        r->b->ops->sample(r->b, m, first);
    }
    return rig_end(r);
}

/* ---- sequences in the backend's blocks ---- */

/* A cache of one small layer, for the tokens' ids that its blocks hold. */
static void open_cached(struct rig *r, int32_t block_size, int32_t n_blocks, int32_t n_host_blocks)
{
    struct err e = {0};
    struct kv_layout kv;

    rig_open(r);
    kv_layout_init(&kv, block_size, 1, 1, 16, act_of(r, DTYPE_BF16));
    if (r->b->ops->kv_create(r->b, &kv, n_blocks, n_host_blocks, &e) < 0) {
        fail_msg("%s", e.text);
    }
}

/* A step's memory operations. */
struct moves {
    const struct block_copy *out, *in, *copy;
    int32_t n_out, n_in, n_copy;
};

/* A step that writes tokens [first, first + n) of the sequence with table row `row` and
 * blocks `block`. */
static void write_piece(struct rig *r, int32_t row, const int32_t *block, int32_t block_size,
                        const int32_t *token, int32_t first, int32_t n, const struct moves *m)
{
    static const struct moves none;
    int32_t position[RIG_TOKENS], slot[RIG_TOKENS], q_start[2] = {0, n}, len = first + n, zero = 0;

    m = m ? m : &none;
    for (int32_t i = 0; i < n; i++) {
        position[i] = first + i;
        slot[i] = block[(first + i) / block_size] * block_size + (first + i) % block_size;
    }
    struct table_update u = {.row = row, .count = (int32_t)div_ceil(len, block_size)};
    struct batch b = {.swap_out = m->out,
                      .n_swap_out = m->n_out,
                      .swap_in = m->in,
                      .n_swap_in = m->n_in,
                      .copy = m->copy,
                      .n_copy = m->n_copy,
                      .table_update = &u,
                      .n_table_update = 1,
                      .table_block = block,
                      .n_table_block = u.count,
                      .n_tokens = n,
                      .token = token + first,
                      .position = position,
                      .slot = slot,
                      .n_seqs = 1,
                      .n_decode = n == 1,
                      .q_start = q_start,
                      .kv_len = &len,
                      .row = &row,
                      .lcp_blocks = &zero};
    rig_begin(r, &b);
    rig_end(r);
}

static void write_sequence(struct rig *r, int32_t row, const int32_t *block, int32_t block_size,
                           const int32_t *token, int32_t n)
{
    for (int32_t first = 0; first < n; first += RIG_TOKENS) {
        write_piece(r, row, block, block_size, token, first, MIN(n - first, RIG_TOKENS), NULL);
    }
}

enum { CONTEXT_BLOCK = 16, CONTEXT_BLOCKS = (CONTEXT + CONTEXT_BLOCK - 1) / CONTEXT_BLOCK };

static void open_contexts(struct rig *r)
{
    open_cached(r, CONTEXT_BLOCK, RIG_SEQS * CONTEXT_BLOCKS, 0);
}

/* Random sequences, most of them with few different ids, in all table rows. */
static void random_contexts(struct rig *r, struct table *t, int32_t vocab)
{
    for (int32_t row = 0; row < RIG_SEQS; row++) {
        int32_t block[CONTEXT_BLOCKS];
        for (int32_t i = 0; i < CONTEXT_BLOCKS; i++) {
            block[i] = i * RIG_SEQS + row; /* no two consecutive blocks are of one sequence */
        }
        for (int32_t i = 0; i < CONTEXT; i++) {
            t->token[row][i] = rig_below(r, rig_below(r, 3) > 0 ? MIN(vocab, 12) : vocab);
        }
        write_sequence(r, row, block, CONTEXT_BLOCK, t->token[row], CONTEXT);
    }
    t->n_bias = t->n_mask = 0;
}

/* ---- the reference: process the logits, sort, filter, sample ---- */

struct entry {
    float z;
    int32_t token;
    uint64_t mass;
};

static int better_first(const void *a, const void *b)
{
    const struct entry *x = a;
    const struct entry *y = b;

    return x->z != y->z ? (x->z < y->z ? 1 : -1) : (x->token > y->token) - (x->token < y->token);
}

/* Penalties by the tokens of a sequence. */
static void penalise_reference(float *l, int32_t vocab, const struct sample_row *s,
                               const int32_t *token)
{
    int32_t *n_output = rig_alloc((size_t)vocab * sizeof(*n_output));
    bool *seen = rig_alloc((size_t)vocab * sizeof(*seen));

    for (int32_t i = 0; i < s->position; i++) {
        n_output[token[i]] += i >= s->n_prompt;
        seen[token[i]] = true;
    }
    for (int32_t v = 0; v < vocab; v++) {
        if (seen[v] && s->repetition_penalty != 1) {
            l[v] = l[v] > 0 ? l[v] / s->repetition_penalty : l[v] * s->repetition_penalty;
        }
        if (n_output[v] > 0) {
            l[v] -= s->frequency_penalty * (float)n_output[v];
            l[v] -= s->presence_penalty;
        }
    }
    free(n_output);
    free(seen);
}

static bool wants_penalties(const struct sample_row *s)
{
    return s->repetition_penalty != 1 || s->presence_penalty != 0 || s->frequency_penalty != 0;
}

static void process_reference(float *l, int32_t vocab, const struct sample_row *s,
                              const struct table *t)
{
    if (wants_penalties(s)) {
        penalise_reference(l, vocab, s, t->token[s->row]);
    }
    for (int32_t i = s->bias_first; i < s->bias_first + s->n_bias; i++) {
        l[t->bias[i].token] += t->bias[i].bias;
    }
    for (int32_t v = 0; v < vocab && s->mask_first >= 0; v++) {
        if ((t->mask[s->mask_first + v / 32] >> v % 32 & 1) == 0) {
            l[v] = -INFINITY;
        }
    }
}

/* How many of the sorted entries are kept. */
static int32_t cut_reference(const struct entry *e, int32_t n, const struct sample_row *s)
{
    int32_t keep = n;

    if (s->top_k > 0 && s->top_k < n) {
        for (keep = s->top_k; keep < n && e[keep].z == e[s->top_k - 1].z; keep++) {
        }
    }
    if (s->top_p < 1) {
        uint64_t total = 0;
        uint64_t sum = 0;
        for (int32_t i = 0; i < keep; i++) {
            total += e[i].mass;
        }
        uint64_t goal = sample_mass_goal(s->top_p, total);
        int32_t i = 0;
        while (i < keep && (sum < goal || e[i].z == e[i - 1].z)) {
            sum += e[i++].mass;
        }
        keep = i;
    }
    while (keep > 0 && e[keep - 1].mass < (uint64_t)(s->min_p * 0x1p40f)) {
        keep--;
    }
    return keep;
}

static int32_t draw_reference(const float *l, int32_t vocab, const struct sample_row *s)
{
    struct entry *e = rig_alloc((size_t)vocab * sizeof(*e));
    float max = -INFINITY;
    int32_t greedy = -1;

    for (int32_t v = 0; v < vocab; v++) {
        greedy = l[v] > max ? v : greedy;
        max = MAX(max, l[v]);
    }
    int32_t token = greedy;
    if (greedy >= 0 && s->temperature > 0 && s->top_k != 1) {
        for (int32_t v = 0; v < vocab; v++) {
            float z = (l[v] - max) * noise_inv_temperature(s->temperature);
            e[v] = (struct entry){.z = z, .token = v, .mass = sample_mass(z)};
        }
        qsort(e, (size_t)vocab, sizeof(*e), better_first);
        int32_t n = cut_reference(e, vocab, s);
        float best = -INFINITY;
        for (int32_t i = 0; i < n; i++) {
            float score =
                e[i].z + noise_gumbel(noise_bits(noise_key(s->seed, s->position), e[i].token));
            token = score > best || (score == best && e[i].token < token) ? e[i].token : token;
            best = MAX(best, score);
        }
    }
    free(e);
    return token;
}

static double logprob_reference(const float *l, int32_t vocab, int32_t token)
{
    double max = -INFINITY;
    double sum = 0;

    for (int32_t v = 0; v < vocab; v++) {
        max = MAX(max, (double)l[v]);
    }
    for (int32_t v = 0; v < vocab; v++) {
        sum += exp(l[v] - max);
    }
    return l[token] - max - log(sum);
}

static void check_top(const struct results *res, int32_t i, const float *l, int32_t vocab,
                      int32_t n)
{
    struct entry *e = rig_alloc((size_t)vocab * sizeof(*e));
    int32_t finite = 0;

    for (int32_t v = 0; v < vocab; v++) {
        e[v] = (struct entry){.z = l[v], .token = v};
        finite += l[v] > -INFINITY;
    }
    qsort(e, (size_t)vocab, sizeof(*e), better_first);
    const int32_t *token = res->top_token + (int64_t)i * res->top_stride;
    const float *logprob = res->top_logprob + (int64_t)i * res->top_stride;
    for (int32_t k = 0; k < n; k++) {
        assert_int_equal(token[k], k < finite ? e[k].token : -1);
        if (k < finite) {
            assert_true(fabs(logprob[k] - logprob_reference(l, vocab, token[k])) < 1e-4);
        } else {
            assert_true(logprob[k] == -INFINITY);
        }
    }
    free(e);
}

/* ---- random rows ---- */

/* Logits of several kinds: flat, peaked, with ties, with a few at -infinity. */
static void random_logits(struct rig *r, float *l, int32_t vocab)
{
    int32_t kind = rig_below(r, 5);
    float range = kind == 0 ? 0.5f : kind == 1 ? 4.0f : 12.0f;

    for (int32_t v = 0; v < vocab; v++) {
        l[v] = rig_uniform(r) * range;
        l[v] = kind == 2 ? floorf(l[v]) : l[v];
        l[v] = kind == 3 && rig_below(r, 3) == 0 ? -INFINITY : l[v];
    }
    l[rig_below(r, vocab)] = kind == 4 ? 20.0f : 1.0f;
}

static void random_lists(struct rig *r, struct sample_row *s, struct table *t, int32_t vocab)
{
    if (rig_below(r, 2) == 0) {
        s->repetition_penalty = rig_below(r, 2) == 0 ? 1.0f : 1.3f;
        s->presence_penalty = rig_below(r, 2) == 0 ? 0 : rig_uniform(r) * 2;
        s->frequency_penalty = rig_below(r, 2) == 0 ? 0 : rig_uniform(r) * 2;
        s->row = rig_below(r, RIG_SEQS);
        s->n_prompt = rig_below(r, CONTEXT);
        s->position = s->n_prompt + rig_below(r, CONTEXT + 1 - s->n_prompt);
    }
    if (rig_below(r, 3) == 0) {
        s->bias_first = t->n_bias;
        for (int32_t v = rig_below(r, 5); v < vocab && s->n_bias < 8; v += 1 + rig_below(r, 9)) {
            t->bias[t->n_bias++] =
                (struct token_bias){v, rig_below(r, 3) == 0 ? -INFINITY : rig_uniform(r) * 5};
            s->n_bias++;
        }
    }
    if (rig_below(r, 4) == 0) {
        int32_t every = rig_below(r, 2) == 0 ? 2 : MAX(vocab / 20, 2);
        s->mask_first = t->n_mask;
        t->n_mask += mask_words(vocab);
        assert_true(t->n_mask <= MASK_WORDS);
        memset(t->mask + s->mask_first, 0, (size_t)mask_words(vocab) * sizeof(*t->mask));
        for (int32_t v = rig_below(r, MIN(vocab, 5)); v < vocab; v += 1 + rig_below(r, every)) {
            t->mask[s->mask_first + v / 32] |= 1u << v % 32;
        }
    }
}

static struct sample_row random_row(struct rig *r, int32_t logits_row, struct table *t,
                                    int32_t vocab)
{
    static const float temperature[] = {0, 0.01f, 0.7f, 1, 1.8f};
    static const float top_p[] = {1, 1, 0.05f, 0.5f, 0.9f, 0.999f};
    static const float min_p[] = {0, 0, 0.02f, 0.3f, 1};
    static const int32_t top_k[] = {0, 0, 1, 2, 7, 50, 100000};
    struct sample_row s = plain_row(logits_row);

    s.temperature = temperature[rig_below(r, 5)];
    s.top_p = top_p[rig_below(r, 6)];
    s.min_p = min_p[rig_below(r, 5)];
    s.top_k = top_k[rig_below(r, 7)];
    s.n_logprobs = rig_below(r, 6) - 1;
    s.seed = rig_next(r);
    s.position = rig_below(r, 5000);
    random_lists(r, &s, t, vocab);
    return s;
}

static void every_row_draws_what_a_full_sort_draws(void **state)
{
    (void)state;
    static const int32_t vocab_of[] = {1, 7, 64, 1000, 5003, 49152};
    struct rig r;
    open_contexts(&r);
    struct table *t = rig_alloc(sizeof(*t));
    for (int32_t round = 0; round < (rig_small() ? 5 : 24); round++) { /* small: not the widest */
        enum { ROWS = 10 };
        if (!whole_takes((size_t)round / ARRAY_LEN(vocab_of), 24 / ARRAY_LEN(vocab_of))) {
            continue;
        }
        int32_t vocab = rig_small() ? MIN(vocab_of[round % 6], 2003) : vocab_of[round % 6];
        float *logits = rig_alloc((size_t)ROWS * (size_t)vocab * sizeof(*logits));
        struct sample_row row[2 * ROWS];
        random_contexts(&r, t, vocab);
        for (int32_t i = 0; i < 2 * ROWS; i++) { /* two samples a logits row */
            if (i % 2 == 0) {
                random_logits(&r, logits + (int64_t)(i / 2) * vocab, vocab);
            }
            row[i] = random_row(&r, i / 2, t, vocab);
        }
        struct results res =
            run_sampling(&r, logits, ROWS, vocab, row, 2 * ROWS, t, round % 2 == 0 ? ROWS : 4);
        for (int32_t i = 0; i < 2 * ROWS; i++) {
            const float *raw = logits + (int64_t)(i / 2) * vocab;
            float *l = rig_alloc((size_t)vocab * sizeof(*l));
            memcpy(l, raw, (size_t)vocab * sizeof(*l));
            process_reference(l, vocab, &row[i], t);
            int32_t want = draw_reference(l, vocab, &row[i]);
            assert_int_equal(res.token[i], want < 0 ? TOKEN_NONE_ALLOWED : want);
            if (want >= 0) {
                assert_true(fabs(res.logprob[i] - logprob_reference(raw, vocab, want)) < 1e-4);
                check_top(&res, i, raw, vocab, row[i].n_logprobs);
            }
            free(l);
        }
        free(logits);
    }
    free(t);
    rig_close(&r);
}

/* On a GPU the number of rows decides how many blocks share a row, and whether they
 * keep it in shared memory. */
static void rows_of_every_number_draw_what_a_full_sort_draws(void **state)
{
    (void)state;
    enum { VOCAB = 700, MOST = 150 };
    static const int32_t rows_of[] = {33, 60, 130, MOST};
    struct rig r;
    open_contexts(&r);
    struct table *t = rig_alloc(sizeof(*t));
    float *logits = rig_alloc((size_t)MOST * VOCAB * sizeof(*logits));
    struct sample_row row[MOST];
    for (size_t k = 0; k < ARRAY_LEN(rows_of); k++) {
        if (!whole_takes(k, ARRAY_LEN(rows_of))) {
            continue;
        }
        random_contexts(&r, t, VOCAB);
        /* small: most rows are not sampled */
        int32_t n = 0, every = rig_small() ? rows_of[k] / 3 : 1;
        for (int32_t i = 0; i < rows_of[k]; i++) {
            random_logits(&r, logits + (int64_t)i * VOCAB, VOCAB);
            if (i % every == 0) {
                row[n++] = random_row(&r, i, t, VOCAB);
            }
        }
        struct results res = run_sampling(&r, logits, rows_of[k], VOCAB, row, n, t, rows_of[k]);
        for (int32_t i = 0; i < n; i++) {
            const float *raw = logits + (int64_t)row[i].logits_row * VOCAB;
            float l[VOCAB];
            memcpy(l, raw, sizeof(l));
            process_reference(l, VOCAB, &row[i], t);
            assert_int_equal(res.token[i], draw_reference(l, VOCAB, &row[i]));
            check_top(&res, i, raw, VOCAB, row[i].n_logprobs);
        }
    }
    free(logits);
    free(t);
    rig_close(&r);
}

/* Rows too wide for a GPU's shared memory, and one that just fits. */
static void wide_rows_draw_what_a_full_sort_draws(void **state)
{
    (void)state;
    enum { SAMPLES = 4 };
    static const int32_t vocab_of[] = {128256, 500003};
    struct rig r;
    open_contexts(&r);
    struct table *t = rig_alloc(sizeof(*t));
    for (size_t w = 0; w < (rig_small() ? 1 : ARRAY_LEN(vocab_of)); w++) {
        if (!whole_takes(w, ARRAY_LEN(vocab_of))) {
            continue;
        }
        int32_t vocab = rig_small() ? 3001 : vocab_of[w];
        float *logits = rig_alloc((size_t)vocab * sizeof(*logits));
        float *l = rig_alloc((size_t)vocab * sizeof(*l));
        struct sample_row row[SAMPLES];
        random_logits(&r, logits, vocab);
        random_contexts(&r, t, vocab);
        for (int32_t i = 0; i < SAMPLES; i++) {
            row[i] = random_row(&r, 0, t, vocab);
            row[i].temperature = 0.8f;
            row[i].top_k = i == 0 ? 50 : 0;
            row[i].top_p = i < 2 ? 0.95f : 1;
            row[i].n_logprobs = i;
        }
        struct results res = run_sampling(&r, logits, 1, vocab, row, SAMPLES, t, 1);
        for (int32_t i = 0; i < SAMPLES; i++) {
            memcpy(l, logits, (size_t)vocab * sizeof(*l));
            process_reference(l, vocab, &row[i], t);
            assert_int_equal(res.token[i], draw_reference(l, vocab, &row[i]));
            check_top(&res, i, logits, vocab, row[i].n_logprobs);
        }
        free(l);
        free(logits);
    }
    free(t);
    rig_close(&r);
}

/* Rows share a bias list, as samples of one request do. Every row's sampled token is
 * one that the list raises, so each must have used its own logit. */
static void rows_that_share_lists_keep_their_own_logits(void **state)
{
    (void)state;
    enum { ROWS = 96, VOCAB = 5000, LISTED = 40 };
    struct rig r;
    open_contexts(&r);
    struct table *t = rig_alloc(sizeof(*t));
    float *logits = rig_alloc((size_t)ROWS * VOCAB * sizeof(*logits));
    struct sample_row row[ROWS];
    random_contexts(&r, t, VOCAB);
    for (int32_t k = 0; k < LISTED; k++) {
        t->token[0][k] = k * 7;
        t->bias[t->n_bias++] = (struct token_bias){k * 7, 30};
    }
    int32_t block[CONTEXT_BLOCKS] = {2, 0, 1};
    write_sequence(&r, 0, block, CONTEXT_BLOCK, t->token[0], LISTED);
    for (int32_t i = 0; i < ROWS; i++) {
        random_logits(&r, logits + (int64_t)i * VOCAB, VOCAB);
        row[i] = plain_row(i);
        row[i].temperature = 0;
        row[i].frequency_penalty = 0.5f;
        row[i].position = LISTED;
        row[i].n_bias = LISTED;
    }
    struct results res = run_sampling(&r, logits, ROWS, VOCAB, row, ROWS, t, ROWS);
    for (int32_t i = 0; i < ROWS; i++) {
        assert_true(res.token[i] >= 0 && res.token[i] % 7 == 0 && res.token[i] < 7 * LISTED);
        float want = logprob_reference(logits + (int64_t)i * VOCAB, VOCAB, res.token[i]);
        assert_true(want == -INFINITY ? res.logprob[i] == want
                                      : fabs(res.logprob[i] - want) < 1e-4);
    }
    free(logits);
    free(t);
    rig_close(&r);
}

static void candidates_are_the_best_processed_tokens(void **state)
{
    (void)state;
    enum { ROWS = 6 };
    static const int32_t vocab_of[] = {3, 300, 20000};
    struct rig r;
    open_contexts(&r);
    struct table *t = rig_alloc(sizeof(*t));
    for (int32_t round = 0; round < (rig_small() ? 2 : 9); round++) {
        int32_t vocab = vocab_of[round % 3];
        float *logits = rig_alloc((size_t)ROWS * (size_t)vocab * sizeof(*logits));
        struct sample_row row[ROWS];
        random_contexts(&r, t, vocab);
        for (int32_t i = 0; i < ROWS; i++) {
            random_logits(&r, logits + (int64_t)i * vocab, vocab);
            row[i] = random_row(&r, i, t, vocab);
            row[i].kind = SAMPLE_CANDIDATES;
            row[i].n_logprobs = -1;
            row[i].n_candidates = i == 0 ? LIMIT_CANDIDATES : 2 * (i + round);
            row[i].n_candidates = MAX(row[i].n_candidates, 1);
        }
        struct results res = run_sampling(&r, logits, ROWS, vocab, row, ROWS, t, ROWS);
        for (int32_t i = 0; i < ROWS; i++) {
            float *l = logits + (int64_t)i * vocab;
            process_reference(l, vocab, &row[i], t);
            check_top(&res, i, l, vocab, row[i].n_candidates);
            assert_int_equal(res.token[i], res.top_token[(int64_t)i * res.top_stride]);
        }
        free(logits);
    }
    free(t);
    rig_close(&r);
}

static void a_score_is_the_log_probability_of_its_target(void **state)
{
    (void)state;
    enum { ROWS = 5, VOCAB = 3000 };
    struct rig r;
    rig_open(&r);
    float *logits = rig_alloc((size_t)ROWS * VOCAB * sizeof(*logits));
    struct sample_row row[ROWS];
    for (int32_t i = 0; i < ROWS; i++) {
        random_logits(&r, logits + (int64_t)i * VOCAB, VOCAB);
        row[i] = plain_row(i);
        row[i].kind = SAMPLE_SCORE;
        row[i].target = 17 * i;
        row[i].n_logprobs = i;
        logits[(int64_t)i * VOCAB + 17 * i] = (float)i;
    }
    struct results res = run_sampling(&r, logits, ROWS, VOCAB, row, ROWS, NULL, 2);
    for (int32_t i = 0; i < ROWS; i++) {
        const float *l = logits + (int64_t)i * VOCAB;
        assert_int_equal(res.token[i], row[i].target);
        assert_true(fabs(res.logprob[i] - logprob_reference(l, VOCAB, row[i].target)) < 1e-4);
        check_top(&res, i, l, VOCAB, i);
    }
    free(logits);
    rig_close(&r);
}

static void greedy_takes_the_smallest_id_of_a_tie(void **state)
{
    (void)state;
    enum { VOCAB = 49157 };
    struct rig r;
    rig_open(&r);
    float *logits = rig_floats(&r, VOCAB, 1, DTYPE_F32);
    struct sample_row row = plain_row(0);
    row.temperature = 0;
    static const int32_t at[] = {0, 1, 7, 8, 1023, 30000, VOCAB - 2};
    for (size_t i = 0; i < ARRAY_LEN(at); i++) {
        logits[at[i]] = 5 + (float)i; /* greater each round */
        logits[VOCAB - 1] = 5 + (float)i;
        assert_int_equal(run_sampling(&r, logits, 1, VOCAB, &row, 1, NULL, 1).token[0], at[i]);
    }
    for (int32_t v = 0; v < VOCAB; v++) {
        logits[v] = -0.0f;
    }
    logits[9] = 0.0f; /* equal to -0 */
    assert_int_equal(run_sampling(&r, logits, 1, VOCAB, &row, 1, NULL, 1).token[0], 0);
    free(logits);
    rig_close(&r);
}

/* A NaN anywhere, an infinity, or nothing above -infinity: no token, in that row
 * only. */
static void bad_logits_give_no_token(void **state)
{
    (void)state;
    enum { VOCAB = 1003, ROWS = 8 };
    struct rig r;
    rig_open(&r);
    float *logits = rig_floats(&r, ROWS * VOCAB, 1, DTYPE_F32);
    struct sample_row row[2 * ROWS];
    for (int32_t i = 0; i < 2 * ROWS; i++) {
        row[i] = plain_row(i / 2);
        row[i].temperature = i % 2 == 0 ? 0 : 0.8f;
        row[i].n_logprobs = 3;
    }
    logits[1 * VOCAB] = NAN;
    logits[2 * VOCAB + 501] = -NAN;
    logits[3 * VOCAB + VOCAB - 1] = NAN;
    logits[4 * VOCAB + 77] = INFINITY;
    for (int32_t v = 0; v < VOCAB; v++) {
        logits[5 * VOCAB + v] = -INFINITY;
    }
    logits[6 * VOCAB + 5] = -INFINITY;
    struct results res = run_sampling(&r, logits, ROWS, VOCAB, row, 2 * ROWS, NULL, ROWS);
    for (int32_t i = 0; i < 2 * ROWS; i++) {
        bool bad = i / 2 >= 1 && i / 2 <= 5;
        assert_true(bad ? res.token[i] == TOKEN_NO_NUMBER
                        : res.token[i] >= 0 && res.token[i] < VOCAB);
    }
    free(logits);
    rig_close(&r);
}

/* The model's logits are valid in rows 0 and 1, and hold a NaN in row 2. */
static void a_request_that_leaves_no_token_is_told_from_bad_logits(void **state)
{
    (void)state;
    enum { VOCAB = 1003, ROWS = 3, EACH = 4 };
    struct rig r;
    open_contexts(&r);
    float *logits = rig_floats(&r, ROWS * VOCAB, 1, DTYPE_F32);
    struct table *t = rig_alloc(sizeof(*t));
    struct sample_row row[ROWS * EACH];
    for (int32_t v = 0; v < VOCAB; v++) {
        t->bias[v] = (struct token_bias){v, -INFINITY};
    }
    t->bias[VOCAB] = (struct token_bias){500, -INFINITY};
    t->mask[500 / 32] = 1u << 500 % 32;
    t->n_bias = VOCAB + 1;
    t->n_mask = mask_words(VOCAB);
    write_sequence(&r, 0, &(int32_t){0}, CONTEXT_BLOCK, &(int32_t){500}, 1);
    logits[500] = logits[VOCAB + 500] = 70;
    logits[2 * VOCAB + 3] = NAN;
    for (int32_t i = 0; i < ROWS * EACH; i++) {
        struct sample_row *s = &row[i];
        *s = plain_row(i / EACH);
        s->n_logprobs = i % 2;
        s->temperature = i % 4 < 2 ? 0 : 0.8f;
        s->kind = i % EACH == 3 ? SAMPLE_CANDIDATES : SAMPLE_TOKEN;
        s->n_candidates = s->kind == SAMPLE_CANDIDATES ? 5 : 0;
        if (i % EACH == 0) { /* an overflow: 70 divided by next to nothing */
            s->repetition_penalty = 2e-38f;
            s->position = 1;
        } else if (i % EACH == 1) { /* every token banned */
            s->n_bias = VOCAB;
        } else { /* the only ones allowed are banned */
            s->bias_first = VOCAB;
            s->n_bias = 1;
            s->mask_first = 0;
        }
    }
    struct results res = run_sampling(&r, logits, ROWS, VOCAB, row, ROWS * EACH, t, ROWS);
    for (int32_t i = 0; i < ROWS * EACH; i++) {
        bool candidates = row[i].kind == SAMPLE_CANDIDATES;
        int32_t n_best = candidates ? row[i].n_candidates : row[i].n_logprobs;
        assert_int_equal(res.token[i], i < 2 * EACH ? TOKEN_NONE_ALLOWED : TOKEN_NO_NUMBER);
        assert_true(res.logprob[i] == -INFINITY);
        for (int32_t k = 0; k < n_best; k++) {
            assert_int_equal(res.top_token[(int64_t)i * res.top_stride + k], -1);
        }
    }
    free(t);
    free(logits);
    rig_close(&r);
}

/* The token sampled by the step before, which the host does not know yet, is fed back
 * and counts for penalties. */
static void the_step_before_is_looked_up_on_the_device(void **state)
{
    (void)state;
    enum { VOCAB = 50, WIDTH = 16 };
    struct rig r;
    open_contexts(&r);
    static const int32_t known[2][2] = {{5, 31}, {5}};
    write_sequence(&r, 0, &(int32_t){3}, CONTEXT_BLOCK, known[0], 2);
    write_sequence(&r, 1, &(int32_t){4}, CONTEXT_BLOCK, known[1], 1);
    float logits[2 * VOCAB] = {0};
    logits[VOCAB + 31] = 9;
    logits[VOCAB + 8] = 7;
    logits[12] = 5;
    struct sample_row row[2] = {plain_row(0), plain_row(1)};
    row[0].temperature = row[1].temperature = 0;
    struct results res = run_sampling(&r, logits, 2, VOCAB, row, 2, NULL, 2);
    assert_int_equal(res.token[1], 31);

    enum dtype act = act_of(&r, DTYPE_BF16);
    float *table = rig_floats(&r, VOCAB * WIDTH, 1, DTYPE_BF16);
    struct mat w = rig_weight(&r, WEIGHT_EMBEDDING, DTYPE_BF16, VOCAB, WIDTH, table);
    struct mat out = rig_mat(&r, 2, WIDTH, act, NULL);
    struct sample_row next[4] = {plain_row(0), plain_row(1), plain_row(1), plain_row(1)};
    for (int i = 0; i < 4; i++) {
        next[i].temperature = 0;
        next[i].frequency_penalty = 1.2f; /* 31: 9 - 1.2 beats 7, 9 - 2.4 does not */
        next[i].n_prompt = 1;
        next[i].position = 2 + (i == 2);
        next[i].row = i < 2;
    }
    int32_t zero[2] = {0}, src[2] = {1, 0}, minus[2] = {-1, -1}, q_start[3] = {0, 1, 2},
            len[2] = {3, 2}, pick[2] = {0, 1},
            at[2] = {3 * CONTEXT_BLOCK + 2, 4 * CONTEXT_BLOCK + 1}, position[2] = {2, 1};
    struct batch b = {.n_tokens = 2,
                      .token = minus,
                      .token_src = src,
                      .position = position,
                      .slot = at,
                      .n_seqs = 2,
                      .n_decode = 2,
                      .q_start = q_start,
                      .kv_len = len,
                      .row = pick,
                      .lcp_blocks = zero,
                      .n_logits = 2,
                      .logits_token = pick,
                      .n_samples = 4,
                      .sample = next};
    rig_begin(&r, &b);
    r.b->ops->embed(r.b, out, w, 1);
    float *got = rig_download(&r, out);
    r.b->ops->sample(r.b, rig_mat(&r, 2, VOCAB, DTYPE_F32, logits), 0);
    res = rig_end(&r);
    assert_memory_equal(got, table + 31 * WIDTH, WIDTH * sizeof(*got));
    assert_memory_equal(got + WIDTH, table + 12 * WIDTH, WIDTH * sizeof(*got));
    assert_int_equal(res.token[0], 12);
    assert_int_equal(res.token[1], 31);
    assert_int_equal(res.token[2], 8);
    assert_int_equal(res.token[3], 31);
    free(got);
    free(table);
    rig_close(&r);
}

/* Check, from the processed logits of a level row, that the sequence of table row `row`
 * counts exactly the tokens `token`. */
static void check_counts(struct rig *r, int32_t row, const int32_t *token, int32_t n,
                         int32_t n_prompt)
{
    enum { VOCAB = 90 };
    float logits[VOCAB];
    struct sample_row s = plain_row(0);

    s.kind = SAMPLE_CANDIDATES;
    s.n_candidates = VOCAB;
    s.frequency_penalty = 0.5f;
    s.presence_penalty = 0.125f;
    s.repetition_penalty = 1.25f;
    s.row = row;
    s.position = n;
    s.n_prompt = n_prompt;
    for (int32_t v = 0; v < VOCAB; v++) {
        logits[v] = 3 + (float)v / 64;
    }
    struct results res = run_sampling(r, logits, 1, VOCAB, &s, 1, NULL, 1);
    penalise_reference(logits, VOCAB, &s, token);
    check_top(&res, 0, logits, VOCAB, VOCAB);
}

/* Blocks are copied, swapped out and in, shared, and overwritten: a sequence's tokens
 * are always those in its blocks. */
static void tokens_go_where_their_blocks_go(void **state)
{
    (void)state;
    static const int32_t sizes[] = {1, 3, 8, 16, 100};
    for (size_t k = 0; k < ARRAY_LEN(sizes); k++) {
        enum { N = 150, MOST = 160 };
        int32_t size = sizes[k], n_blocks = (int32_t)div_ceil(N, size), fork[N], token[N],
                block[MOST], other[MOST];
        struct rig r;
        open_cached(&r, size, 4 * MOST, MOST);
        for (int32_t i = 0; i < MOST; i++) {
            block[i] = other[i] = 2 * i + 1;
        }
        for (int32_t i = 0; i < N; i++) {
            token[i] = rig_below(&r, 30);
        }
        write_sequence(&r, 5, block, size, token, N - 1);
        check_counts(&r, 5, token, N - 1, 40);
        check_counts(&r, 5, token, 17, 40);

        memcpy(fork, token, sizeof(fork)); /* a fork: only the last block is its own */
        fork[N - 1] = 70;
        token[N - 1] = 71;
        other[n_blocks - 1] = 3 * MOST;
        struct block_copy copy = {block[n_blocks - 1], 3 * MOST};
        write_piece(&r, 6, other, size, fork, N - 1, 1,
                    &(struct moves){.copy = &copy, .n_copy = 1});
        write_piece(&r, 5, block, size, token, N - 1, 1, NULL);
        check_counts(&r, 5, token, N, 40);
        check_counts(&r, 6, fork, N, 40);

        /* to the host, overwritten, and back to other blocks */
        struct block_copy out[MOST], in[MOST];
        int32_t third[N], back[MOST];
        for (int32_t i = 0; i < n_blocks; i++) {
            out[i] = (struct block_copy){other[i], n_blocks - 1 - i};
            in[i] = (struct block_copy){n_blocks - 1 - i, 2 * i};
            back[i] = 2 * i;
        }
        for (int32_t i = 0; i < N; i++) {
            third[i] = 80 + i % 5;
        }
        write_piece(&r, 7, other, size, third, 0, N - 1,
                    &(struct moves){.out = out, .n_out = n_blocks});
        check_counts(&r, 7, third, N - 1, 3);
        write_piece(&r, 7, back, size, fork, N - 1, 1, &(struct moves){.in = in, .n_in = n_blocks});
        check_counts(&r, 7, fork, N, 40);
        check_counts(&r, 6, third, N - 1, 3); /* its blocks hold what the third sequence wrote */
        rig_close(&r);
    }
}

/* The counts of long sequences over wide vocabularies do not fit into a GPU block's
 * shared memory at once. */
static void long_contexts_are_counted_whole(void **state)
{
    (void)state;
    enum { BLOCK = 64, MOST = 150 };
    static const int32_t rows_of[] = {1, 5, 40, MOST};
    const int32_t vocab = rig_small() ? 5003 : 151936,
                  len = rig_small() ? 900 : 64 * RIG_BLOCKS_PER_SEQ;
    const int32_t per = (int32_t)div_ceil(len, BLOCK);
    struct rig r;
    open_cached(&r, BLOCK, 3 * per, 0);
    int32_t *token = rig_alloc(3 * (size_t)len * sizeof(*token)),
            *block = rig_alloc((size_t)per * sizeof(*block));
    for (int32_t q = 0; q < 3; q++) {
        for (int32_t i = 0; i < per; i++) {
            block[i] = i * 3 + (q + i) % 3;
        }
        for (int32_t i = 0; i < len; i++) {
            token[q * len + i] = q == 0 ? 77 : q == 1 ? (i * 31) % vocab : rig_below(&r, vocab);
        }
        write_sequence(&r, 3 * q, block, BLOCK, token + (int64_t)q * len, len);
    }
    float *logits = rig_alloc((size_t)MOST * (size_t)vocab * sizeof(*logits));
    float *l = rig_alloc((size_t)vocab * sizeof(*l));
    struct sample_row row[MOST];
    for (size_t k = 0; k < ARRAY_LEN(rows_of); k++) {
        int32_t n = 0, every = MAX(rows_of[k] / 5, 1);
        for (int32_t i = 0; i < rows_of[k]; i += every) {
            random_logits(&r, logits + (int64_t)i * vocab, vocab);
            row[n] = plain_row(i);
            row[n].temperature = n % 2 == 0 ? 0 : 0.9f;
            row[n].top_p = n % 3 == 1 ? 0.9f : 1;
            row[n].row = 3 * (n % 3);
            row[n].position = n == 4 ? len : rig_below(&r, len + 1);
            row[n].n_prompt = rig_below(&r, row[n].position + 1);
            row[n].frequency_penalty = 0.03f;
            row[n].presence_penalty = 0.4f;
            row[n].repetition_penalty = n % 2 == 0 ? 1.1f : 1;
            row[n++].n_logprobs = 5;
        }
        struct results res = run_sampling(&r, logits, rows_of[k], vocab, row, n, NULL, rows_of[k]);
        for (int32_t i = 0; i < n; i++) {
            const float *raw = logits + (int64_t)row[i].logits_row * vocab;
            memcpy(l, raw, (size_t)vocab * sizeof(*l));
            penalise_reference(l, vocab, &row[i], token + (int64_t)(row[i].row / 3) * len);
            assert_int_equal(res.token[i], draw_reference(l, vocab, &row[i]));
            check_top(&res, i, raw, vocab, 5);
        }
    }
    free(token);
    free(block);
    free(logits);
    free(l);
    rig_close(&r);
}

/* Decode steps of one size, which a GPU records and replays, with other parameters each
 * time. */
static void replayed_steps_ask_what_they_ask(void **state)
{
    (void)state;
    enum { ROWS = 7, VOCAB = 5000, STEPS = 12 };
    struct rig r;
    open_contexts(&r);
    struct table *t = rig_alloc(sizeof(*t));
    float *logits = rig_alloc((size_t)ROWS * VOCAB * sizeof(*logits));
    struct mat m = rig_mat(&r, 8, VOCAB, DTYPE_F32, NULL);
    int32_t ints[ROWS + 1], minus[ROWS];
    for (int32_t i = 0; i <= ROWS; i++) {
        ints[i] = i;
    }
    memset(minus, 0xFF, sizeof(minus));
    random_contexts(&r, t, VOCAB);
    for (int32_t step = 0; step < STEPS; step++) {
        struct sample_row row[ROWS];
        t->n_bias = t->n_mask = 0;
        for (int32_t i = 0; i < ROWS; i++) {
            random_logits(&r, logits + (int64_t)i * VOCAB, VOCAB);
            row[i] = step % 3 == 2 ? plain_row(i) : random_row(&r, i, t, VOCAB);
            row[i].n_logprobs = -1;
        }
        struct batch b = {.n_tokens = ROWS,
                          .token = ints,
                          .token_src = minus,
                          .position = ints,
                          .slot = minus,
                          .n_seqs = ROWS,
                          .n_decode = ROWS,
                          .q_start = ints,
                          .kv_len = ints + 1,
                          .row = ints,
                          .lcp_blocks = (int32_t[ROWS]){0},
                          .n_logits = ROWS,
                          .logits_token = ints,
                          .n_samples = ROWS,
                          .sample = row,
                          .token_bias = t->bias,
                          .mask_word = t->mask,
                          .n_token_bias = t->n_bias,
                          .n_mask_word = t->n_mask};
        rig_upload(&r, mat_rows(m, 0, ROWS), logits);
        rig_begin(&r, &b);
        if (!r.b->ops->replay || !r.b->ops->replay(r.b, &b)) {
            r.b->ops->sample(r.b, mat_rows(m, 0, ROWS), 0);
        }
        struct results res = rig_end(&r);
        for (int32_t i = 0; i < ROWS; i++) {
            float l[VOCAB];
            memcpy(l, logits + (int64_t)i * VOCAB, sizeof(l));
            process_reference(l, VOCAB, &row[i], t);
            assert_int_equal(res.token[i], draw_reference(l, VOCAB, &row[i]));
        }
    }
    free(logits);
    free(t);
    rig_close(&r);
}

/* ---- late masks ---- */

/* Masks on their way to a step that was launched. */
struct courier {
    struct backend *b;
    uint64_t step;
    struct late_mask mask[RIG_TOKENS];
    int32_t n;
    int rc;
};

static void *bring(void *arg)
{
    struct courier *c = arg;

    nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    c->rc = c->b->ops->masks(c->b, c->step, c->n > 0 ? c->mask : NULL, c->n, NULL);
    return NULL;
}

/* Decode steps as above, whose masks arrive while the device computes: before the step
 * has begun, while it is enqueued, or when all has been enqueued. */
static void a_mask_may_arrive_after_the_launch(void **state)
{
    (void)state;
    enum { ROWS = 7, VOCAB = 5000, STEPS = 12, WORDS = (RIG_VOCAB + 31) / 32 };
    struct rig r;
    open_contexts(&r);
    struct table *t = rig_alloc(sizeof(*t));
    float *logits = rig_alloc((size_t)ROWS * VOCAB * sizeof(*logits));
    struct mat m = rig_mat(&r, 8, VOCAB, DTYPE_F32, NULL);
    static uint32_t late[ROWS][WORDS];
    int32_t ints[ROWS + 1], minus[ROWS];
    for (int32_t i = 0; i <= ROWS; i++) {
        ints[i] = i;
    }
    memset(minus, 0xFF, sizeof(minus));
    random_contexts(&r, t, VOCAB);
    for (int32_t step = 0; step < STEPS; step++) {
        struct sample_row row[ROWS];
        struct courier c = {.b = r.b, .step = r.step + 1, .n = ROWS};
        t->n_bias = t->n_mask = 0;
        for (int32_t i = 0; i < ROWS; i++) {
            random_logits(&r, logits + (int64_t)i * VOCAB, VOCAB);
            row[i] = step % 3 == 2 ? plain_row(i) : random_row(&r, i, t, VOCAB);
            row[i].n_logprobs = -1;
            row[i].late_mask = i % 3 == 1 ? 0 : ROWS - i;
            for (int32_t w = 0; w < WORDS; w++) {
                late[i][w] = (uint32_t)rig_next(&r) & (uint32_t)rig_next(&r);
            }
            /* the last row's allows every id */
            c.mask[ROWS - 1 - i].word = i == ROWS - 1 ? NULL : late[i];
        }
        struct batch b = {.n_tokens = ROWS,
                          .token = ints,
                          .token_src = minus,
                          .position = ints,
                          .slot = minus,
                          .n_seqs = ROWS,
                          .n_decode = ROWS,
                          .q_start = ints,
                          .kv_len = ints + 1,
                          .row = ints,
                          .lcp_blocks = (int32_t[ROWS]){0},
                          .n_logits = ROWS,
                          .logits_token = ints,
                          .n_samples = ROWS,
                          .sample = row,
                          .token_bias = t->bias,
                          .mask_word = t->mask,
                          .n_token_bias = t->n_bias,
                          .n_mask_word = t->n_mask,
                          .n_late_mask = ROWS};
        pthread_t courier;
        rig_upload(&r, mat_rows(m, 0, ROWS), logits);
        if (step % 4 == 3) {
            bring(&c);
        } else {
            assert_int_equal(pthread_create(&courier, NULL, bring, &c), 0);
        }
        rig_begin(&r, &b);
        if (!r.b->ops->replay || !r.b->ops->replay(r.b, &b)) {
            r.b->ops->sample(r.b, mat_rows(m, 0, ROWS), 0);
        }
        struct results res = rig_end(&r);
        if (step % 4 != 3) {
            pthread_join(courier, NULL);
        }
        assert_int_equal(c.rc, 0);
        for (int32_t i = 0; i < ROWS; i++) {
            float l[VOCAB];
            memcpy(l, logits + (int64_t)i * VOCAB, sizeof(l));
            process_reference(l, VOCAB, &row[i], t);
            for (int32_t v = 0; v < VOCAB && row[i].late_mask > 0 && i < ROWS - 1; v++) {
                l[v] = late[i][v / 32] >> v % 32 & 1 ? l[v] : -INFINITY;
            }
            int32_t want = draw_reference(l, VOCAB, &row[i]);
            assert_int_equal(res.token[i], want < 0 ? TOKEN_NONE_ALLOWED : want);
        }
    }
    free(logits);
    free(t);
    rig_close(&r);
}

/* Then rows are sampled without, in this step and in those that follow. */
static void a_step_does_not_wait_for_masks_that_are_given_up(void **state)
{
    (void)state;
    enum { VOCAB = 100 };
    struct rig r;
    rig_open(&r);
    float logits[VOCAB] = {[7] = 3};
    struct sample_row row = plain_row(0);
    row.temperature = 0;
    row.late_mask = 1;
    struct mat m = rig_mat(&r, 1, VOCAB, DTYPE_F32, NULL);
    for (int i = 0; i < 2; i++) {
        struct courier c = {.b = r.b};
        int32_t zero = 0, one = 1, minus = -1, ends[2] = {0, 1};
        struct batch b = {.n_tokens = 1,
                          .token = &zero,
                          .token_src = &minus,
                          .position = &zero,
                          .slot = &minus,
                          .n_seqs = 1,
                          .q_start = ends,
                          .kv_len = &one,
                          .row = &zero,
                          .lcp_blocks = &zero,
                          .n_logits = 1,
                          .logits_token = &zero,
                          .n_samples = 1,
                          .sample = &row,
                          .n_late_mask = 1};
        pthread_t courier;
        rig_upload(&r, m, logits);
        assert_int_equal(i > 0 ? 0 : pthread_create(&courier, NULL, bring, &c), 0);
        rig_begin(&r, &b);
        r.b->ops->sample(r.b, m, 0);
        struct results res = rig_end(&r);
        if (i == 0) {
            pthread_join(courier, NULL);
        }
        assert_int_equal(res.token[0], 7);
    }
    rig_close(&r);
}

/* Many samples of one row, with and without processing in turn: each starts from the
 * unprocessed row. */
static void samples_of_one_row_leave_it_as_it_was(void **state)
{
    (void)state;
    enum { SAMPLES = 24 };
    static const int32_t vocab_of[] = {700, 49152, 200003};
    struct rig r;
    open_contexts(&r);
    struct table *t = rig_alloc(sizeof(*t));
    for (size_t w = 0; w < (rig_small() ? 1 : ARRAY_LEN(vocab_of)); w++) {
        int32_t vocab = vocab_of[w];
        float *logits = rig_alloc((size_t)vocab * sizeof(*logits)),
              *l = rig_alloc((size_t)vocab * sizeof(*l));
        struct sample_row row[SAMPLES];
        random_contexts(&r, t, vocab);
        random_logits(&r, logits, vocab);
        for (int32_t i = 0; i < SAMPLES; i++) {
            row[i] = i % 4 == 3 ? plain_row(0) : random_row(&r, 0, t, vocab);
            row[i].kind = i % 6 == 5 ? SAMPLE_CANDIDATES : SAMPLE_TOKEN;
            row[i].n_candidates = row[i].kind == SAMPLE_CANDIDATES ? 9 : 0;
            row[i].n_logprobs = i % 5 == 0 ? 4 : row[i].n_logprobs;
        }
        struct results res = run_sampling(&r, logits, 1, vocab, row, SAMPLES, t, 1);
        for (int32_t i = 0; i < SAMPLES; i++) {
            memcpy(l, logits, (size_t)vocab * sizeof(*l));
            process_reference(l, vocab, &row[i], t);
            if (row[i].kind == SAMPLE_CANDIDATES) {
                check_top(&res, i, l, vocab, 9);
                continue;
            }
            assert_int_equal(res.token[i], draw_reference(l, vocab, &row[i]));
            check_top(&res, i, logits, vocab, row[i].n_logprobs);
        }
        free(logits);
        free(l);
    }
    free(t);
    rig_close(&r);
}

/* Two steps are in flight at once, and results outlive the next wait. */
static void answers_are_kept_for_two_steps(void **state)
{
    (void)state;
    enum { VOCAB = 40 };
    struct rig r;
    rig_open(&r);
    struct err e = {0};
    const int32_t *token[3];
    for (int32_t i = 0; i < 3; i++) {
        float logits[VOCAB] = {0};
        logits[10 + i] = 3;
        struct sample_row row = plain_row(0);
        row.temperature = 0;
        struct results res = run_sampling(&r, logits, 1, VOCAB, &row, 1, NULL, 1);
        token[i] = res.token;
        assert_int_equal(token[i][0], 10 + i);
        assert_true(i == 0 || token[i - 1][0] == 10 + i - 1);
    }
    struct results none;
    assert_true(r.b->ops->step_wait(r.b, &none, &e) < 0);
    rig_close(&r);
}

/* ---- distributions ---- */

/* Draw n tokens at positions 0.. with one seed; counts by token. */
static void count_draws(struct rig *r, const float *logits, int32_t vocab, struct sample_row s,
                        int32_t n, int32_t *count)
{
    struct sample_row row[RIG_SAMPLES];

    memset(count, 0, (size_t)vocab * sizeof(*count));
    for (int32_t done = 0; done < n; done += RIG_SAMPLES) {
        int32_t some = MIN(n - done, RIG_SAMPLES);
        for (int32_t i = 0; i < some; i++) {
            row[i] = s;
            row[i].position = done + i;
        }
        struct results res = run_sampling(r, logits, 1, vocab, row, some, NULL, 1);
        for (int32_t i = 0; i < some; i++) {
            assert_in_range(res.token[i], 0, vocab - 1);
            count[res.token[i]]++;
        }
    }
}

/* Chi-square of the counts against p, over the tokens expected at least five times; the
 * rest as one. */
static double chi_square(const int32_t *count, const double *p, int32_t vocab, int32_t n,
                         int32_t *ret_freedom)
{
    double chi = 0;
    double rest_p = 0;
    int32_t rest = 0;

    *ret_freedom = -1;
    for (int32_t v = 0; v < vocab; v++) {
        if (p[v] * n >= 5) {
            chi += (count[v] - p[v] * n) * (count[v] - p[v] * n) / (p[v] * n);
            ++*ret_freedom;
        } else {
            rest_p += p[v];
            rest += count[v];
        }
    }
    if (rest_p * n >= 5) {
        chi += (rest - rest_p * n) * (rest - rest_p * n) / (rest_p * n);
        ++*ret_freedom;
    }
    return chi;
}

struct draw_case {
    const char *name;
    float temperature, top_p, min_p;
    int32_t top_k;
};

static void draws_follow_the_distribution(void **state)
{
    (void)state;
    static const struct draw_case cases[] = {
        {"temperature 1", 1, 1, 0, 0},       {"temperature 0.6", 0.6f, 1, 0, 0},
        {"temperature 2", 2, 1, 0, 0},       {"top-k 5", 1, 1, 0, 5},
        {"top-p 0.8", 1, 0.8f, 0, 0},        {"min-p 0.1", 1, 1, 0.1f, 0},
        {"all three", 0.9f, 0.9f, 0.05f, 12}};
    enum { VOCAB = 60 };
    const int32_t n = rig_small() ? 32 : 40 * RIG_SAMPLES;
    struct rig r;
    rig_open(&r);
    float *l = rig_floats(&r, VOCAB, 2.5f, DTYPE_F32);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        const struct draw_case *c = &cases[i];
        if (!whole_takes(i, ARRAY_LEN(cases))) {
            continue;
        }
        struct entry e[VOCAB];
        double p[VOCAB] = {0};
        double sum = 0;
        int32_t count[VOCAB];
        struct sample_row s = plain_row(0);
        s.temperature = c->temperature;
        s.top_p = c->top_p;
        s.min_p = c->min_p;
        s.top_k = c->top_k;
        s.seed = 1234 + i;
        float max = l[0];
        for (int32_t v = 1; v < VOCAB; v++) {
            max = MAX(max, l[v]);
        }
        for (int32_t v = 0; v < VOCAB; v++) {
            float z = (l[v] - max) / c->temperature;
            e[v] = (struct entry){.z = z, .token = v, .mass = sample_mass(z)};
        }
        qsort(e, VOCAB, sizeof(e[0]), better_first);
        int32_t keep = cut_reference(e, VOCAB, &s);
        for (int32_t k = 0; k < keep; k++) {
            p[e[k].token] = exp((double)e[k].z);
            sum += p[e[k].token];
        }
        for (int32_t v = 0; v < VOCAB; v++) {
            p[v] /= sum;
        }
        count_draws(&r, l, VOCAB, s, n, count);
        int32_t freedom;
        double chi = chi_square(count, p, VOCAB, n, &freedom);
        for (int32_t v = 0; v < VOCAB; v++) {
            assert_true(p[v] > 0 || count[v] == 0);
        }
        /* Five standard deviations; the seeds are fixed, so the outcome never
         * varies. */
        if (chi > freedom + 5 * sqrt(2.0 * freedom) + 1e-9) {
            fail_msg("%s: chi-square %.1f with %d degrees of freedom", c->name, chi, freedom);
        }
    }
    free(l);
    rig_close(&r);
}

/* Neighbouring positions and neighbouring seeds are independent: pairs of sampled
 * tokens fill their square evenly. */
static void draws_are_independent(void **state)
{
    (void)state;
    enum { SIDE = 6 };
    const int32_t each = rig_small() ? 32 : RIG_SAMPLES, n = (rig_small() ? 2 : 60) * each;
    struct rig r;
    rig_open(&r);
    float logits[SIDE] = {0};
    for (int32_t by_seed = 0; by_seed < 2; by_seed++) {
        int32_t pair[SIDE * SIDE] = {0};
        double p[SIDE * SIDE];
        int32_t last = -1;
        for (int32_t done = 0; done < n; done += each) {
            struct sample_row row[RIG_SAMPLES];
            for (int32_t i = 0; i < each; i++) {
                row[i] = plain_row(0);
                row[i].seed = by_seed ? (uint64_t)(done + i) : 99;
                row[i].position = by_seed ? 3 : done + i;
            }
            struct results res = run_sampling(&r, logits, 1, SIDE, row, each, NULL, 1);
            for (int32_t i = 0; i < each; i++) {
                pair[last >= 0 ? last * SIDE + res.token[i] : 0] += last >= 0;
                last = res.token[i];
            }
        }
        for (int32_t i = 0; i < SIDE * SIDE; i++) {
            p[i] = 1.0 / (SIDE * SIDE);
        }
        int32_t freedom;
        assert_true(chi_square(pair, p, SIDE * SIDE, n, &freedom) < 35 + 5 * sqrt(70));
    }
    rig_close(&r);
}

/* The shared arithmetic against libm. */
static void noise_arithmetic_is_accurate(void **state)
{
    (void)state;
    double sum = 0;
    double square = 0;
    enum { N = 200000 };
    for (int32_t i = 0; i < N; i++) {
        uint32_t bits = noise_bits(noise_key(5, 6), i);
        double u = 1 - ((double)bits + 0.5) / 4294967296.0;
        double want = -log(-log1p(-((double)bits + 0.5) / 4294967296.0));
        double g = noise_gumbel(bits);
        assert_true(u > 0 && fabs(g - want) < 4e-6 * MAX(1, fabs(want)));
        sum += g;
        square += g * g;
        double z = -30.0 * i / N;
        assert_true(fabs(sample_exp((float)z) / exp((float)z) - 1) < 4e-7);
    }
    assert_true(fabs(sum / N - 0.5772157) < 0.012);               /* Euler's constant */
    assert_true(fabs(square / N - 0.3331724 - 1.6449341) < 0.05); /* its square + pi^2/6 */
    assert_true(noise_gumbel(0) <= NOISE_MAX && noise_gumbel(0) > 22 &&
                noise_gumbel(UINT32_MAX) >= NOISE_MIN);
    assert_true(isfinite(noise_gumbel(0x7FFFFFFF)) && isfinite(noise_gumbel(0x80000000)));
    assert_true(sample_mass(0) == 1ull << MASS_BITS && sample_mass(-28) == 0 &&
                sample_mass(-INFINITY) == 0);
}

static int group(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(noise_arithmetic_is_accurate),
        cmocka_unit_test(greedy_takes_the_smallest_id_of_a_tie),
        cmocka_unit_test(every_row_draws_what_a_full_sort_draws),
        cmocka_unit_test(rows_of_every_number_draw_what_a_full_sort_draws),
        cmocka_unit_test(wide_rows_draw_what_a_full_sort_draws),
        cmocka_unit_test(rows_that_share_lists_keep_their_own_logits),
        cmocka_unit_test(candidates_are_the_best_processed_tokens),
        cmocka_unit_test(a_score_is_the_log_probability_of_its_target),
        cmocka_unit_test(bad_logits_give_no_token),
        cmocka_unit_test(a_request_that_leaves_no_token_is_told_from_bad_logits),
        cmocka_unit_test(the_step_before_is_looked_up_on_the_device),
        cmocka_unit_test(tokens_go_where_their_blocks_go),
        cmocka_unit_test(long_contexts_are_counted_whole),
        cmocka_unit_test(replayed_steps_ask_what_they_ask),
        cmocka_unit_test(a_mask_may_arrive_after_the_launch),
        cmocka_unit_test(a_step_does_not_wait_for_masks_that_are_given_up),
        cmocka_unit_test(samples_of_one_row_leave_it_as_it_was),
        cmocka_unit_test(answers_are_kept_for_two_steps),
        cmocka_unit_test(draws_follow_the_distribution),
        cmocka_unit_test(draws_are_independent),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    return rig_main(argc, argv, group);
}
