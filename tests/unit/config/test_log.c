/* Log lines, read from a pipe in place of stderr. */
#include "config/base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include <cJSON.h>
#include <cmocka.h>

static char captured[16384];

/* Capture what log_event(...) writes, without the time, in `captured`. */
#define CAPTURE(...)                  \
    do {                              \
        int saved_ = capture_begin(); \
        log_event(__VA_ARGS__);       \
        capture_end(saved_);          \
    } while (0)

static int pipe_read;

static int capture_begin(void)
{
    int fd[2];

    assert_int_equal(pipe(fd), 0);
    int saved = dup(STDERR_FILENO);
    dup2(fd[1], STDERR_FILENO);
    close(fd[1]);
    pipe_read = fd[0];
    return saved;
}

static void capture_end(int saved)
{
    dup2(saved, STDERR_FILENO);
    close(saved);
    ssize_t n = read(pipe_read, captured, sizeof(captured) - 1);
    captured[n > 0 ? n : 0] = '\0';
    close(pipe_read);
}

static void text_is_key_value(void **state)
{
    (void)state;
    log_setup(LOG_TEXT, LOG_INFO);
    CAPTURE(LOG_INFO, "listening", LOG_STR("host", "127.0.0.1"), LOG_I64("port", 8000),
            LOG_F64("ready_s", 0.25));
    assert_int_equal(strlen("2026-01-01T00:00:00.000Z"), strcspn(captured, " "));
    assert_string_equal(strchr(captured, ' '),
                        " info listening host=127.0.0.1 port=8000 ready_s=0.25\n");
}

static void values_are_quoted_where_they_must_be(void **state)
{
    (void)state;
    log_setup(LOG_TEXT, LOG_INFO);
    CAPTURE(LOG_WARN, "x", LOG_STR("a", "two words"), LOG_STR("b", ""), LOG_STR("c", NULL),
            LOG_STR("d", "k=v"), LOG_STR("e", "line\nbreak \"q\" \x01 \xFF"));
    assert_string_equal(strchr(captured, ' '),
                        " warn x a=\"two words\" b=\"\" c=- d=\"k=v\" "
                        "e=\"line\\nbreak \\\"q\\\" \\u0001 \xEF\xBF\xBD\"\n");
}

static void json_is_one_object_a_line(void **state)
{
    (void)state;
    log_setup(LOG_JSON, LOG_INFO);
    CAPTURE(LOG_ERROR, "died \"here\"", LOG_STR("why", "a\nb"), LOG_STR("none", NULL),
            LOG_I64("n", -3), LOG_F64("x", 1.5), LOG_F64("inf", 1e308 * 10));
    assert_ptr_equal(strchr(captured, '\n'), captured + strlen(captured) - 1);
    cJSON *o = cJSON_Parse(captured);
    assert_non_null(o);
    assert_string_equal(cJSON_GetObjectItemCaseSensitive(o, "level")->valuestring, "error");
    assert_string_equal(cJSON_GetObjectItemCaseSensitive(o, "event")->valuestring, "died \"here\"");
    assert_string_equal(cJSON_GetObjectItemCaseSensitive(o, "why")->valuestring, "a\nb");
    assert_true(cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(o, "none")));
    assert_true(cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(o, "inf")));
    assert_int_equal(cJSON_GetObjectItemCaseSensitive(o, "n")->valueint, -3);
    cJSON_Delete(o);
}

static void the_least_level_holds(void **state)
{
    (void)state;
    log_setup(LOG_TEXT, LOG_WARN);
    CAPTURE(LOG_INFO, "quiet", LOG_I64("a", 1));
    assert_string_equal(captured, "");
    CAPTURE(LOG_WARN, "loud", LOG_I64("a", 1));
    assert_non_null(strstr(captured, "loud"));
}

static void long_values_leave_a_readable_line(void **state)
{
    (void)state;
    static char big[20000];
    memset(big, '\x01', sizeof(big) - 1);
    log_setup(LOG_JSON, LOG_INFO);
    CAPTURE(LOG_INFO, "big", LOG_I64("first", 1), LOG_STR("big", big), LOG_I64("last", 2));
    cJSON *o = cJSON_Parse(captured);
    assert_non_null(o);
    assert_non_null(cJSON_GetObjectItemCaseSensitive(o, "first"));
    assert_non_null(cJSON_GetObjectItemCaseSensitive(o, "last"));
    assert_null(cJSON_GetObjectItemCaseSensitive(o, "big"));
    cJSON_Delete(o);
    memset(big, 'a', sizeof(big) - 1);
    CAPTURE(LOG_INFO, "big", LOG_STR("a", big), LOG_STR("b", big), LOG_STR("c", big),
            LOG_STR("d", big));
    o = cJSON_Parse(captured);
    assert_non_null(o);
    assert_int_equal(strlen(cJSON_GetObjectItemCaseSensitive(o, "a")->valuestring), 1024);
    cJSON_Delete(o);
}

static void a_text_of_any_length_and_any_characters(void **state)
{
    char text[6000];

    (void)state;
    log_setup(LOG_JSON, LOG_INFO);
    for (int round = 0; round < 3; round++) {
        static const char *const filling[] = {"a\0\n", "\xe2\x82\xac", "\"\\"};
        size_t step = round == 2 ? 2 : 3, n = sizeof(text) / step;
        for (size_t i = 0; i < n; i++) {
            memcpy(text + i * step, filling[round], step);
        }
        int saved = capture_begin();
        log_event(LOG_INFO, "prompt", LOG_PART("text", text, n * step), LOG_I64("behind", 7));
        capture_end(saved);
        cJSON *o = cJSON_Parse(captured);
        assert_non_null(o);
        const char *logged = cJSON_GetObjectItemCaseSensitive(o, "text")->valuestring;
        assert_true(round == 0 ? strcmp(logged, "a") >= 0 : strlen(logged) > 1800);
        assert_true(round != 1 || strlen(logged) % step == 0); /* whole characters */
        assert_true(round > 0 || strstr(captured, "a\\u0000\\na\\u0000\\n"));
        assert_int_equal(cJSON_GetObjectItemCaseSensitive(o, "behind")->valueint, 7);
        cJSON_Delete(o);
    }
}

static void a_full_disk_is_counted_not_fatal(void **state)
{
    (void)state;
    log_setup(LOG_TEXT, LOG_INFO);
    int full = open("/dev/full", O_WRONLY);
    if (full < 0) {
        skip();
    }
    uint64_t before = log_dropped();
    int saved = dup(STDERR_FILENO);
    dup2(full, STDERR_FILENO);
    errno = EBUSY;
    log_event(LOG_INFO, "lost", LOG_I64("a", 1));
    int after = errno;
    dup2(saved, STDERR_FILENO);
    close(saved);
    close(full);
    assert_int_equal(log_dropped(), before + 1);
    assert_int_equal(after, EBUSY);
}

/* If the line were written, this test would hang; the alarm would end it. */
static void a_stalled_reader_blocks_no_thread(void **state)
{
    (void)state;
    int pipe_fd[2];
    char some[512] = {0};
    log_setup(LOG_TEXT, LOG_INFO);
    assert_int_equal(pipe2(pipe_fd, O_NONBLOCK), 0);
    while (write(pipe_fd[1], some, sizeof(some)) > 0)
        ;
    fcntl(pipe_fd[1], F_SETFL, 0);
    uint64_t before = log_dropped();
    int saved = dup(STDERR_FILENO);
    alarm(20);
    dup2(pipe_fd[1], STDERR_FILENO);
    log_event(LOG_INFO, "lost", LOG_I64("a", 1));
    dup2(saved, STDERR_FILENO);
    alarm(0);
    close(saved);
    close(pipe_fd[0]);
    close(pipe_fd[1]);
    assert_int_equal(log_dropped(), before + 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text_is_key_value),
        cmocka_unit_test(values_are_quoted_where_they_must_be),
        cmocka_unit_test(json_is_one_object_a_line),
        cmocka_unit_test(the_least_level_holds),
        cmocka_unit_test(long_values_leave_a_readable_line),
        cmocka_unit_test(a_text_of_any_length_and_any_characters),
        cmocka_unit_test(a_full_disk_is_counted_not_fatal),
        cmocka_unit_test(a_stalled_reader_blocks_no_thread),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
