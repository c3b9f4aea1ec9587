#include "engine/workers/ranks/control_msg.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "config/base/limits.h"

enum { CONTROL_MAGIC = 0x51524e35, REST_MS = 10000 /* for the rest of a message that has begun */ };

void rank_hello_fill(struct rank_hello *ret, const struct executor_info *x, const struct model *m,
                     uint64_t draft, bool deterministic)
{
    *ret = (struct rank_hello){
        .version = QUIRE_VERSION,
        .checkpoint = model_digest(m),
        .draft = draft,
        .n_ranks = m->options.n_ranks,
        .n_stages = m->options.n_stages,
        .vocab = x->vocab,
        .max_len = x->max_len,
        .block_size = x->block_size,
        .n_kv_groups = x->n_kv_groups,
        .max_num_seqs = x->max_num_seqs,
        .max_num_batched_tokens = x->max_num_batched_tokens,
        .max_samples = x->max_samples,
        .deterministic = deterministic,
        .expert_parallel = m->options.expert_parallel,
        .n_blocks = x->n_blocks,
        .n_host_blocks = x->n_host_blocks,
    };
    snprintf(ret->dtype, sizeof(ret->dtype), "%s", x->dtype);
    snprintf(ret->kv_dtype, sizeof(ret->kv_dtype), "%s", x->kv_dtype);
}

int rank_hello_compare(const struct rank_hello *first, const struct rank_hello *other, int32_t rank,
                       struct err *e)
{
    if (memcmp(first->version, other->version, sizeof(first->version)) != 0) {
        return err_set(e, ERR_INVALID,
                       "rank %d is quire %.31s, rank 0 is %.31s: all must be the same", rank,
                       other->version, first->version);
    }
    if (first->checkpoint != other->checkpoint) {
        return err_set(e, ERR_INVALID,
                       "rank %d has another model than rank 0: their configurations or tensors "
                       "differ (%016llx, %016llx)",
                       rank, (unsigned long long)other->checkpoint,
                       (unsigned long long)first->checkpoint);
    }
    if (first->draft != other->draft) {
        return err_set_param(e, ERR_INVALID, "draft_model",
                             "rank %d has another draft model or head than rank 0: their "
                             "configurations or tensors differ (%016llx, %016llx)",
                             rank, (unsigned long long)other->draft,
                             (unsigned long long)first->draft);
    }
    if (memcmp(first->dtype, other->dtype, sizeof(first->dtype)) != 0) {
        return err_set_param(e, ERR_INVALID, "dtype", "rank %d has dtype %.15s, rank 0 has %.15s",
                             rank, other->dtype, first->dtype);
    }
    if (memcmp(first->kv_dtype, other->kv_dtype, sizeof(first->kv_dtype)) != 0) {
        return err_set_param(e, ERR_INVALID, "kv_cache_dtype",
                             "rank %d caches keys and values as %.15s, rank 0 as %.15s", rank,
                             other->kv_dtype, first->kv_dtype);
    }
    const struct {
        const char *name;
        int64_t mine, theirs;
    } same[] = {
        {"tensor_parallel_size", first->n_ranks, other->n_ranks},
        {"pipeline_parallel_size", first->n_stages, other->n_stages},
        {"vocabulary", first->vocab, other->vocab},
        {"block_size", first->block_size, other->block_size},
        {"KV groups", first->n_kv_groups, other->n_kv_groups},
        {"max_num_seqs", first->max_num_seqs, other->max_num_seqs},
        {"max_num_batched_tokens", first->max_num_batched_tokens, other->max_num_batched_tokens},
        {"max_samples", first->max_samples, other->max_samples},
        {"deterministic", first->deterministic, other->deterministic},
        {"expert_parallel", first->expert_parallel, other->expert_parallel},
    };
    for (size_t i = 0; i < ARRAY_LEN(same); i++) {
        if (same[i].mine != same[i].theirs) {
            return err_set_param(e, ERR_INVALID, same[i].name,
                                 "rank %d has %s %lld, rank 0 has %lld", rank, same[i].name,
                                 (long long)same[i].theirs, (long long)same[i].mine);
        }
    }
    return 0;
}

static int send_all(int fd, const void *data, size_t n_bytes, struct err *e)
{
    for (size_t at = 0; at < n_bytes;) {
        ssize_t sent = send(fd, (const char *)data + at, n_bytes - at, MSG_NOSIGNAL);
        if (sent < 0 && errno != EINTR) {
            return err_set(e, ERR_IO, "cannot send to rank 0: %s", strerror(errno));
        }
        at += (size_t)MAX(sent, 0);
    }
    return 0;
}

/* 1; 0: the other end closed the connection; ERR_IO. */
static int receive_all(int fd, void *data, size_t n_bytes, struct err *e)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};

    for (size_t at = 0; at < n_bytes;) {
        ssize_t got = recv(fd, (char *)data + at, n_bytes - at, MSG_DONTWAIT);
        if (got == 0 || (got < 0 && errno == ECONNRESET)) {
            return 0;
        }
        if (got > 0) {
            at += (size_t)got;
        } else if (errno != EAGAIN && errno != EINTR) {
            return err_set(e, ERR_IO, "a rank's control message: %s", strerror(errno));
        } else if (poll(&p, 1, at > 0 ? REST_MS : -1) == 0) {
            return err_set(e, ERR_IO, "a rank's control message is incomplete");
        }
    }
    return 1;
}

int control_msg_send(int fd, const struct control_msg *n, struct err *e)
{
    struct control_msg msg = *n;

    msg.magic = CONTROL_MAGIC;
    return send_all(fd, &msg, sizeof(msg), e);
}

int control_msg_receive(int fd, struct control_msg *ret, struct err *e)
{
    struct control_msg msg;
    int rc = receive_all(fd, &msg, sizeof(msg), e);

    if (rc < 1) {
        return rc;
    }
    msg.text[sizeof(msg.text) - 1] = '\0';
    msg.hello.version[sizeof(msg.hello.version) - 1] = '\0';
    if (msg.magic != CONTROL_MAGIC || msg.kind < CONTROL_HELLO || msg.kind > CONTROL_MASKS) {
        return err_set(e, ERR_INVALID, "not a rank's control message");
    }
    *ret = msg;
    return 1;
}

/* ---- results ---- */

/* One of the four arrays of results. */
struct array {
    const void *data;
    size_t n_bytes;
};
enum { N_ARRAYS = 4 };

static void arrays_of(const struct results *r, struct array *ret)
{
    size_t row = (size_t)r->n_samples * sizeof(int32_t), top = row * (size_t)r->top_stride;

    ret[0] = (struct array){r->token, row};
    ret[1] = (struct array){r->logprob, row};
    ret[2] = (struct array){r->top_token, top};
    ret[3] = (struct array){r->top_logprob, top};
}

int rank_results_send(int fd, int32_t rank, const struct results *r, struct err *e)
{
    struct control_msg msg = {.kind = CONTROL_RESULTS,
                              .rank = rank,
                              .step = r->step,
                              .n_samples = r->n_samples,
                              .top_stride = r->top_stride};
    struct array array[N_ARRAYS];
    int rc = control_msg_send(fd, &msg, e);

    arrays_of(r, array);
    for (int i = 0; i < N_ARRAYS && rc == 0; i++) {
        rc = send_all(fd, array[i].data, array[i].n_bytes, e);
    }
    return rc;
}

int rank_results_receive(int fd, const struct control_msg *msg, struct gathered *g,
                         int32_t max_samples, struct err *e)
{
    struct array array[N_ARRAYS];

    if (msg->n_samples < 0 || msg->n_samples > max_samples || msg->top_stride < 0 ||
        msg->top_stride > MAX((int)LIMIT_CANDIDATES, (int)LIMIT_LOGPROBS)) {
        return err_set(e, ERR_INVALID, "not a rank's results");
    }
    int rc = microbatch_results_begin(g, msg->step, msg->n_samples, msg->top_stride, e);
    rc = rc < 0 ? rc : 1;
    arrays_of(&g->results, array);
    for (int i = 0; i < N_ARRAYS && rc == 1; i++) {
        rc = receive_all(fd, (void *)(uintptr_t)array[i].data, array[i].n_bytes, e);
    }
    return rc;
}

/* ---- late masks ---- */

int rank_masks_send(int fd, uint64_t step, const struct late_mask *mask, int32_t n, int32_t words,
                    struct err *e)
{
    struct control_msg msg = {
        .kind = CONTROL_MASKS, .step = step, .n_masks = mask ? n : -1, .mask_words = words};
    int rc = control_msg_send(fd, &msg, e);

    for (int32_t i = 0; i < msg.n_masks && rc == 0; i++) {
        int32_t there = mask[i].word != NULL;
        rc = send_all(fd, &there, sizeof(there), e);
        if (rc == 0 && there) {
            rc = send_all(fd, mask[i].word, (size_t)words * sizeof(*mask[i].word), e);
        }
    }
    return rc;
}

static int reserve_masks(struct rank_masks *m, int32_t n, int32_t words, struct err *e)
{
    if (n <= m->n && words == m->words) {
        return 0;
    }
    rank_masks_release(m);
    m->mask = calloc((size_t)n, sizeof(*m->mask));
    m->word = malloc((size_t)n * (size_t)words * sizeof(*m->word));
    if (!m->mask || !m->word) {
        rank_masks_release(m);
        return err_nomem(e, "masks of a step");
    }
    m->n = n;
    m->words = words;
    return 0;
}

int rank_masks_receive(int fd, const struct control_msg *msg, struct rank_masks *m,
                       int32_t max_masks, int32_t words, struct err *e)
{
    if (msg->n_masks < 0 || msg->n_masks > max_masks || msg->mask_words != words) {
        return err_set(e, ERR_INVALID, "not the masks of a step");
    }
    int rc = reserve_masks(m, MAX(max_masks, 1), words, e);
    rc = rc < 0 ? rc : 1;
    for (int32_t i = 0; i < msg->n_masks && rc == 1; i++) {
        uint32_t *word = m->word + (int64_t)i * words;
        int32_t there = 0;
        rc = receive_all(fd, &there, sizeof(there), e);
        if (rc == 1 && there != 0) {
            rc = receive_all(fd, word, (size_t)words * sizeof(*word), e);
        }
        m->mask[i].word = there ? word : NULL;
    }
    return rc;
}

void rank_masks_release(struct rank_masks *m)
{
    free(m->mask);
    free(m->word);
    *m = (struct rank_masks){0};
}
