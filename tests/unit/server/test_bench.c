/* The parts of `quire bench`: streamed answers split anywhere, percentiles, workloads,
 * flags. */
#include "server/bench/bench.h"

#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "server/bench/bench_stream.h"

static const char answer[] =
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"
    "2d\r\ndata: {\"choices\":[{\"text\":\"a\"}],\"usage\":null}\r\n"
    "9\r\n\n\n: keepa\r\n"
    "2f\r\nlive\n\ndata: {\"choices\":[{\"text\":\"b\",\"index\":0}]\r\n"
    "3\r\n}\n\n\r\n"
    "4c\r\ndata: "
    "{\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":2}}\n\ndata\r\n"
    "a\r\n: [DONE]\n\n\r\n"
    "0\r\n\r\n";

/* The result does not depend on how the bytes are split. */
static void an_answer_in_any_pieces(void **state)
{
    (void)state;
    for (size_t step = 1; step < sizeof(answer); step++) {
        struct stream_reader r;
        struct err e = {0};
        int32_t events = 0;
        stream_reader_init(&r);
        for (size_t at = 0; at < sizeof(answer) - 1; at += step) {
            int32_t n = stream_feed(&r, answer + at, MIN(step, sizeof(answer) - 1 - at), &e);
            if (n < 0) {
                fail_msg("step %zu: %s", step, e.text);
            }
            events += n;
            assert_int_equal(r.done, at + step >= sizeof(answer) - 1);
        }
        assert_int_equal(events, 2);
        assert_int_equal(r.n_events, 2);
        assert_int_equal(r.completion_tokens, 2);
        assert_false(r.failed);
        assert_int_equal(stream_feed(&r, "x", 1, &e), ERR_INVALID);
    }
}

static void errors_are_kept_with_their_text(void **state)
{
    (void)state;
    struct stream_reader r;
    struct err e;
    const char *refused =
        "HTTP/1.1 429 Too Many\r\nContent-Length: 11\r\nConnection: close\r\n\r\n{\"error\":1}";
    stream_reader_init(&r);
    assert_int_equal(stream_feed(&r, refused, strlen(refused), &e), 0);
    assert_true(r.done && r.failed && r.close);
    assert_int_equal(r.status, 429);
    assert_string_equal(r.line, "{\"error\":1}");
    const char *late =
        "HTTP/1.1 200 OK\r\n\r\ndata: {\"error\":{\"message\":\"m\"}}\n\ndata: [DONE]\n\n";
    stream_reader_init(&r);
    assert_int_equal(stream_feed(&r, late, strlen(late), &e), 0);
    assert_true(r.failed);
    assert_non_null(strstr(r.line, "\"m\""));
    assert_int_equal(stream_closed(&r, &e), 0);
    stream_reader_init(&r);
    assert_int_equal(stream_feed(&r, "SSH-2.0\r\n", 9, &e), ERR_INVALID);
    stream_reader_init(&r);
    stream_feed(&r, answer, 100, &e);
    assert_int_equal(stream_closed(&r, &e), ERR_IO);
}

static void percentiles_are_right_to_a_percent(void **state)
{
    (void)state;
    static struct latency_hist s;
    for (int64_t us = 1; us <= 1000000; us++) {
        latency_hist_add(&s, us);
    }
    for (double p = 1; p < 100; p += 7) {
        double got = latency_hist_percentile_ms(&s, p), want = p * 10;
        assert_true(got > want * 0.99 && got < want * 1.01);
    }
    assert_true(latency_hist_percentile_ms(&s, 100) == 1000);
    assert_true(latency_hist_mean_ms(&s) > 499.9 && latency_hist_mean_ms(&s) < 500.1);
    static struct latency_hist one;
    latency_hist_add(&one, 1234567);
    assert_true(latency_hist_percentile_ms(&one, 1) == 1234.567 &&
                latency_hist_percentile_ms(&one, 99) == 1234.567);
}

static int load_file(struct bench_load *l, const char *text, struct err *e)
{
    char path[] = "/tmp/quire-load-XXXXXX";
    int fd = mkstemp(path);

    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    close(fd);
    struct bench_options o = {.workload = path, .n = 1};
    int rc = bench_load_make(l, &o, e);
    unlink(path);
    return rc;
}

static void workloads_are_lines_of_two_lengths(void **state)
{
    (void)state;
    struct bench_load l;
    struct err e;
    assert_int_equal(load_file(&l, "# prompt output\n10 20\n\n 3\t4 # short\n", &e), 0);
    assert_int_equal(l.n, 2);
    assert_int_equal(l.item[1].n_prompt, 3);
    assert_int_equal(l.prompt_tokens, 13);
    assert_int_equal(l.output_tokens, 24);
    assert_int_equal(l.max_prompt, 10);
    int32_t a[10], b[10];
    bench_load_prompt(&l, 0, a);
    bench_load_prompt(&l, 0, b);
    assert_memory_equal(a, b, sizeof(a));
    for (int i = 0; i < 10; i++) {
        assert_true(a[i] >= 0 && a[i] < l.vocab);
    }
    bench_load_release(&l);
    assert_int_equal(load_file(&l, "10 20\n7\n", &e), ERR_INVALID);
    assert_non_null(strstr(e.text, "line 2"));
    assert_int_equal(load_file(&l, "10 0\n", &e), ERR_INVALID);
    assert_int_equal(load_file(&l, "# nothing\n", &e), ERR_INVALID);
}

static void poisson_arrivals_keep_their_rate(void **state)
{
    (void)state;
    struct bench_load l;
    struct err e;
    struct bench_options o = {
        .requests = 20000, .input_len = 1, .output_len = 1, .n = 1, .request_rate = 100, .seed = 3};
    assert_int_equal(bench_load_make(&l, &o, &e), 0);
    double mean_s = (double)l.item[l.n - 1].start_us * 1e-6 / l.n;
    assert_true(mean_s > 0.0097 && mean_s < 0.0103);
    for (int32_t i = 1; i < l.n; i++) {
        assert_true(l.item[i].start_us >= l.item[i - 1].start_us);
    }
    bench_load_release(&l);
}

static void flags_are_taken_and_the_rest_is_left(void **state)
{
    (void)state;
    struct bench_options o;
    struct err e;
    int left;
    char *argv[] = {"null",         "--requests", "5", "--kv-blocks", "9", "--request-rate=2.5",
                    "--stop-at-eos"};
    assert_int_equal(bench_options_read(&o, 7, argv, &left, &e), 0);
    assert_int_equal(left, 3);
    assert_string_equal(argv[2], "9");
    assert_int_equal(o.requests, 5);
    assert_true(o.request_rate == 2.5 && o.stop_at_eos);
    char *bad[] = {"--requests", "5x"}, *missing[] = {"--requests"}, *half[] = {"--n=1.5"};
    assert_int_equal(bench_options_read(&o, 2, bad, &left, &e), ERR_INVALID);
    assert_non_null(strstr(e.text, "--requests 5x"));
    assert_int_equal(bench_options_read(&o, 1, missing, &left, &e), ERR_INVALID);
    assert_int_equal(bench_options_read(&o, 1, half, &left, &e), ERR_INVALID);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_answer_in_any_pieces),
        cmocka_unit_test(errors_are_kept_with_their_text),
        cmocka_unit_test(percentiles_are_right_to_a_percent),
        cmocka_unit_test(workloads_are_lines_of_two_lengths),
        cmocka_unit_test(poisson_arrivals_keep_their_rate),
        cmocka_unit_test(flags_are_taken_and_the_rest_is_left),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
