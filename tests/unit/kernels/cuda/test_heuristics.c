/* The CUDA backend's decisions that need no device. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "kernels/cuda/attention/latent_expanded.h"
#include "kernels/cuda/heuristics.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/step/heuristics_verify.h"

static void a_graph_has_room_for_the_step_and_little_more(void **state)
{
    (void)state;
    for (int32_t n = 1; n <= 2048; n++) {
        int32_t rows = graph_rows(n);
        assert_true(rows >= n && rows <= n + n / 8 + 8);
        assert_int_equal(graph_rows(rows), rows); /* a graph's own size maps to itself */
    }
}

static void products_of_few_sizes_are_chosen_for(void **state)
{
    (void)state;
    int32_t sizes = 0, timed = 0;
    for (int32_t n = 1; n <= 16384; n++) {
        int32_t rows = product_rows(n);
        assert_true(rows >= n && rows <= n + (n <= 256 ? n / 2 : n / 8) + 8);
        assert_int_equal(product_rows(rows), rows);
        sizes += rows == n;
        timed += rows == n && n <= 256;
        /* an algorithm timed for a graph serves eager steps too */
        assert_int_equal(product_rows(graph_rows(n)), rows);
    }
    assert_true(sizes <= 128 && timed <= 12);
}

static void tiles_are_for_products_that_fill_the_device(void **state)
{
    (void)state;
    enum { SMS = 132, GATE_UP = 28672 };
    assert_true(product_by_tiles(8192, GATE_UP, SMS));
    assert_true(product_by_tiles(2048, GATE_UP, SMS));
    assert_true(product_by_tiles(256, GATE_UP, SMS));
    assert_false(product_by_tiles(128, GATE_UP, SMS));      /* few rows */
    assert_false(product_by_tiles(512, GATE_UP, SMS));      /* 3.4 tiles a slot */
    assert_false(product_by_tiles(512, 2 * 1024, SMS));     /* few tiles */
    assert_false(product_by_tiles(512, 67 * 256, SMS / 2)); /* a tile more than slots */
    assert_true(product_by_tiles(512, 66 * 256, SMS));
    assert_false(product_by_tiles(520, 22 * 256, SMS)); /* a third pair of tiles, all but empty */
    assert_true(product_by_tiles(8192, GATE_UP, 1));
    assert_true(gated_by_wide_rows(97, GATE_UP, SMS));
    assert_true(gated_by_wide_rows(128, GATE_UP, SMS));
    assert_false(gated_by_wide_rows(96, GATE_UP, SMS));
    assert_false(gated_by_wide_rows(129, GATE_UP, SMS));
    assert_false(gated_by_wide_rows(100, GATE_UP, 114)); /* more than one wave */
    assert_false(gated_by_wide_rows(100, GATE_UP / 2, SMS));
}

static void chunks_cover_what_the_window_shows(void **state)
{
    (void)state;
    for (int32_t window = 0; window < 70; window++) {
        for (int32_t len = 0; len < 200; len++) {
            int32_t begin = window > 0 && len > window ? len - window : 0;
            int32_t first = begin / 16 * 16;
            int32_t n = attn_chunks(len, window, 16);
            assert_true(first + n * 16 >= len);
            assert_true(n == 0 ? len == 0 : first + (n - 1) * 16 < len);
        }
    }
}

static void chunk_starts_are_exclusive_sums(void **state)
{
    (void)state;
    const int32_t len[] = {1, 0, 16, 17, 400};
    int32_t start[6];
    struct batch b = {.n_decode = 5, .n_seqs = 5, .kv_len = len};
    assert_int_equal(attn_chunk_starts(&b, 0, 16, NULL, start), 29);
    const int32_t want[] = {0, 1, 1, 2, 4, 29};
    assert_memory_equal(start, want, sizeof(want));
}

/* Starts of n sequences of so many chunks; every third has `more` in addition. */
static const int32_t *starts(int32_t n, int32_t chunks, int32_t more)
{
    static int32_t start[1025];

    for (int32_t i = 0; i < n; i++) {
        start[i + 1] = start[i] + chunks + (i % 3 == 0 ? more : 0);
    }
    return start;
}

static void every_split_has_chunks_and_warps(void **state)
{
    (void)state;
    for (int32_t n = 0; n <= 1024; n += n < 20 ? 1 : 67) {
        for (int32_t chunks = 1; chunks < 3000; chunks = chunks * 3 + 1) {
            for (int32_t heads = 1; heads <= 64; heads = heads * 2 + 1) {
                const int32_t *start = starts(n, chunks, chunks / 2);
                for (int32_t warps = 2; warps <= 8; warps *= 2) {
                    struct split_kv_plan c = attn_split_kv(start, n, heads, 132, warps);
                    assert_true(c.warps == 1 || c.warps == warps);
                    assert_true(n == 0 ? c.splits == 0 : c.splits >= 1 && c.splits <= start[n]);
                    assert_true(c.splits * heads * c.warps <= 132 * warps);
                    assert_true(c.splits == 0 ||
                                c.splits >=
                                    MIN(start[n] / c.warps, 132 * warps / c.warps / heads) / 2);
                }
            }
        }
    }
}

static void like_sequences_are_split_at_their_ends(void **state)
{
    (void)state;
    struct split_kv_plan c = attn_split_kv(starts(64, 256, 0), 64, 8, 132, 8);
    assert_true(c.warps == 8 && c.splits == 16);
    c = attn_split_kv(starts(16, 64, 0), 16, 8, 132, 8);
    assert_true(c.warps == 8 && c.splits == 16);
    /* short ones: two per split of one warp */
    c = attn_split_kv(starts(256, 64, 0), 256, 8, 132, 8);
    assert_true(c.warps == 1 && c.splits == 128);
    c = attn_split_kv(starts(1, 64, 0), 1, 8, 132, 8); /* one chunk per warp */
    assert_true(c.warps == 8 && c.splits == 8);
    c = attn_split_kv(starts(1, 64, 0), 1, 8, 0, 8); /* before the device is known */
    assert_true(c.splits == 1);
}

/* Shared memory of H200, of A100, and of other architectures; 48 KiB exist
 * everywhere. */
static void decode_attention_fits_devices_with_little_shared_memory(void **state)
{
    (void)state;
    static const int32_t dims[] = {64, 80, 96, 128, 256};
    static const int32_t bytes[] = {227 << 10, 163 << 10, 99 << 10, 48 << 10};
    static const struct decode_shape want[][4] = {{{8, 6}, {8, 4}, {8, 2}, {0, 0}},
                                                  {{8, 5}, {8, 3}, {8, 2}, {0, 0}},
                                                  {{8, 4}, {8, 3}, {4, 3}, {0, 0}},
                                                  {{8, 3}, {8, 2}, {4, 2}, {0, 0}},
                                                  {{4, 3}, {4, 2}, {2, 2}, {0, 0}}};

    for (size_t i = 0; i < sizeof(dims) / sizeof(dims[0]); i++) {
        for (size_t k = 0; k < sizeof(bytes) / sizeof(bytes[0]); k++) {
            struct decode_shape got = attn_decode_shape(dims[i], 2, bytes[k]);
            int32_t used = DECODE_RINGS(got.warps, dims[i]) +
                           got.warps * got.stages * DECODE_STAGE(dims[i], 2);

            assert_int_equal(got.warps, want[i][k].warps);
            assert_int_equal(got.stages, want[i][k].stages);
            assert_true(used <= bytes[k] && used % 128 == 0);
            got = attn_decode_shape(dims[i], 1, bytes[k]); /* of half the bytes, more stages */
            used = DECODE_RINGS(got.warps, dims[i]) +
                   got.warps * got.stages * DECODE_STAGE(dims[i], 1);
            assert_true(used <= bytes[k] && used % 128 == 0);
            assert_true(got.warps * got.stages >=
                        MIN(want[i][k].warps * want[i][k].stages, got.warps * DECODE_MAX_STAGES));
        }
    }
}

static void shared_chunks_are_read_once_where_it_pays(void **state)
{
    (void)state;
    /* six samples of one prompt (10 blocks of 16 in common), an unrelated sequence, two
     * that share 2 blocks, two that share all but one */
    const int32_t kv_len[] = {170, 165, 161, 200, 170, 170, 500, 40, 40, 113, 97};
    const int32_t lcp[] = {0, 10, 10, 10, 10, 10, 0, 0, 2, 0, 6};
    struct batch b = {.n_decode = 11, .n_seqs = 11, .kv_len = kv_len, .lcp_blocks = lcp};
    struct shared_run run[5];
    int32_t start[6], skip[11];
    assert_int_equal(shared_runs(&b, 16, 16, 4, 0, run, start, skip), 3);
    const struct shared_run want[] = {{0, 4, 10}, {4, 2, 10}, {9, 2, 6}};
    const int32_t want_start[] = {0, 10, 20, 26},
                  want_skip[] = {10, 10, 10, 10, 10, 10, 0, 0, 0, 6, 6};
    assert_memory_equal(run, want, sizeof(want));
    assert_memory_equal(start, want_start, sizeof(want_start));
    assert_memory_equal(skip, want_skip, sizeof(want_skip));
    const int32_t *left = skip;
    int32_t chunks[12];
    assert_int_equal(attn_chunk_starts(&b, 0, 16, left, chunks),
                     attn_chunk_starts(&b, 0, 16, NULL, chunks) - 72);
    /* saved: 3 * 10 + 10 + 6 chunks */
    assert_int_equal(shared_runs(&b, 16, 16, 4, 46, run, start, skip), 3);
    assert_int_equal(shared_runs(&b, 16, 16, 4, 47, run, start, skip), 0);
    assert_int_equal(start[0], 0);
    assert_int_equal(skip[0], 0);
    /* a tile cannot hold two members */
    assert_int_equal(shared_runs(&b, 16, 16, 1, 0, run, start, skip), 0);
    /* a sequence keeps the chunk that it writes, even if the table says that it is
     * shared */
    const int32_t whole[] = {0, 8};
    const int32_t len[] = {128, 128};
    struct batch two = {.n_decode = 2, .n_seqs = 2, .kv_len = len, .lcp_blocks = whole};
    assert_int_equal(shared_runs(&two, 16, 16, 4, 0, run, start, skip), 1);
    assert_int_equal(run[0].n_chunks, 7);
}

/* ---- thresholds by device ---- */

static const struct device_speed h200 = {132, H200_GBS}, h100 = {132, 3352},
                                 h100_pcie = {114, 2039}, h20 = {78, 4023}, a100 = {108, 2039},
                                 l40s = {142, 864}, unknown = {0, 0};

static void thresholds_follow_multiprocessors_and_bandwidth(void **state)
{
    (void)state;
    assert_int_equal(rows_that_pay(512, &h200), 512);
    assert_int_equal(rows_that_pay(1024, &h200), 1024);
    assert_int_equal(rows_that_pay(512, &unknown), 512);
    assert_int_equal(rows_that_pay(512, &h100), 751);
    assert_int_equal(rows_that_pay(512, &h100_pcie), 1066);
    assert_int_equal(rows_that_pay(512, &h20), 369);
    assert_int_equal(rows_that_pay(512, &a100), 1010);
    assert_int_equal(rows_that_pay(512, &l40s), 3134);
    assert_int_equal(rows_that_pay(1, &h20), 1);
}

/* Two measurements of a device, a few percent apart, are one number. */
static void measured_bandwidth_comes_in_steps(void **state)
{
    (void)state;
    assert_int_equal(rated_gbs(H200_READ_GBS), H200_GBS);
    for (double x = H200_READ_GBS * 0.965; x < H200_READ_GBS * 1.035; x += 1) {
        assert_int_equal(rated_gbs(x), H200_GBS);
    }
    assert_int_equal(rated_gbs(H200_READ_GBS / 2.0), H200_GBS / 2 + 1);
    assert_int_equal(rated_gbs(H200_READ_GBS * 2.0), H200_GBS * 2);
    int32_t n = 0, last = 0;
    for (int32_t x = 200; x < 400; x++) {
        int32_t r = rated_gbs(x);
        assert_true(r >= last && r > x && r < x * 1.3);
        n += r != last;
        last = r;
    }
    assert_true(n >= 8 && n <= 9);
    assert_int_equal(rated_gbs(0), 0);
    assert_int_equal(rated_gbs(-1), 0);
    assert_int_equal(rated_gbs(NAN), 0);
    assert_true(rated_gbs(1) >= 1);
}

/* Cases timed on an H200, with 4 KiB of keys and values per token. */
static void shared_chunks_are_worth_a_launch_where_they_spared_time(void **state)
{
    (void)state;
    enum { TOKEN_BYTES = 4096 };
    static const struct {
        int32_t n, spared_tokens;
        bool faster;
    } cases[] = {{16, 12 * 2048, false}, {32, 24 * 1024, false},  {64, 32 * 1024, false},
                 {64, 48 * 1024, false}, {64, 48 * 2048, true},   {128, 64 * 512, false},
                 {128, 64 * 1024, true}, {256, 128 * 512, false}, {256, 192 * 512, true},
                 {256, 128 * 1024, true}};
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        int64_t spared = (int64_t)cases[i].spared_tokens * TOKEN_BYTES;
        assert_int_equal(spared >= shared_worth_bytes(cases[i].n, H200_GBS), cases[i].faster);
    }
}

/* A launch takes the same time everywhere, in which a slower memory reads less. */
static void what_a_launch_is_worth_follows_the_memory(void **state)
{
    (void)state;
    for (int32_t n = 1; n <= 512; n *= 2) {
        int64_t there = shared_worth_bytes(n, H200_GBS);
        assert_int_equal(shared_worth_bytes(n, H200_GBS / 3), there / 3);
        assert_int_equal(shared_worth_bytes(n, 0), there); /* unknown */
    }
}

static void mps_is_told_by_its_environment(void **state)
{
    static const char *const names[] = {"CUDA_MPS_PIPE_DIRECTORY",
                                        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"};

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        unsetenv(names[i]);
    }
    assert_false(mps_told());
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        setenv(names[i], "", 1);
        assert_false(mps_told());
        setenv(names[i], "50", 1);
        assert_true(mps_told());
        unsetenv(names[i]);
    }
}

static void a_short_neighbour_does_not_cost_the_run_its_depth(void **state)
{
    (void)state;
    const int32_t kv_len[] = {900, 900, 900, 900};
    const int32_t lcp[] = {0, 50, 50, 5};
    struct batch b = {.n_decode = 4, .n_seqs = 4, .kv_len = kv_len, .lcp_blocks = lcp};
    struct shared_run run[2];
    int32_t start[3], skip[4];
    assert_int_equal(shared_runs(&b, 16, 16, 4, 0, run, start, skip), 1);
    assert_int_equal(run[0].members, 3);
    assert_int_equal(run[0].n_chunks, 50);
    assert_int_equal(skip[3], 0);
}

static void every_prefill_row_lies_in_one_tile_and_long_tiles_come_first(void **state)
{
    (void)state;
    const int32_t q_start[] = {0, 1, 301, 428, 429};
    const int32_t kv_len[] = {50, 300, 1127, 9};
    const int32_t row[] = {3, 2, 1, 0};
    struct query_tile tile[8];
    struct batch b = {.n_seqs = 4, .n_decode = 1, .q_start = q_start, .kv_len = kv_len, .row = row};
    assert_int_equal(prefill_tiles(&b, 128, NULL), 5);
    assert_int_equal(prefill_tiles(&b, 128, tile), 5);
    int rows[429] = {0};
    int32_t before = INT32_MAX;
    for (int i = 0; i < 5; i++) {
        int32_t s = 3 - tile[i].row;
        assert_true(tile[i].first >= q_start[s] && tile[i].end <= q_start[s + 1] &&
                    tile[i].end <= tile[i].first + 128);
        assert_int_equal(tile[i].shift, kv_len[s] - q_start[s + 1]);
        for (int32_t t = tile[i].first; t < tile[i].end; t++) {
            rows[t]++;
        }
        int32_t keys = tile[i].end + tile[i].shift;
        assert_true(keys <= before);
        before = keys;
    }
    for (int t = 1; t < 429; t++) {
        assert_int_equal(rows[t], 1);
    }
}

static void sequences_are_widened_where_their_queries_pay_for_it(void **state)
{
    (void)state;
    const int32_t q_start[] = {0, 1, 401, 528, 530};
    const int32_t kv_len[] = {50, 400, 1127, 9};
    const int32_t row[] = {3, 2, 1, 0};
    struct widened_seq seq[3];
    int32_t first[4];
    struct batch b = {.n_seqs = 4, .n_decode = 1, .q_start = q_start, .kv_len = kv_len, .row = row};

    assert_int_equal(widened_seqs(&b, 16, 8, &h200, seq, first), 25 + 71 + 1);
    for (int32_t i = 0; i < 3; i++) {
        assert_int_equal(seq[i].row, row[1 + i]);
        assert_int_equal(seq[i].position, kv_len[1 + i] - (q_start[2 + i] - q_start[1 + i]));
        assert_int_equal(seq[i].first, first[1 + i]);
    }
    assert_int_equal(first[1], 0);
    assert_int_equal(first[2], 25);
    assert_int_equal(first[3], 96);
    assert_int_equal(widened_seqs(&b, 16, 1, &h200, seq, first), 0); /* 400 queries of a head */
    /* where memory is slower they must be more */
    assert_int_equal(widened_seqs(&b, 16, 8, &h100_pcie, seq, first), 0);
    assert_int_equal(widened_seqs(&b, 16, 20, &h100_pcie, seq, first), 25 + 71 + 1);
    b.n_seqs = 1;
    assert_int_equal(widened_seqs(&b, 16, 8, &h200, seq, first), 0);
}

static void heads_are_expanded_for_sequences_with_many_new_rows(void **state)
{
    (void)state;
    enum { ALL = 1 << 17 };
    assert_false(sequence_expands(63, 63, ALL));
    assert_true(sequence_expands(64, 64, ALL));
    assert_true(sequence_expands(64, 129, ALL));
    assert_false(sequence_expands(64, 130, ALL)); /* more keys than its rows pay for */
    assert_true(sequence_expands(256, 100000, ALL));
    assert_true(sequence_expands(256, ALL, ALL));
    assert_false(sequence_expands(256, ALL + 1, ALL)); /* no room */
    assert_false(sequence_expands(64, 64, 0));
}

static void expanded_sequences_have_rows_and_tiles_of_their_own(void **state)
{
    (void)state;
    const int32_t q_start[] = {0, 1, 71, 74, 204, 604}, kv_len[] = {50, 70, 9, 130, 400};
    const int32_t row[] = {4, 3, 2, 1, 0};
    struct expanded_seq seq[4];
    struct query_tile tile[8];
    struct batch b = {.n_seqs = 5, .n_decode = 1, .q_start = q_start, .kv_len = kv_len, .row = row};
    struct expanded_portion p = {.next = 1};

    assert_true(expanded_next(&b, 512, seq, tile, &p)); /* of 70 and of 130 keys */
    assert_int_equal(p.n_seqs, 2);
    assert_int_equal(p.n_tiles, 3);
    assert_int_equal(p.n_rows, 384);
    assert_int_equal(seq[0].row, 3);
    assert_int_equal(seq[0].first, 0);
    assert_int_equal(seq[0].n_keys, 70);
    assert_int_equal(seq[1].row, 1);
    assert_int_equal(seq[1].first, 128);
    assert_int_equal(seq[1].n_keys, 130);
    const struct query_tile want[] = {{128, 202, 204, -74}, {128, 74, 202, -74}, {0, 1, 71, -1}};
    assert_memory_equal(tile, want, sizeof(want));
    assert_true(expanded_next(&b, 512, seq, tile, &p)); /* the longest, alone */
    assert_int_equal(p.seq, 2);
    assert_int_equal(p.tile, 3);
    assert_int_equal(p.n_tiles, 4);
    assert_int_equal(p.n_rows, 512);
    assert_int_equal(seq[2].first, 0);
    assert_int_equal(tile[3].end + tile[3].shift, 400);
    assert_false(expanded_next(&b, 512, seq, tile, &p));
    p = (struct expanded_portion){.next = 1};
    assert_true(expanded_next(&b, 256, NULL, NULL, &p));
    assert_int_equal(p.n_rows, 128);
    assert_true(expanded_next(&b, 256, NULL, NULL, &p));
    assert_int_equal(p.n_rows, 256);
    assert_false(expanded_next(&b, 256, NULL, NULL, &p)); /* 400 keys have no room */
}

static struct sample_row plain_row(int32_t i)
{
    return (struct sample_row){
        .logits_row = i, .top_p = 1, .repetition_penalty = 1, .n_logprobs = -1, .mask_first = -1};
}

static void only_plain_decode_steps_are_replayed(void **state)
{
    (void)state;
    const int32_t logits[] = {0, 1};
    struct sample_row row[] = {plain_row(0), plain_row(1)};
    struct batch b = {.n_tokens = 2,
                      .n_seqs = 2,
                      .n_decode = 2,
                      .n_logits = 2,
                      .n_samples = 2,
                      .logits_token = logits,
                      .sample = row};
    assert_true(graph_eligible(&b));
    assert_true(batch_greedy(&b));
    row[1].temperature = 0.5f;
    assert_true(graph_eligible(&b));
    assert_false(batch_greedy(&b));
    row[1].top_k = 1;
    assert_true(batch_greedy(&b));
    row[1].logits_row = 0; /* two samples of one row */
    assert_false(graph_eligible(&b));
    row[1].logits_row = 1;
    row[1].mask_first = 0; /* the same kernels run, with another parameter */
    assert_true(graph_eligible(&b));
    assert_false(batch_greedy(&b));
    row[1].mask_first = -1;
    row[1].late_mask = 1; /* its graph is one of its own */
    assert_true(graph_eligible(&b));
    assert_false(batch_greedy(&b));
    row[1].late_mask = 0;
    row[1].frequency_penalty = 0.5f;
    row[1].position = row[1].n_prompt = 4;
    assert_true(batch_greedy(&b)); /* no output token yet */
    row[1].position = 5;
    assert_false(batch_greedy(&b));
    row[1].frequency_penalty = 0;
    row[1].repetition_penalty = 1.5f;
    row[1].position = 4;
    assert_true(graph_eligible(&b));
    assert_false(batch_greedy(&b));
    row[1].repetition_penalty = 1;
    b.n_decode = 1;
    assert_false(graph_eligible(&b));
}

/* Two decodes, sequences of 3 and 2 tokens that are sampled from, and a prefill. */
static void verified_drafts_are_rows_of_decodes(void **state)
{
    (void)state;
    const int32_t q_start[] = {0, 1, 2, 5, 7, 11}, kv_len[] = {9, 20, 33, 16, 4},
                  row[] = {3, 1, 4, 0, 2}, lcp[] = {0, 1, 0, 0, 0},
                  logits[] = {0, 1, 2, 3, 4, 5, 6, 10};
    int32_t made[4][9];
    struct verify_rows r = {made[0], made[1], made[2], made[3]};
    struct batch b = {.n_seqs = 5,
                      .n_tokens = 11,
                      .q_start = q_start,
                      .kv_len = kv_len,
                      .row = row,
                      .lcp_blocks = lcp,
                      .n_logits = 8,
                      .logits_token = logits};
    struct batch same = b;

    assert_true(split_verified(&same, &r, 7, 16)); /* no room for all: the last stay as they are */
    assert_int_equal(same.n_seqs, 7);
    assert_int_equal(same.q_start[6], 7);
    assert_true(split_verified(&b, &r, 8, 16));
    const int32_t want_start[] = {0, 1, 2, 3, 4, 5, 6, 7, 11},
                  want_len[] = {9, 20, 31, 32, 33, 15, 16, 4},
                  want_row[] = {3, 1, 4, 4, 4, 0, 0, 2}, want_lcp[] = {0, 1, 0, 2, 2, 0, 1, 0};
    assert_int_equal(b.n_seqs, 8);
    assert_memory_equal(b.q_start, want_start, sizeof(want_start));
    assert_memory_equal(b.kv_len, want_len, sizeof(want_len));
    assert_memory_equal(b.row, want_row, sizeof(want_row));
    assert_memory_equal(b.lcp_blocks, want_lcp, sizeof(want_lcp));
    assert_ptr_equal(b.logits_token, logits);
    same = b;
    assert_false(split_verified(&same, &r, 8, 16)); /* nothing left to split */
    assert_int_equal(same.n_seqs, 8);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_graph_has_room_for_the_step_and_little_more),
        cmocka_unit_test(products_of_few_sizes_are_chosen_for),
        cmocka_unit_test(tiles_are_for_products_that_fill_the_device),
        cmocka_unit_test(chunks_cover_what_the_window_shows),
        cmocka_unit_test(chunk_starts_are_exclusive_sums),
        cmocka_unit_test(every_split_has_chunks_and_warps),
        cmocka_unit_test(like_sequences_are_split_at_their_ends),
        cmocka_unit_test(decode_attention_fits_devices_with_little_shared_memory),
        cmocka_unit_test(shared_chunks_are_read_once_where_it_pays),
        cmocka_unit_test(shared_chunks_are_worth_a_launch_where_they_spared_time),
        cmocka_unit_test(what_a_launch_is_worth_follows_the_memory),
        cmocka_unit_test(thresholds_follow_multiprocessors_and_bandwidth),
        cmocka_unit_test(measured_bandwidth_comes_in_steps),
        cmocka_unit_test(mps_is_told_by_its_environment),
        cmocka_unit_test(a_short_neighbour_does_not_cost_the_run_its_depth),
        cmocka_unit_test(every_prefill_row_lies_in_one_tile_and_long_tiles_come_first),
        cmocka_unit_test(sequences_are_widened_where_their_queries_pay_for_it),
        cmocka_unit_test(heads_are_expanded_for_sequences_with_many_new_rows),
        cmocka_unit_test(expanded_sequences_have_rows_and_tiles_of_their_own),
        cmocka_unit_test(only_plain_decode_steps_are_replayed),
        cmocka_unit_test(verified_drafts_are_rows_of_decodes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
