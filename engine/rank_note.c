#include "engine/rank_note.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

enum { NOTE_MAGIC = 0x51524e31 };

void rank_hello_fill(struct rank_hello *ret, const struct executor_info *x, const struct model *m, int32_t n_ranks,
                     bool deterministic)
{
    *ret = (struct rank_hello){
        .version = QUIRE_VERSION,
        .checkpoint = model_digest(m),
        .n_ranks = n_ranks,
        .vocab = x->vocab,
        .max_len = x->max_len,
        .block_size = x->block_size,
        .max_num_seqs = x->max_num_seqs,
        .max_num_batched_tokens = x->max_num_batched_tokens,
        .max_samples = x->max_samples,
        .deterministic = deterministic,
        .n_blocks = x->n_blocks,
        .n_host_blocks = x->n_host_blocks,
    };
    snprintf(ret->dtype, sizeof(ret->dtype), "%s", x->dtype);
}

int rank_hello_compare(const struct rank_hello *first, const struct rank_hello *other, int32_t rank, struct err *e)
{
    if (memcmp(first->version, other->version, sizeof(first->version)) != 0)
        return err_set(e, ERR_INVALID, "rank %d is quire %.31s, rank 0 is %.31s: all must be the same", rank,
                       other->version, first->version);
    if (first->checkpoint != other->checkpoint)
        return err_set(
            e, ERR_INVALID,
            "rank %d has another model than rank 0: their configurations or tensors differ (%016llx, %016llx)", rank,
            (unsigned long long)other->checkpoint, (unsigned long long)first->checkpoint);
    if (memcmp(first->dtype, other->dtype, sizeof(first->dtype)) != 0)
        return err_set_param(e, ERR_INVALID, "dtype", "rank %d has dtype %.15s, rank 0 has %.15s", rank, other->dtype,
                             first->dtype);
    const struct {
        const char *name;
        int64_t mine, theirs;
    } same[] = {
        {"tensor_parallel_size", first->n_ranks, other->n_ranks},
        {"vocabulary", first->vocab, other->vocab},
        {"block_size", first->block_size, other->block_size},
        {"max_num_seqs", first->max_num_seqs, other->max_num_seqs},
        {"max_num_batched_tokens", first->max_num_batched_tokens, other->max_num_batched_tokens},
        {"max_samples", first->max_samples, other->max_samples},
        {"deterministic", first->deterministic, other->deterministic},
    };
    for (size_t i = 0; i < ARRAY_LEN(same); i++) {
        if (same[i].mine != same[i].theirs)
            return err_set_param(e, ERR_INVALID, same[i].name, "rank %d has %s %lld, rank 0 has %lld", rank,
                                 same[i].name, (long long)same[i].theirs, (long long)same[i].mine);
    }
    return 0;
}

int rank_note_send(int fd, const struct rank_note *n, struct err *e)
{
    struct rank_note note = *n;
    note.magic = NOTE_MAGIC;
    for (size_t at = 0; at < sizeof(note);) {
        ssize_t sent = send(fd, (const char *)&note + at, sizeof(note) - at, MSG_NOSIGNAL);
        if (sent < 0 && errno != EINTR)
            return err_set(e, ERR_IO, "rank 0 does not listen: %s", strerror(errno));
        at += (size_t)MAX(sent, 0);
    }
    return 0;
}

int rank_note_receive(int fd, struct rank_note *ret, struct err *e)
{
    struct rank_note note;
    for (size_t at = 0; at < sizeof(note);) {
        ssize_t got = recv(fd, (char *)&note + at, sizeof(note) - at, 0);
        if (got == 0 || (got < 0 && errno == ECONNRESET))
            return 0;
        if (got < 0 && errno != EINTR)
            return err_set(e, ERR_IO, "a rank's note: %s", strerror(errno));
        at += (size_t)MAX(got, 0);
    }
    note.text[sizeof(note.text) - 1] = '\0';
    note.hello.version[sizeof(note.hello.version) - 1] = '\0';
    if (note.magic != NOTE_MAGIC || note.kind < NOTE_HELLO || note.kind > NOTE_FAILED)
        return err_set(e, ERR_INVALID, "what came is no rank's note");
    *ret = note;
    return 1;
}
