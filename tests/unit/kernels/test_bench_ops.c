/* `quire bench kernels` on a CPU prints every line it should, with numbers. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/bench/bench_ops.h"

/* The output for one word; the caller frees it. */
static char *bench_of(char *what, int want_rc)
{
    char *text = NULL;
    size_t size = 0;
    struct err e = {0};
    FILE *out = open_memstream(&text, &size);

    assert_non_null(out);
    assert_int_equal(bench_run("cpu", 1, &what, out, &e), want_rc);
    fclose(out);
    assert_true(want_rc == 0 || strstr(e.text, what));
    return text;
}

static void glue_has_times_bytes_and_shares(void **state)
{
    (void)state;
    char *text = bench_of("glue", 0);
    assert_non_null(strstr(text, "device "));
    assert_non_null(strstr(text, "ceilings: "));
    int lines = 0;
    for (char *line = strtok(text, "\n"); line != NULL; line = strtok(NULL, "\n")) {
        char *us = strstr(line, " us, ");
        if (!us) {
            continue;
        }
        double mb = 0;
        double tb_s = 0;
        int share = 0;
        assert_int_equal(sscanf(us, " us, %lf MB, %lf TB/s (%d %%)", &mb, &tb_s, &share), 3);
        while (us[-1] != ' ') {
            us--;
        }
        assert_true(strtod(us, NULL) > 0 && share >= 0);
        lines++;
    }
    assert_int_equal(lines, 9); /* three kinds of work at three numbers of rows */
    free(text);
}

static void an_unknown_word_is_named(void **state)
{
    (void)state;
    free(bench_of("everything", ERR_INVALID));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(glue_has_times_bytes_and_shares),
        cmocka_unit_test(an_unknown_word_is_named),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
