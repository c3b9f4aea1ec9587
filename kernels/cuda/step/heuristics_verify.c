#include "kernels/cuda/step/heuristics_verify.h"

/* Whether every token of sequence i has a logits row; *l is the first row at or behind
 * its first token, and is moved behind its last. */
static bool all_sampled(const struct batch *b, int32_t i, int32_t *l)
{
    int32_t first = b->q_start[i], end = b->q_start[i + 1], begin;

    while (*l < b->n_logits && b->logits_token[*l] < first) {
        ++*l;
    }
    begin = *l;
    while (*l < b->n_logits && b->logits_token[*l] < end) {
        ++*l;
    }
    return *l - begin == end - first;
}

bool split_verified(struct batch *b, struct verify_rows *r, int32_t max_seqs, int32_t block_size)
{
    int32_t n = 0, i = 0, l = 0;
    bool split = false;

    for (; i < b->n_seqs; i++) {
        int32_t first = b->q_start[i], tokens = b->q_start[i + 1] - first;
        int32_t after = b->n_seqs - i - 1; /* sequences that follow */
        if (tokens > 1 &&
            (tokens > LIMIT_DRAFT + 1 || n + tokens + after > max_seqs || !all_sampled(b, i, &l))) {
            break;
        }
        split = split || tokens > 1;
        for (int32_t t = 0; t < tokens; t++) {
            r->q_start[n] = first + t;
            r->kv_len[n] = b->kv_len[i] - tokens + 1 + t;
            r->row[n] = b->row[i];
            r->lcp_blocks[n] =
                t == 0 ? b->lcp_blocks[i] : (int32_t)div_ceil(r->kv_len[n - 1], block_size);
            n++;
        }
    }
    if (!split) {
        return false;
    }
    for (; i < b->n_seqs; i++, n++) {
        r->q_start[n] = b->q_start[i];
        r->kv_len[n] = b->kv_len[i];
        r->row[n] = b->row[i];
        r->lcp_blocks[n] = b->lcp_blocks[i];
    }
    r->q_start[n] = b->n_tokens;
    b->n_seqs = n;
    b->q_start = r->q_start;
    b->kv_len = r->kv_len;
    b->row = r->row;
    b->lcp_blocks = r->lcp_blocks;
    return true;
}
