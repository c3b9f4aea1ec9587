/* Tests control messages: hellos are compared field by field, results arrive whole or
 * are refused. */
#include "engine/workers/ranks/control_msg.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

static void hellos_differ_by_name(void **state)
{
    (void)state;
    struct rank_hello first = {.version = "1",
                               .dtype = "float32",
                               .block_size = 16,
                               .max_num_seqs = 64},
                      other;
    struct err e;
    other = first;
    other.n_blocks = 7; /* pools may differ */
    assert_int_equal(rank_hello_compare(&first, &other, 3, &e), 0);
    other.max_num_seqs = 32;
    assert_int_equal(rank_hello_compare(&first, &other, 3, &e), ERR_INVALID);
    assert_string_equal(e.text, "rank 3 has max_num_seqs 32, rank 0 has 64");
    other = first;
    other.n_stages = 2;
    assert_int_equal(rank_hello_compare(&first, &other, 3, &e), ERR_INVALID);
    assert_string_equal(e.text, "rank 3 has pipeline_parallel_size 2, rank 0 has 0");
    other = first;
    snprintf(other.dtype, sizeof(other.dtype), "float16");
    assert_int_equal(rank_hello_compare(&first, &other, 3, &e), ERR_INVALID);
    assert_string_equal(e.text, "rank 3 has dtype float16, rank 0 has float32");
}

/* Results over a socket arrive whole, or are refused before memory is allocated for
 * them. */
static void results_come_as_they_were_sent(void **state)
{
    (void)state;
    enum { N = 700, STRIDE = 3 };
    static int32_t token[N], top[N * STRIDE];
    static float logprob[N], top_logprob[N * STRIDE];
    struct results r = {.step = 9, .n_samples = N, .top_stride = STRIDE};
    struct gathered g = {0};
    struct control_msg msg;
    struct err e = {0};
    int fd[2];
    for (int32_t i = 0; i < N * STRIDE; i++) {
        token[i % N] = top[i] = i;
        logprob[i % N] = top_logprob[i] = (float)-i;
    }
    r.token = token, r.logprob = logprob, r.top_token = top, r.top_logprob = top_logprob;
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, fd), 0);
    assert_int_equal(rank_results_send(fd[0], 3, &r, &e), 0);
    assert_int_equal(control_msg_receive(fd[1], &msg, &e), 1);
    assert_int_equal(msg.kind, CONTROL_RESULTS);
    assert_int_equal(rank_results_receive(fd[1], &msg, &g, N, &e), 1);
    assert_int_equal(g.results.step, 9);
    assert_memory_equal(g.results.token, token, sizeof(token));
    assert_memory_equal(g.results.top_logprob, top_logprob, sizeof(top_logprob));
    assert_int_equal(rank_results_receive(fd[1], &msg, &g, N - 1, &e), ERR_INVALID);
    msg.top_stride = 1 << 30;
    assert_int_equal(rank_results_receive(fd[1], &msg, &g, N, &e), ERR_INVALID);
    msg.top_stride = STRIDE, msg.n_samples = -1;
    assert_int_equal(rank_results_receive(fd[1], &msg, &g, N, &e), ERR_INVALID);
    assert_string_equal(e.text, "not a rank's results");
    close(fd[0]);
    msg.n_samples = N;
    /* the connection closed before the rows arrived */
    assert_int_equal(rank_results_receive(fd[1], &msg, &g, N, &e), 0);
    close(fd[1]);
    microbatch_results_release(&g);
}

/* Masks likewise; one of them allows every id, and has no words. */
static void masks_come_as_they_were_sent(void **state)
{
    (void)state;
    enum { N = 3, WORDS = 70 };
    static uint32_t word[N][WORDS];
    const struct late_mask mask[N] = {{word[0]}, {NULL}, {word[2]}};
    struct rank_masks got = {0};
    struct control_msg msg;
    struct err e = {0};
    int fd[2];
    for (uint32_t i = 0; i < WORDS; i++) {
        word[0][i] = i * 3;
        word[2][i] = ~i;
    }
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, fd), 0);
    assert_int_equal(rank_masks_send(fd[0], 12, mask, N, WORDS, &e), 0);
    assert_int_equal(control_msg_receive(fd[1], &msg, &e), 1);
    assert_int_equal(msg.kind, CONTROL_MASKS);
    assert_int_equal(msg.step, 12);
    assert_int_equal(rank_masks_receive(fd[1], &msg, &got, N - 1, WORDS, &e), ERR_INVALID);
    assert_int_equal(rank_masks_receive(fd[1], &msg, &got, N, WORDS + 1, &e), ERR_INVALID);
    assert_int_equal(rank_masks_receive(fd[1], &msg, &got, N, WORDS, &e), 1);
    assert_memory_equal(got.mask[0].word, word[0], sizeof(word[0]));
    assert_null(got.mask[1].word);
    assert_memory_equal(got.mask[2].word, word[2], sizeof(word[2]));
    /* none will come any more */
    assert_int_equal(rank_masks_send(fd[0], 0, NULL, 0, WORDS, &e), 0);
    assert_int_equal(control_msg_receive(fd[1], &msg, &e), 1);
    assert_int_equal(msg.n_masks, -1);
    assert_int_equal(rank_masks_receive(fd[1], &msg, &got, N, WORDS, &e), ERR_INVALID);
    close(fd[0]);
    msg.n_masks = 1; /* the connection closed before they arrived */
    assert_int_equal(rank_masks_receive(fd[1], &msg, &got, N, WORDS, &e), 0);
    close(fd[1]);
    rank_masks_release(&got);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hellos_differ_by_name),
        cmocka_unit_test(results_come_as_they_were_sent),
        cmocka_unit_test(masks_come_as_they_were_sent),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
