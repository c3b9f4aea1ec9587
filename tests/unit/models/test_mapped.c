/* A mapped file that is truncated while it is read ends the process with one line and
 * status 1; any other SIGBUS goes to the previous handler. */
#include "models/checkpoint/mapped.h"

#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { N_BYTES = 1 << 20 };

static int make_file(void)
{
    char path[] = "/tmp/quire-mapped-XXXXXX";
    int fd = mkstemp(path);

    assert_true(fd >= 0);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(ftruncate(fd, N_BYTES), 0);
    return fd;
}

static char *map(int fd, const char *name)
{
    struct err e;
    void *data = NULL;

    assert_int_equal(file_map(fd, N_BYTES, name, &data, &e), 0);
    return data;
}

/* Runs in a child process; its standard error goes into `text`. */
static int status_of(void (*body)(void), char *text, size_t size)
{
    int out[2], status = 0;

    assert_int_equal(pipe(out), 0);
    pid_t child = fork();
    if (child == 0) {
        dup2(out[1], STDERR_FILENO);
        signal(SIGBUS, SIG_DFL); /* instead of the test library's handler */
        body();
        _exit(99);
    }
    close(out[1]);
    size_t n = 0;
    for (ssize_t got; n + 1 < size && (got = read(out[0], text + n, size - 1 - n)) > 0;) {
        n += (size_t)got;
    }
    text[n] = '\0';
    close(out[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    return status;
}

static void read_cut_file(void)
{
    int fd = make_file();
    volatile char *data = map(fd, "some/dir/part-1.safetensors");

    (void)data[N_BYTES - 1];
    if (ftruncate(fd, 4096) == 0) {
        (void)data[N_BYTES - 1];
    }
}

static void read_other_cut_mapping(void)
{
    int fd = make_file();

    map(fd, "watched");
    volatile char *data = mmap(NULL, N_BYTES, PROT_READ, MAP_PRIVATE, fd, 0);
    if (ftruncate(fd, 4096) == 0) {
        (void)data[N_BYTES - 1];
    }
}

static void read_unmapped_again(void)
{
    int fd = make_file();
    char *at = map(fd, "gone");

    file_unmap(at, N_BYTES);
    volatile char *data = mmap(at, N_BYTES, PROT_READ, MAP_PRIVATE | MAP_FIXED, fd, 0);
    if (ftruncate(fd, 4096) == 0) {
        (void)data[N_BYTES - 1];
    }
}

static void be_sent_one(void)
{
    map(make_file(), "watched");
    raise(SIGBUS);
}

static void a_file_cut_short_is_named(void **state)
{
    (void)state;
    char text[512];
    int status = status_of(read_cut_file, text, sizeof(text));
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 1);
    assert_non_null(strstr(text, " part-1.safetensors cannot be read any more"));
}

static void other_faults_are_left_alone(void **state)
{
    (void)state;
    char text[512];
    void (*const bodies[])(void) = {read_other_cut_mapping, read_unmapped_again, be_sent_one};
    for (size_t i = 0; i < ARRAY_LEN(bodies); i++) {
        int status = status_of(bodies[i], text, sizeof(text));
        assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS);
        assert_string_equal(text, "");
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_file_cut_short_is_named),
        cmocka_unit_test(other_faults_are_left_alone),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
