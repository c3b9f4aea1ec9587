/* Sampling: the specification for every backend.
 *
 * One row: l = a copy of its logits, in float32, every operation rounded on its own:
 *   1. penalties, by the `position` tokens in the row's blocks, of which the first
 *      n_prompt are the prompt and the rest the output:
 *        repetition r   for tokens in prompt or output: l > 0 ? l / r : l * r
 *        frequency f    for tokens n > 0 times in the output: l -= f * n
 *        presence p     for the same: l -= p
 *   2. l += bias
 *   3. for tokens that the mask or the late mask bans: l = -infinity
 *   4. if l holds a NaN or +infinity, or nothing above -infinity: logprobs are
 *      -infinity and the token is TOKEN_NO_NUMBER if that is so before step 1, else
 *      TOKEN_NONE_ALLOWED
 *   5. temperature 0 or top_k 1: the greatest l, the smallest id on a tie
 *   6. else z and mass of kernels/noise.h; tokens of mass 0 are dropped
 *        top-k   keep z >= the k-th greatest (ties with it stay)
 *        top-p   of these, keep z >= v, where v is the greatest value that keeps a mass
 *                of at least sample_mass_goal
 *        min-p   of these, keep mass >= min_p * 2^MASS_BITS
 *   7. the greatest z + noise, the smallest id on a tie
 *
 * logprob: log-softmax of the logits before step 1, of the sampled token (SAMPLE_SCORE:
 * of target). SAMPLE_CANDIDATES: log-softmax of l after step 3, whose best token is the
 * result. Best tokens: greatest first, the smaller id first on a tie; tokens at
 * -infinity are skipped, and columns left over hold token -1 and -infinity.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/select.h"
#include "kernels/noise.h"

struct sample_job {
    struct cpu_backend *c;
    struct mat logits;
    int32_t first_logits; /* logits_row of logits' row 0 */
    int32_t first_sample; /* the sampling row of task 0 */
};

/* The greatest of a row of logits. */
struct row_max {
    float value;
    int32_t token; /* its smallest id; TOKEN_NO_NUMBER: a NaN or +infinity, or all -infinity */
};

static struct row_max greatest(const struct cpu_backend *c, const float *l, int32_t vocab)
{
    struct row_scan s = c->k.scan(l, vocab);
    struct row_max m = {.value = s.max, .token = TOKEN_NO_NUMBER};

    if (s.bad || s.max == -INFINITY) {
        return m;
    }
    for (m.token = 0; l[m.token] != s.max; m.token++) {
    }
    return m;
}

static float log_sum_exp(const struct cpu_backend *c, const float *l, int32_t vocab, float max)
{
    return max + (float)log(c->k.sum_exp(l, vocab, max));
}

/* ---- steps 1 to 3 ---- */

/* sample_count of a token: bit 0 is set by an occurrence in the prompt, each in the
 * output adds COUNT_OUTPUT. */
enum { COUNT_PROMPT = 1, COUNT_OUTPUT = 2 };

static float penalised(float x, uint32_t count, const struct sample_row *s)
{
    uint32_t n_output = count / COUNT_OUTPUT;

    if (s->repetition_penalty != 1.0f) {
        x = x > 0 ? x / s->repetition_penalty : x * s->repetition_penalty;
    }
    if (n_output > 0) {
        x -= s->frequency_penalty * (float)n_output;
        x -= s->presence_penalty;
    }
    return x;
}

/* The token at `position` of the row's sequence. */
static int32_t token_at(const struct cpu_backend *c, const struct sample_row *s, int32_t position)
{
    int32_t size = c->kv[0].block_size;
    int32_t block = cpu_table(c, 0, s->row)[position / size];

    return c->slot_token[(int64_t)block * size + position % size];
}

/* Two passes over the sequence's tokens: the first counts, the second applies each
 * count once and clears it. */
static void apply_penalties(float *l, int32_t vocab, const struct sample_row *s,
                            struct cpu_backend *c, uint32_t *count)
{
    for (int32_t i = 0; i < s->position; i++) {
        int32_t t = token_at(c, s, i);
        if (t < 0 || t >= vocab) {
            continue;
        }
        count[t] = i < s->n_prompt ? count[t] | COUNT_PROMPT : count[t] + COUNT_OUTPUT;
    }
    for (int32_t i = 0; i < s->position; i++) {
        int32_t t = token_at(c, s, i);
        if (t >= 0 && t < vocab && count[t] > 0) {
            l[t] = penalised(l[t], count[t], s);
            count[t] = 0;
        }
    }
}

static void apply_mask(float *l, int32_t vocab, const uint32_t *mask)
{
    for (int32_t t = 0; t < vocab; t++) {
        l[t] = mask[t / 32] >> t % 32 & 1 ? l[t] : -INFINITY;
    }
}

/* The logits after steps 1 to 3: the row itself if there is nothing to do, else in the
 * thread's scratch. */
static const float *process(struct cpu_backend *c, const float *raw, int32_t vocab,
                            const struct sample_row *s, int32_t thread)
{
    const struct batch *b = &c->batch;
    bool penalties = sample_penalised(s);

    if (!penalties && s->n_bias == 0 && s->mask_first < 0 && s->late_mask == 0) {
        return raw;
    }
    float *l = c->sample_logits + (int64_t)thread * c->sample_vocab;
    memcpy(l, raw, (size_t)vocab * sizeof(*l));
    if (penalties) {
        apply_penalties(l, vocab, s, c, c->sample_count + (int64_t)thread * c->sample_vocab);
    }
    for (int32_t i = 0; i < s->n_bias; i++) {
        const struct token_bias *k = &b->token_bias[s->bias_first + i];
        if (k->token >= 0 && k->token < vocab) {
            l[k->token] += k->bias;
        }
    }
    if (s->mask_first >= 0) {
        apply_mask(l, vocab, b->mask_word + s->mask_first);
    }
    const uint32_t *late = late_masks_row(&c->late, s->late_mask);
    if (late) {
        apply_mask(l, vocab, late);
    }
    return l;
}

/* ---- steps 6 and 7 ---- */

/* top-k, top-p and min-p over the tokens with z > least, if these decide the result:
 * false if a token below might have to be kept. */
static bool filter(struct cpu_backend *c, struct cpu_survivor *survivor, const float *l,
                   int32_t vocab, float max, const struct sample_row *s, float least,
                   int32_t *ret_n)
{
    uint64_t total;
    bool all = least < -28.0f; /* e^-28 < 2^-40: no mass below */
    int32_t n = c->k.survivors(survivor, l, vocab, max, noise_inv_temperature(s->temperature),
                               least, &total);

    if (s->top_k > 0) {
        if (!all && n < s->top_k) {
            return false;
        }
        n = select_top_k(survivor, n, s->top_k);
        total = survivor_mass(survivor, n);
    }
    if (s->top_p < 1.0f) {
        uint64_t goal = sample_mass_goal(s->top_p, total);
        if (!all && s->top_k <= 0 && survivor_mass(survivor, n) < goal) {
            return false;
        }
        n = select_top_p(survivor, n, goal);
    }
    uint64_t floor_mass = (uint64_t)(s->min_p * 0x1p40f);
    if (!all && s->top_k <= 0 && !(s->top_p < 1.0f) && sample_mass(least) >= floor_mass) {
        return false;
    }
    int32_t kept = 0;
    for (int32_t i = 0; i < n; i++) {
        if (survivor[i].mass >= floor_mass) {
            survivor[kept++] = survivor[i];
        }
    }
    *ret_n = kept;
    return true;
}

/* Step 7. Noise can exceed `best - z` only if its bits are below 2^32 exp(z - best), so
 * most tokens need no logarithm. */
static int32_t gumbel_max(const struct cpu_survivor *survivor, int32_t n,
                          const struct sample_row *s)
{
    uint64_t key = noise_key(s->seed, s->position);
    float best = -INFINITY;
    /* mass * scale is an upper bound of the bits: it includes exp(-best), and 1 % for
     * rounding */
    double scale = 0x1p-40 * 0x1p32;
    int32_t token = -1;

    for (int32_t i = 0; i < n; i++) { /* ascending ids */
        uint32_t bits = noise_bits(key, survivor[i].token);
        if (token >= 0 && (double)bits > ((double)survivor[i].mass + 1) * scale) {
            continue;
        }
        float score = survivor[i].z + noise_gumbel(bits);
        if (score > best) {
            best = score;
            scale = 1.01 * 0x1p-8 * exp(-(double)best);
            token = survivor[i].token;
        }
    }
    return token;
}

/* Steps 6 and 7. The tokens that decide are usually few and near the best, so the
 * search starts there. */
static int32_t sample_filtered(struct cpu_backend *c, struct cpu_survivor *survivor, const float *l,
                               int32_t vocab, float max, const struct sample_row *s)
{
    static const float least[] = {-8.0f, -16.0f, -INFINITY};
    bool unfiltered = s->top_k <= 0 && s->top_p >= 1.0f && s->min_p <= 0;
    int32_t n = 0;

    for (size_t i = unfiltered ? ARRAY_LEN(least) - 1 : 0; i < ARRAY_LEN(least); i++) {
        if (filter(c, survivor, l, vocab, max, s, least[i], &n)) {
            break;
        }
    }
    return gumbel_max(survivor, n, s);
}

static int32_t sample_token(struct cpu_backend *c, const float *l, int32_t vocab,
                            const struct sample_row *s, int32_t thread)
{
    struct row_max m = greatest(c, l, vocab);

    if (m.token < 0) {
        return TOKEN_NONE_ALLOWED; /* the caller has checked the unprocessed logits */
    }
    if (s->temperature == 0 || s->top_k == 1) {
        return m.token;
    }
    return sample_filtered(c, c->survivor + (int64_t)thread * c->sample_vocab, l, vocab, m.value,
                           s);
}

/* ---- results ---- */

/* Columns [0, n) of row i = the n best log-probabilities of l; lse: its log-sum-exp. */
static void write_best(struct cpu_results *r, int32_t i, const float *l, int32_t vocab, float lse,
                       int32_t n)
{
    int32_t *token = r->top_token + (int64_t)i * r->top_stride;
    float *logprob = r->top_logprob + (int64_t)i * r->top_stride;
    int32_t found = select_best(l, vocab, n, token, logprob);

    for (int32_t k = 0; k < n; k++) {
        token[k] = k < found ? token[k] : -1;
        logprob[k] = k < found ? logprob[k] - lse : -INFINITY;
    }
}

/* Row i has no token, for the reason `why` (enum of batch.h). */
static void write_nothing(struct cpu_results *r, int32_t i, int32_t why, int32_t n)
{
    r->token[i] = why;
    r->logprob[i] = -INFINITY;
    for (int32_t k = 0; k < n; k++) {
        r->top_token[(int64_t)i * r->top_stride + k] = -1;
        r->top_logprob[(int64_t)i * r->top_stride + k] = -INFINITY;
    }
}

static void sample_candidates(struct cpu_backend *c, struct cpu_results *r, int32_t i,
                              const float *raw, int32_t vocab, const struct sample_row *s,
                              int32_t thread)
{
    const float *l = process(c, raw, vocab, s, thread);
    struct row_max m = greatest(c, l, vocab);

    if (m.token < 0) {
        bool sound = l != raw && greatest(c, raw, vocab).token >= 0;
        write_nothing(r, i, sound ? TOKEN_NONE_ALLOWED : TOKEN_NO_NUMBER, s->n_candidates);
        return;
    }
    float lse = log_sum_exp(c, l, vocab, m.value);
    write_best(r, i, l, vocab, lse, s->n_candidates);
    r->token[i] = m.token;
    r->logprob[i] = m.value - lse;
}

static void sample_row(void *arg, int32_t task, int32_t thread)
{
    const struct sample_job *job = arg;
    struct cpu_backend *c = job->c;
    int32_t i = job->first_sample + task;
    const struct sample_row *s = &c->batch.sample[i];
    struct cpu_results *r = cpu_results_now(c);
    int32_t vocab = job->logits.cols;
    const float *raw = mat_row_const(job->logits, s->logits_row - job->first_logits);
    int32_t n_best = MAX(s->n_logprobs, 0);

    if (s->kind == SAMPLE_CANDIDATES) {
        sample_candidates(c, r, i, raw, vocab, s, thread);
        return;
    }
    struct row_max m = greatest(c, raw, vocab);
    int32_t token = m.token < 0 ? TOKEN_NO_NUMBER
                    : s->kind == SAMPLE_SCORE
                        ? s->target
                        : sample_token(c, process(c, raw, vocab, s, thread), vocab, s, thread);
    if (token < 0 || token >= vocab) {
        write_nothing(r, i, MIN(token, TOKEN_NO_NUMBER), n_best);
        return;
    }
    float lse = log_sum_exp(c, raw, vocab, m.value);
    r->token[i] = token;
    r->logprob[i] = raw[token] - lse;
    if (n_best > 0) {
        write_best(r, i, raw, vocab, lse, n_best);
    }
}

/* Allocate scratch, for the widest vocabulary seen. */
static int prepare(struct cpu_backend *c, int32_t vocab)
{
    if (vocab <= c->sample_vocab) {
        return 0;
    }
    size_t n = (size_t)vocab * (size_t)cpu_pool_threads(c->pool);
    c->sample_logits = cpu_alloc(c, n * sizeof(*c->sample_logits));
    c->sample_count = cpu_alloc(c, n * sizeof(*c->sample_count));
    c->survivor = cpu_alloc(c, n * sizeof(*c->survivor));
    if (!c->sample_logits || !c->sample_count || !c->survivor) {
        return ERR_NOMEM;
    }
    c->sample_vocab = vocab;
    return 0;
}

void cpu_sample(struct backend *b, struct mat logits, int32_t first)
{
    struct cpu_backend *c = cpu_of(b);
    const struct batch *batch = &c->batch;

    if (cpu_samples_tokens(c) && prepare(c, logits.cols) < 0) {
        cpu_fail(c, ERR_NOMEM, "out of memory for sampling");
        return;
    }
    int32_t from = 0;
    while (from < batch->n_samples && batch->sample[from].logits_row < first) {
        from++;
    }
    int32_t end = from;
    while (end < batch->n_samples && batch->sample[end].logits_row < first + logits.rows) {
        end++;
    }
    struct sample_job job = {.c = c, .logits = logits, .first_logits = first, .first_sample = from};
    if (cpu_samples_tokens(c)) {
        late_masks_wait(&c->late, batch, from, end);
        cpu_pool_run(c->pool, end - from, sample_row, &job);
    }
    cpu_broadcast_tokens(c, from, end);
}
