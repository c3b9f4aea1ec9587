/* Drafts from earlier text where files are edited: tokens a step, if the answer to a
 * prompt that holds the old file is the new one, and microseconds a step of the drafts.
 *
 *     build/tests/bench/drafts MAX_DRAFT OLD NEW [OLD NEW]...
 *
 * tests/bench/edits takes the pairs from a repository's history. Tokens are pieces of
 * words, as those of byte-pair vocabularies are: at most six letters, runs of blanks,
 * single marks. No model runs: each draft holds that is right.
 */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "engine/speculate/text/suffix.h"

enum { TEXT_BYTES = 1 << 20, WORD = 6, BLANKS = 8 };

struct file {
    int32_t *token, n;
};

static size_t piece(const char *at)
{
    size_t n = 1;

    if (isalnum((unsigned char)*at) || *at == '_') {
        while (n < WORD && (isalnum((unsigned char)at[n]) || at[n] == '_')) {
            n++;
        }
    } else if (*at == ' ') {
        while (n < BLANKS && at[n] == ' ') {
            n++;
        }
    }
    return n;
}

static struct file read_file(const char *path)
{
    static char text[TEXT_BYTES + 1];
    FILE *f = fopen(path, "rb");
    size_t n = f ? fread(text, 1, TEXT_BYTES, f) : 0;
    struct file ret = {.token = malloc((n + 1) * sizeof(*ret.token))};

    if (!f || !ret.token) {
        fprintf(stderr, "drafts: cannot read %s\n", path);
        exit(1);
    }
    fclose(f);
    text[n] = '\0';
    for (size_t i = 0, len; i < n; i += len) {
        len = piece(text + i);
        ret.token[ret.n++] = (int32_t)(XXH3_64bits(text + i, len) & INT32_MAX);
    }
    return ret;
}

struct sums {
    int64_t tokens, steps, drafted, accepted, us, worst_us;
};

/* One answer, step by step. */
static void answer(struct draft_source *d, const struct file *old, const struct file *new,
                   int32_t max_draft, uint64_t order, struct sums *sums)
{
    int32_t *out = malloc(((size_t) new->n + LIMIT_DRAFT) * sizeof(*out));
    struct request request = {.prompt = old->token, .n_prompt = old->n};
    struct seq q = {.out = out};
    struct group g = {.request = &request,
                      .order = order,
                      .n_prompt = old->n,
                      .max_tokens = new->n,
                      .seq = &q,
                      .n_seqs = 1};
    float prob[LIMIT_DRAFT];

    q.group = &g;
    while (out && q.n_out < new->n) {
        int64_t start_us = clock_us();
        int32_t n = d->draft(d, &q, max_draft, out + q.n_out, prob), held = 0;
        while (held < n &&
               q.n_out + held < new->n &&out[q.n_out + held] == new->token[q.n_out + held]) {
            held++;
        }
        if (n > 0) {
            d->verified(d, &q, n, held);
        }
        int64_t us = clock_us() - start_us;
        sums->us += us;
        sums->worst_us = MAX(sums->worst_us, us);
        sums->steps++;
        sums->drafted += n;
        sums->accepted += held;
        held = MIN(held + 1, new->n - q.n_out);
        memcpy(out + q.n_out, new->token + q.n_out, (size_t)held * sizeof(*out));
        q.n_out += held;
    }
    sums->tokens += new->n;
    d->ended(d, &g);
    free(out);
}

int main(int argc, char **argv)
{
    struct suffix_config c = {
        .n_seqs = 1, .max_len = TEXT_BYTES, .bytes = 1 << 20, .store_tokens = 1 << 16, .secret = 1};
    int32_t max_draft = argc > 1 ? atoi(argv[1]) : 0;
    struct suffix_drafts *drafts;
    struct sums sums = {0};
    struct err e;

    if (argc < 4 || argc % 2 != 0 || max_draft < 1 || max_draft > LIMIT_DRAFT) {
        fprintf(stderr, "usage: drafts MAX_DRAFT OLD NEW [OLD NEW]...\n");
        return 2;
    }
    if (suffix_open(&drafts, &c, &e) < 0) {
        fprintf(stderr, "drafts: %s\n", e.text);
        return 1;
    }
    for (int i = 2; i < argc; i += 2) {
        struct file old = read_file(argv[i]), new = read_file(argv[i + 1]);
        if (old.n > 0 && new.n > 0) {
            answer(suffix_source(drafts), &old, &new, max_draft, (uint64_t)i, &sums);
        }
        free(old.token);
        free(new.token);
    }
    printf(
        "%d edits, %lld tokens: %.2f a step, %.0f %% of drafts held, %.2f us a step (worst %lld)\n",
        argc / 2 - 1, (long long)sums.tokens, (double)sums.tokens / (double)sums.steps,
        100 * (double)sums.accepted / (double)MAX(sums.drafted, 1),
        (double)sums.us / (double)sums.steps, (long long)sums.worst_us);
    suffix_free(drafts);
    return 0;
}
