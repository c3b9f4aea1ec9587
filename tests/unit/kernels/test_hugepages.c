/* Weights that the CPU backend reads in their mapped file: which ones, and that their
 * values are the same while and after they move into huge pages. */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "kernels/cpu/cpu.h"

enum { COLS = 2048, ROWS = 6144, FIRST_ROWS = 2048 }; /* 24 MiB of bf16 */
#define N_BYTES ((size_t)ROWS * COLS * 2)
/* Where the tensor begins in its file: not on a page boundary, as behind a header. */
enum { OFFSET = 4104 };

struct rig {
    struct backend *b;
    int fd;
    char *map;      /* the file */
    char *data;     /* the tensor in it */
    char *expected; /* its values */
};

static int open_rig(void **state)
{
    static struct rig r;
    struct backend_config config = {
        .threads = 2, .max_tokens = 8, .max_seqs = 2, .max_samples = 2, .max_blocks_per_seq = 4};
    struct err e = {0};
    char path[] = "/tmp/quire-hugepages-XXXXXX";

    r.fd = mkstemp(path);
    r.expected = malloc(N_BYTES);
    if (r.fd < 0 || !r.expected || unlink(path) < 0) {
        return -1;
    }
    for (size_t i = 0; i < N_BYTES / 4; i++) {
        ((uint32_t *)r.expected)[i] = (uint32_t)i * 2654435761u;
    }
    if (pwrite(r.fd, r.expected, N_BYTES, OFFSET) != (ssize_t)N_BYTES) {
        return -1;
    }
    r.map = mmap(NULL, OFFSET + N_BYTES, PROT_READ, MAP_PRIVATE, r.fd, 0);
    r.data = r.map + OFFSET;
    *state = &r;
    return r.map != MAP_FAILED ? backend_open(&r.b, "cpu", &config, &e) : -1;
}

static int close_rig(void **state)
{
    struct rig *r = *state;

    r->b->ops->free(r->b);
    munmap(r->map, OFFSET + N_BYTES);
    free(r->expected);
    return close(r->fd);
}

/* A weight of two pieces that are contiguous in the file; tests change it. */
static struct weight_desc two_pieces(struct rig *r, struct weight_piece *p)
{
    p[0] = (struct weight_piece){
        .data = r->data, .dtype = DTYPE_BF16, .rows = FIRST_ROWS, .cols = COLS, .stride = COLS};
    p[1] = p[0];
    p[1].data = r->data + (size_t)FIRST_ROWS * COLS * 2;
    p[1].rows = ROWS - FIRST_ROWS;
    return (struct weight_desc){.name = "w",
                                .kind = WEIGHT_LINEAR,
                                .dtype = DTYPE_BF16,
                                .rows = ROWS,
                                .cols = COLS,
                                .piece = p,
                                .n_pieces = 2,
                                .mapped = true};
}

static bool in_place(struct rig *r, const struct weight_desc *d)
{
    struct mat m;
    struct err e = {0};

    assert_int_equal(r->b->ops->weight(r->b, d, &m, &e), 0);
    return m.data == d->piece[0].data;
}

static void only_what_lies_as_it_is_needed_is_read_in_place(void **state)
{
    struct rig *r = *state;
    struct weight_piece p[2];
    struct weight_desc d = two_pieces(r, p);

    d.mapped = false;
    assert_false(in_place(r, &d));
    d = two_pieces(r, p); /* the second piece lies elsewhere */
    p[1].data = r->data;
    assert_false(in_place(r, &d));
    d = two_pieces(r, p); /* other values than the file's */
    d.dtype = DTYPE_F16;
    assert_false(in_place(r, &d));
    d = two_pieces(r, p); /* a range of columns */
    d.cols = p[0].cols = p[1].cols = COLS / 2;
    assert_false(in_place(r, &d));
    d = two_pieces(r, p); /* small: most of it would stay in small pages */
    d.n_pieces = 1;
    d.rows = p[0].rows = 64;
    assert_false(in_place(r, &d));
}

static bool on_one_node_with_large_pages(void)
{
    char text[64] = "";
    int fd = open("/sys/kernel/mm/transparent_hugepage/enabled", O_RDONLY);
    bool ok = fd >= 0 && read(fd, text, sizeof(text) - 1) > 0 && !strstr(text, "[never]");

    if (fd >= 0) {
        close(fd);
    }
    return ok && access("/sys/devices/system/node/node1", F_OK) != 0;
}

static void wait_for_the_move(struct rig *r)
{
    struct err e = {0};

    assert_int_equal(cpu_hugepages_start(cpu_of(r->b), &e), 0);
    /* a second call does nothing */
    assert_int_equal(cpu_hugepages_start(cpu_of(r->b), &e), 0);
    for (int i = 0; cpu_hugepages_pending_bytes(cpu_of(r->b)) > 0; i++) {
        assert_true(i < 100000);
        assert_memory_equal(r->data, r->expected, N_BYTES);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
}

static void zero_in_file(struct rig *r, size_t at)
{
    char zeros[4096] = {0};

    assert_int_equal(pwrite(r->fd, zeros, sizeof(zeros), (off_t)(OFFSET + at)), sizeof(zeros));
}

static void values_and_address_stay_while_the_pages_change(void **state)
{
    struct rig *r = *state;
    struct weight_piece p[2];
    struct weight_desc d = two_pieces(r, p);

    if (!on_one_node_with_large_pages()) {
        skip();
    }
    assert_true(in_place(r, &d));
    assert_int_equal(cpu_hugepages_pending_bytes(cpu_of(r->b)), (int64_t)N_BYTES);
    wait_for_the_move(r);
    /* The file is no longer read, except for the weight's ends. */
    zero_in_file(r, N_BYTES / 2);
    assert_memory_equal(r->data, r->expected, N_BYTES);
}

/* Three weights: the 64 KiB between the first two are moved with them, the 4 MiB before
 * the third stay in the file. */
static void what_lies_between_two_weights_goes_along(void **state)
{
    static const int32_t first[] = {0, 2064, 5120}, end[] = {2048, 4096, ROWS};
    enum { ROW_BYTES = COLS * 2 };
    struct rig *r = *state;
    struct weight_piece p[2];

    if (!on_one_node_with_large_pages()) {
        skip();
    }
    for (int i = 0; i < 3; i++) {
        struct weight_desc d = two_pieces(r, p);
        d.n_pieces = 1;
        d.rows = p[0].rows = end[i] - first[i];
        p[0].data = r->data + (size_t)first[i] * ROW_BYTES;
        assert_true(in_place(r, &d));
    }
    wait_for_the_move(r);
    zero_in_file(r, (size_t)(end[0] + 4) * ROW_BYTES);
    assert_memory_equal(r->data, r->expected, (size_t)end[1] * ROW_BYTES);
    size_t other = (size_t)(end[1] + 512) * ROW_BYTES;
    zero_in_file(r, other);
    assert_memory_not_equal(r->data + other, r->expected + other, ROW_BYTES);
    assert_memory_equal(r->data + (size_t)first[2] * ROW_BYTES,
                        r->expected + (size_t)first[2] * ROW_BYTES,
                        (size_t)(end[2] - first[2]) * ROW_BYTES);
}

static void a_move_under_way_ends_with_the_backend(void **state)
{
    struct rig *r = *state;
    struct weight_piece p[2];
    struct weight_desc d = two_pieces(r, p);
    struct err e = {0};

    (void)in_place(r, &d);
    assert_int_equal(cpu_hugepages_start(cpu_of(r->b), &e), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(only_what_lies_as_it_is_needed_is_read_in_place, open_rig,
                                        close_rig),
        cmocka_unit_test_setup_teardown(values_and_address_stay_while_the_pages_change, open_rig,
                                        close_rig),
        cmocka_unit_test_setup_teardown(what_lies_between_two_weights_goes_along, open_rig,
                                        close_rig),
        cmocka_unit_test_setup_teardown(a_move_under_way_ends_with_the_backend, open_rig,
                                        close_rig),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
