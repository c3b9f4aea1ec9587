/* Tests the runner's decisions: limits by device, pools by memory, and the copy of a
 * batch that its thread reads. */
#include "engine/workers/runner.h"

#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/workers/batch_copy.h"

#define MIB ((int64_t)1 << 20)
#define GIB ((int64_t)1 << 30)

static struct settings base_settings(void)
{
    return (struct settings){
        .block_size = 16, .gpu_memory_utilization = 0.9, .swap_space = 4 * GIB};
}

static struct model_config *base_config(void)
{
    static struct model_config c;

    c.max_positions = 4096;
    c.vocab = 1000;
    return &c;
}

static void limits_follow_the_device(void **state)
{
    (void)state;
    struct settings s = base_settings();
    struct executor_info cpu = {0}, gpu = {0};
    struct err e;
    assert_int_equal(runner_limits(&cpu, &s, base_config(), false, &e), 0);
    assert_int_equal(runner_limits(&gpu, &s, base_config(), true, &e), 0);
    assert_int_equal(cpu.max_num_seqs, 64);
    assert_int_equal(cpu.max_num_batched_tokens, 512);
    assert_int_equal(gpu.max_num_seqs, 1024);
    assert_int_equal(gpu.max_num_batched_tokens, 8192);
    assert_int_equal(cpu.target_itl_us, 0);
    assert_int_equal(gpu.target_itl_us, 54000);
    assert_true(cpu.max_samples > cpu.max_num_seqs && gpu.max_samples > gpu.max_num_seqs);
    assert_int_equal(cpu.max_len, 4096);
    s.max_num_seqs = 600; /* more than a step of the default would hold */
    assert_int_equal(runner_limits(&cpu, &s, base_config(), false, &e), 0);
    assert_int_equal(cpu.max_num_batched_tokens, 600);
    s.max_model_len = 5000;
    assert_int_equal(runner_limits(&cpu, &s, base_config(), false, &e), ERR_INVALID);
    assert_string_equal(e.param, "max_model_len");
    assert_non_null(strstr(e.text, "5000"));
    assert_non_null(strstr(e.text, "4096"));
}

static void states_larger_than_any_block_are_refused(void **state)
{
    (void)state;
    struct settings s = base_settings();
    static struct model_config c;
    struct executor_info x = {0};
    struct err e;
    c = *base_config();
    c.n_layers = 2;
    c.n_heads = c.n_kv_heads = 1;
    c.head_dim = 8;
    c.sharing_from = 2;
    c.recurrent = (struct recurrent_config){.kind = RECURRENCE_SSD,
                                            .n_heads = 64,
                                            .n_groups = 1,
                                            .key_dim = 64,
                                            .value_dim = 64,
                                            .kernel = 4,
                                            .layer = {true}};
    assert_int_equal(runner_limits(&x, &s, &c, false, &e), 0);
    assert_true(x.block_size >= 64 * 64 * 64 / 16); /* a state's floats by a token's */
    assert_int_equal(x.snapshot_distance % x.block_size, 0);
    c.recurrent.n_heads = 256;
    c.recurrent.key_dim = 128;
    x = (struct executor_info){0};
    assert_int_equal(runner_limits(&x, &s, &c, false, &e), ERR_UNSUPPORTED);
    assert_non_null(strstr(e.text, "a recurrent state takes as much memory as "));
    assert_non_null(strstr(e.text, "a block can have 65536"));
}

static int pools(struct executor_info *x, const struct settings *s, int64_t total, int64_t free,
                 bool gpu, struct err *e)
{
    *x = (struct executor_info){.block_size = 16, .block_bytes = 2 * MIB, .max_len = 4096};
    struct backend_memory m = {total, free};
    return runner_pools(x, s, &m, gpu, e);
}

static void a_cpu_takes_two_gib_or_a_quarter(void **state)
{
    (void)state;
    struct settings s = base_settings();
    struct executor_info x;
    struct err e;
    assert_int_equal(pools(&x, &s, 64 * GIB, 32 * GIB, false, &e), 0);
    assert_int_equal(x.n_blocks, 1024);
    assert_int_equal(x.n_host_blocks, 0); /* swapping would only copy within the same memory */
    assert_int_equal(pools(&x, &s, 8 * GIB, 4 * GIB, false, &e), 0);
    assert_int_equal(x.n_blocks, 512);
    s.preemption = PREEMPT_SWAP;
    assert_int_equal(pools(&x, &s, 64 * GIB, 32 * GIB, false, &e), 0);
    assert_int_equal(x.n_host_blocks, 1024); /* never more than the device's */
    s.kv_cache_memory = 100 * MIB;
    assert_int_equal(pools(&x, &s, 64 * GIB, 32 * GIB, false, &e), 0);
    assert_int_equal(x.n_blocks, 50);
    assert_int_equal(x.max_len, 800); /* what the pool holds */
}

static void a_gpu_takes_its_share_after_the_weights(void **state)
{
    (void)state;
    struct settings s = base_settings();
    struct executor_info x;
    struct err e;
    /* 20 in use: 70 are left of 90 */
    assert_int_equal(pools(&x, &s, 100 * GIB, 80 * GIB, true, &e), 0);
    assert_int_equal(x.n_blocks, 70 * 512);
    assert_int_equal(x.n_host_blocks, 2048);
    s.preemption = PREEMPT_RECOMPUTE;
    assert_int_equal(pools(&x, &s, 100 * GIB, 80 * GIB, true, &e), 0);
    assert_int_equal(x.n_host_blocks, 0);
    assert_int_equal(pools(&x, &s, 100 * GIB, 5 * GIB, true, &e), ERR_INVALID);
    assert_string_equal(e.param, "gpu_memory_utilization");
}

static void pools_that_cannot_be_are_refused(void **state)
{
    (void)state;
    struct settings s = base_settings();
    struct executor_info x;
    struct err e;
    s.kv_blocks = 5000;
    assert_int_equal(pools(&x, &s, 64 * GIB, 8 * GIB, false, &e), ERR_INVALID);
    assert_string_equal(e.param, "kv_blocks");
    s.kv_blocks = 10;
    s.max_model_len = 161;
    assert_int_equal(pools(&x, &s, 64 * GIB, 8 * GIB, false, &e), ERR_INVALID);
    assert_string_equal(e.param, "max_model_len");
    assert_non_null(strstr(e.text, "160"));
    s.max_model_len = 160;
    assert_int_equal(pools(&x, &s, 64 * GIB, 8 * GIB, false, &e), 0);
}

static void a_cpu_rounds_its_cache_like_weights(void **state)
{
    (void)state;
    struct settings s = base_settings();
    struct model_config c = {.dtype = DTYPE_BF16};
    assert_int_equal(runner_kv_dtype(&s, &c, DTYPE_F32), DTYPE_BF16);
    c.dtype = DTYPE_F16;
    assert_int_equal(runner_kv_dtype(&s, &c, DTYPE_F32), DTYPE_BF16);
    assert_int_equal(runner_kv_dtype(&s, &c, DTYPE_F16), DTYPE_F16); /* a GPU's */
    c.latent.rank = 32;
    assert_int_equal(runner_kv_dtype(&s, &c, DTYPE_F32), DTYPE_F32);
    c.latent.rank = 0;
    s.dtype = DTYPE_FLOAT32;
    assert_int_equal(runner_kv_dtype(&s, &c, DTYPE_F32), DTYPE_F32);
    s.kv_cache_dtype = KV_CACHE_BF16;
    assert_int_equal(runner_kv_dtype(&s, &c, DTYPE_F32), DTYPE_BF16);
    s.dtype = DTYPE_AUTO;
    s.kv_cache_dtype = KV_CACHE_F32;
    assert_int_equal(runner_kv_dtype(&s, &c, DTYPE_F32), DTYPE_F32);
}

/* Copies arrays of different lengths, then shorter ones into the same memory, while the
 * originals change. */
static void a_copied_batch_outlives_its_arrays(void **state)
{
    (void)state;
    struct batch_copy c = {0};
    struct err e;
    for (int32_t round = 0; round < 3; round++) {
        int32_t n = (int32_t[]){5, 400, 3}[round];
        int32_t *token = malloc((size_t)n * sizeof(*token)), q_start[3] = {0, 1, n},
                kv_len[2] = {7, 8};
        struct sample_row sample = {.top_p = 0.5f, .seed = 99};
        struct block_copy swap = {3, 4};
        for (int32_t i = 0; i < n; i++) {
            token[i] = i * 3;
        }
        struct batch b = {.step = 9,
                          .n_tokens = n,
                          .token = token,
                          .n_seqs = 2,
                          .q_start = q_start,
                          .kv_len = kv_len,
                          .n_samples = 1,
                          .sample = &sample,
                          .n_swap_in = 1,
                          .swap_in = &swap};
        assert_int_equal(batch_copy_set(&c, &b, &e), 0);
        memset(token, -1, (size_t)n * sizeof(*token));
        memset(q_start, -1, sizeof(q_start));
        memset(&sample, -1, sizeof(sample));
        memset(&swap, -1, sizeof(swap));
        for (int32_t i = 0; i < n; i++) {
            assert_int_equal(c.batch.token[i], i * 3);
        }
        assert_int_equal(c.batch.q_start[2], n);
        assert_int_equal(c.batch.kv_len[1], 8);
        assert_true(c.batch.sample->seed == 99 && c.batch.sample->top_p == 0.5f);
        assert_int_equal(c.batch.swap_in->dst, 4);
        assert_int_equal(c.batch.step, 9);
        assert_null(c.batch.slot);
        free(token);
    }
    batch_copy_release(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(limits_follow_the_device),
        cmocka_unit_test(states_larger_than_any_block_are_refused),
        cmocka_unit_test(a_cpu_rounds_its_cache_like_weights),
        cmocka_unit_test(a_cpu_takes_two_gib_or_a_quarter),
        cmocka_unit_test(a_gpu_takes_its_share_after_the_weights),
        cmocka_unit_test(pools_that_cannot_be_are_refused),
        cmocka_unit_test(a_copied_batch_outlives_its_arrays),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
