/* GGUF: malformed headers; every block format against a second, bit-by-bit decoder;
 * names and order of tensors; configuration and vocabulary. */
#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "config/base/buf.h"
#include "models/checkpoint/gguf/gguf.h"
#include "models/tokenizer/tokenizer.h"
#include "tests/unit/models/gguf_file.h"

static struct err e;

static struct gguf *parse(struct file *f)
{
    struct gguf *g = NULL;

    e = (struct err){0};
    if (gguf_parse(&g, f->all.data, f->all.len, "x.gguf", &e) != 0) {
        fail_msg("%s", e.text);
    }
    return g;
}

/* ---- headers ---- */

static void refuse_bytes(const char *data, size_t len, const char *words)
{
    struct gguf *g = NULL;

    e = (struct err){0};
    int rc = gguf_parse(&g, data, len, "x.gguf", &e);
    if (rc >= 0 || !strstr(e.text, words) || strncmp(e.text, "x.gguf: ", 8) != 0) {
        fail_msg("code %d, text '%s', expected '%s'", rc, e.text, words);
    }
}

static void refuse(struct file *f, const char *words)
{
    finish(f, 3);
    refuse_bytes(f->all.data, f->all.len, words);
    file_release(f);
}

static const float FOUR[4] = {1, -2, 3, 0.5f};

static void a_header_is_read(void **state)
{
    (void)state;
    for (uint32_t version = 2; version <= 3; version++) {
        struct file f;
        int64_t n = 0;
        double x = 0;
        bool yes = false;
        struct gguf_text text;
        file_init(&f);
        set_int(&f, "b.int", 7);
        set_text(&f, "a.text", "hello");
        set_real(&f, "c.real", 0.25f);
        set_bool(&f, "d.bool", true);
        add_tensor(&f, "t", 0, 2, 2, FOUR, 16);
        finish(&f, version);
        struct gguf *g = parse(&f);
        assert_int_equal(gguf_int(g, "b.int", &n, &e), 1);
        assert_int_equal(n, 7);
        assert_int_equal(gguf_real(g, "c.real", &x, &e), 1);
        assert_true(x == 0.25);
        assert_int_equal(gguf_bool(g, "d.bool", &yes, &e), 1);
        assert_true(yes);
        assert_int_equal(gguf_string(g, "a.text", &text, &e), 1);
        assert_true(gguf_text_is(text, "hello"));
        assert_int_equal(gguf_int(g, "none", &n, &e), 0);
        assert_int_equal(gguf_int(g, "a.text", &n, &e), ERR_INVALID);
        assert_int_equal(g->n_tensors, 1);
        assert_memory_equal(g->tensor[0].data, FOUR, 16);
        gguf_free(g);
        file_release(&f);
    }
}

static void lying_headers_are_refused(void **state)
{
    (void)state;
    struct file f;
    refuse_bytes("", 0, "not a GGUF file");
    refuse_bytes("GGML....", 8, "not a GGUF file");
    refuse_bytes("GGUF\1\0\0\0", 8, "version 1");
    refuse_bytes("GGUF\0\0\0\3", 8, "big-endian");
    refuse_bytes("GGUF\3\0\0\0\1\0\0", 11, "ends inside the header");
    refuse_bytes("GGUF\3\0\0\0\377\377\377\377\377\377\377\377\0\0\0\0\0\0\0\0", 24,
                 "tensors; the file is too small");
    refuse_bytes("GGUF\3\0\0\0\0\0\0\0\0\0\0\0\377\377\377\377\0\0\0\0", 24,
                 "metadata pairs; the file is too small");

    file_init(&f);
    set_int(&f, "k", 1);
    set_int(&f, "k", 2);
    refuse(&f, "k appears twice");
    file_init(&f);
    key(&f, "k", (enum gguf_type)13);
    u64(&f.head, 0);
    refuse(&f, "type 13");
    file_init(&f);
    key(&f, "k", GGUF_ARRAY);
    u32(&f.head, GGUF_ARRAY);
    u64(&f.head, 0);
    refuse(&f, "inside an array");
    file_init(&f);
    key(&f, "k", GGUF_ARRAY);
    u32(&f.head, GGUF_F64);
    u64(&f.head, UINT64_MAX / 8 + 2);
    refuse(&f, "elements");
    file_init(&f);
    key(&f, "k", GGUF_STRING);
    u64(&f.head, UINT64_MAX);
    refuse(&f, "claims a string of");
    file_init(&f);
    key(&f, "k", GGUF_BOOL);
    buf_putc(&f.head, 2);
    refuse(&f, "a bool of 2");
    file_init(&f);
    set_int(&f, "a key with spaces", 1);
    refuse(&f, "printable");
    file_init(&f);
    set_int(&f, "general.alignment", 24);
    refuse(&f, "power of 2");
}

static void lying_tensors_are_refused(void **state)
{
    (void)state;
    struct file f;
    file_init(&f);
    add_tensor(&f, "t", 0, 4, 0, FOUR, 16);
    add_tensor(&f, "t", 0, 4, 0, FOUR, 16);
    refuse(&f, "t appears twice");
    file_init(&f);
    add_tensor(&f, "t", 0, 64, 0, FOUR, 16);
    refuse(&f, "the file has 32");
    file_init(&f);
    add_tensor(&f, "t", 0, UINT64_C(1) << 40, UINT64_C(1) << 40, FOUR, 16);
    refuse(&f, "too many values");
    file_init(&f);
    add_tensor(&f, "t", 0, UINT64_C(1) << 62, 0, FOUR, 16);
    refuse(&f, "too many values");
    file_init(&f);
    add_tensor(&f, "t", 0, UINT64_MAX, 0, FOUR, 16);
    refuse(&f, "dimension of -1");
    file_init(&f);
    add_tensor(&f, "t", 8, 33, 0, FOUR, 16);
    refuse(&f, "Q8_0 needs a multiple of 32");
    file_init(&f);
    add_tensor(&f, "t", 17, 256, 0, FOUR, 16);
    refuse(&f, "is of type 17 (IQ2_XS); read are F32");
    file_init(&f);
    add_tensor(&f, "t", 1000, 256, 0, FOUR, 16);
    refuse(&f, "is of type 1000; read are F32");
    file_init(&f);
    add_tensor(&f, "t", 0, 4, 0, FOUR, 16);
    f.tensors.data[f.tensors.len - 8] = 4;
    refuse(&f, "no multiple of the alignment");
    file_init(&f);
    add_tensor(&f, "s", 0, 16, 0, (const float[16]){0}, 64);
    add_tensor(&f, "t", 0, 4, 0, FOUR, 16);
    f.tensors.data[f.tensors.len - 8] = 32;
    refuse(&f, "overlap");
    file_init(&f);
    add_tensor(&f, "t", 0, 4, 0, FOUR, 16);
    f.tensors.data[9] = 5; /* dimensions */
    refuse(&f, "5 dimensions");
}

/* A file that is cut at any byte is refused, or complete. */
static void cut_files_are_refused(void **state)
{
    (void)state;
    struct file f;
    const char *texts[] = {"a", "bc"};
    file_init(&f);
    set_texts(&f, "k", texts, 2);
    set_real(&f, "r", 1);
    add_tensor(&f, "t", 0, 8, 0, (const float[8]){0}, 32);
    finish(&f, 3);
    for (size_t len = 0; len < f.all.len; len++) {
        char *exact = malloc(len + 1); /* lets a sanitizer see a read past the end */
        assert_non_null(exact);
        char *tail = memcpy(exact + 1, f.all.data, len);
        refuse_bytes(tail, len, "");
        free(exact);
    }
    file_release(&f);
}

/* ---- block formats ---- */

/* float16 by its definition. */
static double half(const uint8_t *p)
{
    int bits = p[0] | p[1] << 8, exponent = bits >> 10 & 31, mantissa = bits & 1023;
    double magnitude =
        exponent ? ldexp(1 + mantissa / 1024.0, exponent - 15) : ldexp(mantissa / 1024.0, -14);

    return bits & 0x8000 ? -magnitude : magnitude;
}

/* Bits [at, at + n) of a byte string, lowest first. */
static int bits(const uint8_t *p, int at, int n)
{
    int value = 0;

    for (int i = 0; i < n; i++) {
        value |= (p[(at + i) / 8] >> (at + i) % 8 & 1) << i;
    }
    return value;
}

/* Value i of a block of 32: `high` is where the fifth bits are, -1: none. */
static double small_value(const uint8_t *b, int i, int low, int high, int offset, bool min)
{
    int q = bits(b + low, i < 16 ? 8 * i : 8 * (i - 16) + 4, 4);

    if (high >= 0) {
        q += 16 * bits(b + high, i, 1);
    }
    return half(b) * (q - offset) + (min ? half(b + 2) : 0);
}

/* Value i of Q4_K, Q5_K. Sub-block j has a 6-bit scale and minimum; from the fourth on
 * their upper two bits are in the bytes of sub-block j - 4. */
static double k_value(const uint8_t *b, int i, int low, int high)
{
    int j = i / 32, k = i % 32, scale, min;
    const uint8_t *s = b + 4;

    if (j < 4) {
        scale = bits(s, 8 * j, 6);
        min = bits(s, 8 * (j + 4), 6);
    } else {
        scale = bits(s, 8 * (j + 4), 4) + 16 * bits(s, 8 * (j - 4) + 6, 2);
        min = bits(s, 8 * (j + 4) + 4, 4) + 16 * bits(s, 8 * j + 6, 2);
    }
    int q = bits(b + low, 8 * (32 * (j / 2) + k) + 4 * (j % 2), 4);
    if (high >= 0) {
        q += 16 * bits(b + high, 8 * k + j, 1);
    }
    return half(b) * scale * q - half(b + 2) * min;
}

static double q6_value(const uint8_t *b, int i)
{
    int part = i / 128, r = i % 128, quarter = r / 32, k = r % 32;
    int low = bits(b, 8 * (64 * part + (quarter & 1) * 32 + k) + (quarter >= 2 ? 4 : 0), 4);
    int high = bits(b + 128, 8 * (32 * part + k) + 2 * quarter, 2);

    return half(b + 208) * (int8_t)b[192 + i / 16] * (low + 16 * high - 32);
}

static double q2_value(const uint8_t *b, int i)
{
    int part = i / 128, quarter = i % 128 / 32, k = i % 32;
    int q = bits(b + 16, 8 * (32 * part + k) + 2 * quarter, 2);

    return half(b + 80) * bits(b + i / 16, 0, 4) * q - half(b + 82) * bits(b + i / 16, 4, 4);
}

/* Sub-block j: the lower four bits of its scale are nibble j / 8 of byte j % 8, the
 * upper two are pair j / 4 of byte 8 + j % 4. */
static double q3_value(const uint8_t *b, int i)
{
    int part = i / 128, quarter = i % 128 / 32, k = i % 32, j = i / 16;
    int scale = bits(b + 96 + j % 8, j / 8 * 4, 4) + 16 * bits(b + 104 + j % 4, j / 4 * 2, 2);
    int q = bits(b + 32, 8 * (32 * part + k) + 2 * quarter, 2) +
            4 * bits(b, 8 * k + 4 * part + quarter, 1);

    return half(b + 108) * (scale - 32) * (q - 4);
}

static double level(int q)
{
    static const int OF[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                               1,    13,   25,  38,  53,  69,  89,  113};

    return OF[q];
}

static double iq4_xs_value(const uint8_t *b, int i)
{
    int j = i / 32, k = i % 32;
    int scale = bits(b + 4, 4 * j, 4) + 16 * bits(b + 2, 2 * j, 2);

    return half(b) * (scale - 32) *
           level(bits(b + 8 + 16 * j, k < 16 ? 8 * k : 8 * (k - 16) + 4, 4));
}

static double value_of(uint32_t encoding, const uint8_t *b, int i)
{
    switch (encoding) {
    case 1:
        return half(b);
    case 2:
        return small_value(b, i, 2, -1, 8, false);
    case 3:
        return small_value(b, i, 4, -1, 0, true);
    case 6:
        return small_value(b, i, 6, 2, 16, false);
    case 7:
        return small_value(b, i, 8, 4, 0, true);
    case 8:
        return half(b) * (int8_t)b[2 + i];
    case 10:
        return q2_value(b, i);
    case 11:
        return q3_value(b, i);
    case 12:
        return k_value(b, i, 16, -1);
    case 13:
        return k_value(b, i, 48, 16);
    case 20:
        return half(b) * level(bits(b + 2, i < 16 ? 8 * i : 8 * (i - 16) + 4, 4));
    case 23:
        return iq4_xs_value(b, i);
    default:
        return q6_value(b, i);
    }
}

static void block_formats_decode_as_their_layouts_say(void **state)
{
    (void)state;
    static const uint32_t ENCODINGS[] = {1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23};
    uint32_t seed = 1;
    for (size_t n = 0; n < ARRAY_LEN(ENCODINGS); n++) {
        uint32_t encoding = ENCODINGS[n];
        int bytes = gguf_block_bytes(encoding), values = gguf_block_values(encoding);
        for (int round = 0; round < 50; round++) {
            uint8_t b[2 * 256] = {0};
            float y[2 * 256];
            for (int i = 0; i < 2 * bytes; i++) {
                b[i] = (uint8_t)((seed = seed * 1664525 + 1013904223) >> 24);
            }
            for (int k = 0; k < 2; k++) { /* finite scales, some of them subnormal */
                int at[] = {0, 2, bytes - 4, bytes - 2};
                for (int i = 0; i < 4; i++) {
                    if (at[i] + 1 < bytes) {
                        b[k * bytes + at[i] + 1] &= round % 5 ? 0xbb : 0x83;
                    }
                }
            }
            gguf_decode(encoding, b, 2 * values, y);
            for (int i = 0; i < 2 * values; i++) {
                double want = value_of(encoding, b + i / values * bytes, i % values);
                double bound =
                    1e-6 * (fabs(want) + fabs(half(b + i / values * bytes + 2)) * 64) + 1e-30;
                if (fabs(y[i] - want) > bound) {
                    fail_msg("%s value %d: %.9g, must be %.9g", gguf_encoding_name(encoding), i,
                             (double)y[i], want);
                }
            }
        }
    }
}

/* The values of the Python package gguf: scripts/make-quantised --hashes. */
static void block_formats_decode_as_the_reference_does(void **state)
{
    (void)state;
    static const struct {
        uint32_t encoding;
        uint64_t hash;
    } REFERENCE[] = {
        {2, 0xeebb57e13014928full},  {3, 0xbf098fb3ce878d43ull},  {6, 0x7ef671e7e4c2a57dull},
        {7, 0xbc1acf55fcba36beull},  {8, 0x73bfd464e45e5efdull},  {20, 0x945e8cb8f564c57bull},
        {39, 0x0a1290f286b29b59ull}, {10, 0x3540f3bc76847361ull}, {11, 0x37ae7b204072db61ull},
        {12, 0xb4c4ad94f060b358ull}, {13, 0x070f319644a8dce8ull}, {14, 0x9c321fbe2bf51758ull},
        {23, 0x04a52839233b4a57ull}};
    enum { VALUES = 8192 };
    static uint8_t raw[2 * VALUES];
    static float y[VALUES];
    for (size_t i = 0; i < ARRAY_LEN(REFERENCE); i++) {
        uint32_t encoding = REFERENCE[i].encoding, seed = 1;
        int n = VALUES / gguf_block_values(encoding) * gguf_block_bytes(encoding);
        for (int k = 0; k < n; k++) {
            raw[k] = (uint8_t)((seed = seed * 1664525 + 1013904223) >> 24);
        }
        gguf_decode(encoding, raw, VALUES, y);
        uint64_t hash = 0xcbf29ce484222325; /* FNV-1a */
        for (int k = 0; k < VALUES; k++) {
            uint32_t bits;
            memcpy(&bits, &y[k], sizeof(bits));
            bits = isnan(y[k]) ? 0x7fc00000 : bits;
            for (int b = 0; b < 4; b++) {
                hash = (hash ^ (bits >> 8 * b & 255)) * 0x100000001b3;
            }
        }
        if (hash != REFERENCE[i].hash) {
            fail_msg("%s: 0x%016llx", gguf_encoding_name(encoding), (unsigned long long)hash);
        }
    }
}

static void plain_floats_decode_exactly(void **state)
{
    (void)state;
    static const uint8_t BF16[] = {0x80, 0x3f, 0x40, 0xc0},
                         F16[] = {0x00, 0x3c, 0x01, 0x00, 0x00, 0xfc};
    float y[4];
    gguf_decode(0, (const uint8_t *)FOUR, 4, y);
    assert_memory_equal(y, FOUR, sizeof(y));
    gguf_decode(30, BF16, 2, y);
    assert_true(y[0] == 1 && y[1] == -3);
    gguf_decode(1, F16, 3, y);
    assert_true(y[0] == 1 && y[1] == 0x1p-24f && y[2] == -INFINITY);
}

static void values_are_rounded_to_the_type_asked_for(void **state)
{
    (void)state;
    /* value, bfloat16, float16 */
    static const struct {
        float x;
        uint16_t bf16, f16;
    } CASES[] = {{1, 0x3f80, 0x3c00},
                 {-2.5f, 0xc020, 0xc100},
                 {1 + 0x1p-8f, 0x3f80, 0x3c04},      /* a tie: to even */
                 {1 + 3 * 0x1p-8f, 0x3f82, 0x3c0c},  /* a tie: to even */
                 {1 + 0x1p-11f, 0x3f80, 0x3c00},     /* a tie: to even */
                 {1 + 3 * 0x1p-11f, 0x3f80, 0x3c02}, /* a tie: to even */
                 {65519, 0x4780, 0x7bff},
                 {65520, 0x4780, 0x7c00}, /* over the largest */
                 {0x1p-14f, 0x3880, 0x0400},
                 {0x1p-24f, 0x3380, 0x0001},
                 {0x1p-25f, 0x3300, 0x0000},
                 {3 * 0x1p-25f, 0x33c0, 0x0002}};
    for (size_t i = 0; i < ARRAY_LEN(CASES); i++) {
        struct gguf_tensor s = {
            .encoding = 0, .n_dims = 1, .dim = {1}, .data = (const uint8_t *)&CASES[i].x};
        struct tensor t = {.encoded = &s, .dtype = DTYPE_BF16};
        uint16_t got = 0;
        assert_int_equal(tensor_decode(&t, &got), 0);
        assert_int_equal(got, CASES[i].bf16);
        t.dtype = DTYPE_F16;
        assert_int_equal(tensor_decode(&t, &got), 0);
        assert_int_equal(got, CASES[i].f16);
    }
}

/* ---- tensors, configuration ---- */

static void put_llama(struct file *f, const char *arch)
{
    static const struct setting_int INTS[] = {
        {"context_length", 128},     {"embedding_length", 8},     {"block_count", 1},
        {"feed_forward_length", 16}, {"attention.head_count", 2}, {"attention.head_count_kv", 1},
        {"rope.dimension_count", 4}};
    char name[64];

    set_text(f, "general.architecture", arch);
    set_ints(f, arch, INTS, ARRAY_LEN(INTS));
    snprintf(name, sizeof(name), "%s.rope.freq_base", arch);
    set_real(f, name, 5000);
    snprintf(name, sizeof(name), "%s.attention.layer_norm_rms_epsilon", arch);
    set_real(f, name, 1e-5f);
    set_int(f, "tokenizer.ggml.bos_token_id", 1);
    set_int(f, "tokenizer.ggml.eos_token_id", 2);
    set_int(f, "tokenizer.ggml.eot_token_id", 3);
    set_real(f, "general.sampling.temp", 0.5f);
    float data[8 * 8];
    for (int i = 0; i < 64; i++) {
        data[i] = (float)i;
    }
    add_tensor(f, "token_embd.weight", 0, 8, 8, data, sizeof(data));
    add_tensor(f, "blk.0.attn_q.weight", 0, 8, 8, data, sizeof(data));
    add_tensor(f, "blk.0.ffn_down.weight", 0, 8, 2, data, 64);
    add_tensor(f, "blk.0.ffn_odd.weight", 0, 8, 0, data, 32);
}

static void metadata_becomes_a_configuration(void **state)
{
    (void)state;
    struct file f;
    struct model_config c;
    struct generation_defaults gen;
    file_init(&f);
    put_llama(&f, "llama");
    finish(&f, 3);
    struct gguf *g = parse(&f);
    if (gguf_config(&c, &gen, g, &e) != 0) {
        fail_msg("%s", e.text);
    }
    assert_string_equal(c.architecture, "LlamaForCausalLM");
    assert_int_equal(c.hidden, 8);
    assert_int_equal(c.n_heads, 2);
    assert_int_equal(c.n_kv_heads, 1);
    assert_int_equal(c.head_dim, 4);
    assert_int_equal(c.vocab, 8);
    assert_int_equal(c.rope.rot_dim, 4);
    assert_true(c.rope.theta == 5000 && c.norm_eps == 1e-5f && c.tied && c.dtype == DTYPE_F32);
    assert_int_equal(c.bos, 1);
    assert_int_equal(c.n_eos, 2);
    assert_int_equal(c.eos[1], 3);
    assert_true(gen.temperature == 0.5f && isnan(gen.top_p) && gen.top_k == -1);
    gguf_free(g);
    file_release(&f);
}

static void refuse_config(struct file *f, const char *words)
{
    struct model_config c;
    struct generation_defaults gen;

    finish(f, 3);
    struct gguf *g = parse(f);
    int rc = gguf_config(&c, &gen, g, &e);
    if (rc >= 0 || !strstr(e.text, words)) {
        fail_msg("code %d, text '%s', expected '%s'", rc, e.text, words);
    }
    gguf_free(g);
    file_release(f);
}

static void what_is_not_supported_is_refused(void **state)
{
    (void)state;
    struct file f;
    file_init(&f);
    put_llama(&f, "mamba");
    refuse_config(&f, "'mamba' is not known; known are llama, arcee, mistral3, smollm3, granite, "
                      "granite_swa, apertus, qwen2, qwen2vl, ");
    file_init(&f);
    put_llama(&f, "mamba");
    refuse_config(&f, " more (docs/models.md)");
    file_init(&f);
    refuse_config(&f, "general.architecture is missing");
    file_init(&f);
    put_llama(&f, "qwen2");
    set_int(&f, "qwen2.expert_count", 8);
    refuse_config(&f, "qwen2 with 8 experts is not supported");
    file_init(&f);
    put_llama(&f, "llama");
    set_text(&f, "llama.rope.scaling.type", "weird");
    refuse_config(&f, "rope_type is 'weird'");
    file_init(&f);
    set_text(&f, "general.architecture", "llama");
    refuse_config(&f, "hidden_size is missing");
}

/* llama.cpp's converter puts row [head][k][i] (k: the half, 0 or 1) at [head][i][k]. */
static void rows_of_q_go_back_to_their_places(void **state)
{
    (void)state;
    struct file f;
    struct model_config c = {.n_heads = 2, .n_kv_heads = 1, .head_dim = 4, .hidden = 8};
    for (int llama = 0; llama < 2; llama++) {
        struct checkpoint *ck;
        float q[8 * 8];
        file_init(&f);
        put_llama(&f, llama ? "llama" : "qwen2");
        finish(&f, 3);
        assert_int_equal(gguf_checkpoint(&ck, parse(&f), &c, DTYPE_BF16, &e), 0);
        const struct tensor *t = checkpoint_find(ck, "model.layers.0.self_attn.q_proj.weight");
        assert_non_null(t);
        assert_int_equal(t->dtype, DTYPE_F32);
        assert_int_equal(t->n_bytes, sizeof(q));
        assert_int_equal(llama, t->encoded != NULL);
        if (t->encoded) {
            assert_int_equal(tensor_decode(t, q), 0);
        } else {
            memcpy(q, t->data, sizeof(q));
        }
        for (int head = 0; head < 2; head++) {
            for (int k = 0; k < 2; k++) {
                for (int i = 0; i < 2; i++) {
                    int row = llama ? head * 4 + i * 2 + k : head * 4 + k * 2 + i;
                    assert_true(q[(head * 4 + k * 2 + i) * 8] == (float)(8 * row));
                }
            }
        }
        t = checkpoint_find(ck, "model.layers.0.mlp.down_proj.weight");
        assert_true(t && !t->encoded && t->dim[0] == 2 && t->dim[1] == 8);
        /* reported by transformer_check */
        assert_non_null(checkpoint_find(ck, "blk.0.ffn_odd.weight"));
        checkpoint_free(ck);
        file_release(&f);
    }
}

static void gpt2_is_transposed_back(void **state)
{
    (void)state;
    struct file f;
    struct checkpoint *ck;
    struct model_config c = {.n_heads = 1, .n_kv_heads = 1};
    static const float SIX[6] = {0, 1, 2, 3, 4, 5}, BACK[6] = {0, 3, 1, 4, 2, 5};
    float got[6];
    file_init(&f);
    set_text(&f, "general.architecture", "gpt2");
    add_tensor(&f, "blk.11.ffn_up.weight", 0, 3, 2, SIX, sizeof(SIX));
    finish(&f, 3);
    assert_int_equal(gguf_checkpoint(&ck, parse(&f), &c, DTYPE_BF16, &e), 0);
    const struct tensor *t = checkpoint_find(ck, "transformer.h.11.mlp.c_fc.weight");
    assert_non_null(t);
    assert_int_equal(t->dim[0], 3);
    assert_int_equal(t->dim[1], 2);
    assert_int_equal(tensor_decode(t, got), 0);
    assert_memory_equal(got, BACK, sizeof(got));
    checkpoint_free(ck);
    file_release(&f);
}

static void families_tensors_get_their_names(void **state)
{
    (void)state;
    static const struct {
        const char *arch, *from, *to;
    } CASES[] = {
        {"llama", "blk.3.ffn_norm.weight", "model.layers.3.post_attention_layernorm.weight"},
        {"phi3", "blk.0.ffn_up.weight", "model.layers.0.mlp.gate_up_proj.weight"},
        {"chatglm", "blk.0.attn_qkv.bias", "model.layers.0.self_attn.qkv_proj.bias"},
        {"chatglm", "blk.0.ffn_up.weight", "model.layers.0.mlp.gate_up_proj.weight"},
        {"gemma2", "blk.0.post_attention_norm.weight",
         "model.layers.0.post_attention_layernorm.weight"},
        {"gemma2", "blk.0.ffn_norm.weight", "model.layers.0.pre_feedforward_layernorm.weight"},
        {"gemma2", "blk.0.post_ffw_norm.weight",
         "model.layers.0.post_feedforward_layernorm.weight"},
        {"gemma2", "blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight"},
        {"starcoder2", "blk.0.ffn_up.bias", "model.layers.0.mlp.c_fc.bias"},
        {"starcoder2", "blk.0.ffn_down.weight", "model.layers.0.mlp.c_proj.weight"},
        {"starcoder2", "output_norm.bias", "model.norm.bias"},
        {"glm4moe", "blk.1.exp_probs_b.bias", "model.layers.1.mlp.gate.e_score_correction_bias"},
        {"glm4moe", "blk.1.nextn.eh_proj.weight", "model.layers.1.nextn.eh_proj.weight"},
        {"qwen3moe", "blk.1.ffn_gate_inp.weight", "model.layers.1.mlp.gate.weight"}};
    struct model_config c = {.n_heads = 1, .n_kv_heads = 1};
    for (size_t i = 0; i < ARRAY_LEN(CASES); i++) {
        struct file f;
        struct checkpoint *ck;
        file_init(&f);
        set_text(&f, "general.architecture", CASES[i].arch);
        add_tensor(&f, CASES[i].from, 0, 4, 0, FOUR, sizeof(FOUR));
        finish(&f, 3);
        assert_int_equal(gguf_checkpoint(&ck, parse(&f), &c, DTYPE_BF16, &e), 0);
        if (!checkpoint_find(ck, CASES[i].to)) {
            fail_msg("%s: %s is not %s", CASES[i].arch, CASES[i].from, CASES[i].to);
        }
        checkpoint_free(ck);
        file_release(&f);
    }
}

/* Experts lie one after the other in one tensor; a tensor of another shape is left as
 * it is, for the table of the family to refuse. */
static void experts_become_tensors_of_their_own(void **state)
{
    (void)state;
    struct model_config c = {.n_heads = 1, .n_kv_heads = 1};
    float data[3 * 2 * 4];
    for (int i = 0; i < 24; i++) {
        data[i] = (float)i;
    }
    for (int axes = 2; axes <= 3; axes++) {
        struct file f;
        struct checkpoint *ck;
        file_init(&f);
        set_text(&f, "general.architecture", "qwen3moe");
        const uint64_t dim[3] = {4, axes == 3 ? 2 : 6, axes == 3 ? 3 : 0};
        add_cube(&f, "blk.0.ffn_up_exps.weight", 0, dim, data, sizeof(data));
        finish(&f, 3);
        assert_int_equal(gguf_checkpoint(&ck, parse(&f), &c, DTYPE_BF16, &e), 0);
        assert_int_equal(checkpoint_count(ck), axes == 3 ? 3 : 1);
        for (int i = 0; i < 3 && axes == 3; i++) {
            char name[64];
            snprintf(name, sizeof(name), "model.layers.0.mlp.experts.%d.up_proj.weight", i);
            const struct tensor *t = checkpoint_find(ck, name);
            assert_non_null(t);
            assert_int_equal(t->n_dims, 2);
            assert_true(t->dim[0] == 2 && t->dim[1] == 4 && t->n_bytes == 32);
            assert_memory_equal(t->data, data + 8 * i, 32);
        }
        checkpoint_free(ck);
        file_release(&f);
    }
}

static void refuse_tensors(struct file *f, const char *words)
{
    struct model_config c = {.n_heads = 1, .n_kv_heads = 1};
    struct checkpoint *ck = NULL;

    finish(f, 3);
    int rc = gguf_checkpoint(&ck, parse(f), &c, DTYPE_BF16, &e);
    if (rc >= 0 || !strstr(e.text, words) || strncmp(e.text, "x.gguf: ", 8) != 0 ||
        strstr(e.text + 8, "x.gguf")) {
        fail_msg("code %d, text '%s', expected '%s'", rc, e.text, words);
    }
    file_release(f);
}

/* n rows of 32 values in Q8_0, of which each row has its number in its first byte. */
static void fill_rows(uint8_t *data, int n)
{
    memset(data, 0, (size_t)n * 34);
    for (int i = 0; i < n; i++) {
        data[(size_t)i * 34] = (uint8_t)i;
    }
}

/* Of each expert the rows of its gate come before those of its up. */
static void gates_and_ups_in_one_tensor_are_two(void **state)
{
    (void)state;
    enum { EXPERTS = 3, HALF = 2, ROWS = EXPERTS * 2 * HALF };
    static const struct {
        const char *arch, *part[2];
    } CASES[] = {
        {"granite_swa",
         {"block_sparse_moe.experts.%d.gate_proj", "block_sparse_moe.experts.%d.up_proj"}},
        {"mistral4", {"mlp.experts.%d.gate_proj", "mlp.experts.%d.up_proj"}},
        {"gemma4", {"experts.%d.gate_proj", "experts.%d.up_proj"}},
        {"minimax-m2", {"block_sparse_moe.experts.%d.w1", "block_sparse_moe.experts.%d.w3"}}};
    static const char NAME[] = "blk.1.ffn_gate_up_exps.weight";
    struct model_config c = {.n_heads = 1, .n_kv_heads = 1};
    uint8_t data[ROWS * 34];

    fill_rows(data, ROWS);
    for (size_t i = 0; i < ARRAY_LEN(CASES); i++) {
        struct file f;
        struct checkpoint *ck;
        char stem[64], name[128], count[64];
        file_init(&f);
        set_text(&f, "general.architecture", CASES[i].arch);
        snprintf(count, sizeof(count), "%s.expert_count", CASES[i].arch);
        set_int(&f, count, EXPERTS);
        add_cube(&f, NAME, 8, (const uint64_t[]){32, 2 * HALF, EXPERTS}, data, sizeof(data));
        finish(&f, 3);
        assert_int_equal(gguf_checkpoint(&ck, parse(&f), &c, DTYPE_BF16, &e), 0);
        assert_int_equal(checkpoint_count(ck), 2 * EXPERTS);
        for (int k = 0; k < 2 * EXPERTS; k++) {
            snprintf(stem, sizeof(stem), CASES[i].part[k % 2], k / 2);
            snprintf(name, sizeof(name), "model.layers.1.%s.weight", stem);
            const struct tensor *t = checkpoint_find(ck, name);
            assert_non_null(t);
            assert_true(t->n_dims == 2 && t->dim[0] == HALF && t->dim[1] == 32);
            assert_true(t->blocks[0] == k * HALF && t->blocks[34] == k * HALF + 1);
        }
        checkpoint_free(ck);
        file_release(&f);
    }
    struct file f;
    file_init(&f);
    set_text(&f, "general.architecture", "qwen3moe");
    add_cube(&f, NAME, 8, (const uint64_t[]){32, 3, 4}, data, sizeof(data));
    refuse_tensors(&f, "ffn_gate_up_exps.weight has 3 rows an expert, which are not two halves");
    file_init(&f);
    set_text(&f, "general.architecture", "qwen3moe");
    add_cube(&f, NAME, 8, (const uint64_t[]){32, 4, 3}, data, sizeof(data));
    add_cube(&f, "blk.1.ffn_up_exps.weight", 8, (const uint64_t[]){32, 2, 6}, data, sizeof(data));
    refuse_tensors(&f, "tensor 'model.layers.1.mlp.experts.0.up_proj.weight' appears twice");
}

/* ---- vocabulary ---- */

static void expect_ids(const struct tokenizer *t, const char *text, const int32_t *want, int32_t n)
{
    struct token_list l = {0};

    if (tokenizer_encode(t, text, strlen(text), true, 100, &l, &e) != 0) {
        fail_msg("%s", e.text);
    }
    assert_int_equal(l.n, n);
    assert_memory_equal(l.id, want, (size_t)n * sizeof(*want));
    token_list_release(&l);
}

static void a_byte_level_vocabulary_encodes(void **state)
{
    (void)state;
    static const char *const TOKENS[] = {"<end>", "a", "b", "ab", "1", "11"}, *const MERGES[] = {
                                                                                  "a b", "1 1"};
    static const int32_t TYPES[] = {3, 1, 1, 1, 1, 1};
    struct file f;
    struct tokenizer *t = NULL;
    file_init(&f);
    set_text(&f, "tokenizer.ggml.model", "gpt2");
    set_text(&f, "tokenizer.ggml.pre", "smollm"); /* each digit is a word */
    set_texts(&f, "tokenizer.ggml.tokens", TOKENS, 6);
    set_texts(&f, "tokenizer.ggml.merges", MERGES, 2);
    set_numbers(&f, "tokenizer.ggml.token_type", GGUF_I32, TYPES, 6);
    set_int(&f, "tokenizer.ggml.bos_token_id", 0);
    set_bool(&f, "tokenizer.ggml.add_bos_token", true);
    finish(&f, 3);
    struct gguf *g = parse(&f);
    if (gguf_tokenizer(&t, g, &e) != 0) {
        fail_msg("%s", e.text);
    }
    expect_ids(t, "abb11<end>a", (const int32_t[]){0, 3, 2, 4, 4, 0, 1}, 7);
    assert_true(tokenizer_is_special(t, 0));
    assert_int_equal(tokenizer_bos(t), 0);
    assert_int_equal(tokenizer_eos(t), -1);
    tokenizer_free(t);
    gguf_free(g);
    file_release(&f);
}

/* Where words end, by tokenizer.ggml.pre: what is merged tells. Expected are the splits
 * of llama.cpp. */
static void words_end_as_the_vocabularys_kind_says(void **state)
{
    (void)state;
    enum { ONE, TWO, THREE, FOUR, FIVE, LINE, LINES, A, SPACE, SPACE_A, DOT, DOT_A, N };
    static const char *const
        TOKENS[N] = {"1", "11",     "111",     "1111", "11111", "\u010a", "\u010a\u010a",
                     "a", "\u0120", "\u0120a", ".",    ".a"},
        *const MERGES[] = {"1 1", "11 11", "11 1", "1111 1", "\u010a \u010a", "\u0120 a", ". a"};
#define ONES ONE, ONE, ONE, ONE, ONE
#define APART DOT, A, LINE, LINE, A, SPACE_A, -1
#define TOGETHER DOT_A, LINES, A, SPACE_A, -1
    static const struct {
        const char *pre;
        int32_t want[16];
    } CASES[] = {{"llama4", {THREE, TWO, TOGETHER}}, {"falcon3", {THREE, TWO, TOGETHER}},
                 {"jais-2", {THREE, TWO, TOGETHER}}, {"afmoe", {TWO, THREE, TOGETHER}},
                 {"solar-open", {ONES, TOGETHER}},   {"youtu", {ONES, TOGETHER}},
                 {"exaone-moe", {ONES, TOGETHER}},   {"mellum", {FIVE, APART}},
                 {"mellum2", {ONES, APART}},         {"deepseek-llm", {FIVE, APART}},
                 {"deepseek-coder", {ONES, APART}},  {"falcon", {THREE, TWO, APART}},
                 {"kimi-k2", {THREE, TWO, TOGETHER}}};
#undef ONES
#undef APART
#undef TOGETHER

    for (size_t i = 0; i < ARRAY_LEN(CASES); i++) {
        struct file f;
        struct tokenizer *t = NULL;
        int32_t n = 0;
        file_init(&f);
        set_text(&f, "tokenizer.ggml.model", "gpt2");
        set_text(&f, "tokenizer.ggml.pre", CASES[i].pre);
        set_texts(&f, "tokenizer.ggml.tokens", TOKENS, N);
        set_texts(&f, "tokenizer.ggml.merges", MERGES, ARRAY_LEN(MERGES));
        set_bool(&f, "tokenizer.ggml.add_bos_token", false);
        finish(&f, 3);
        struct gguf *g = parse(&f);
        if (gguf_tokenizer(&t, g, &e) != 0) {
            fail_msg("%s", e.text);
        }
        while (CASES[i].want[n] >= 0) {
            n++;
        }
        expect_ids(t, "11111.a\n\na a", CASES[i].want, n);
        tokenizer_free(t);
        gguf_free(g);
        file_release(&f);
    }
}

static void a_sentencepiece_vocabulary_encodes(void **state)
{
    (void)state;
    static const char *const TOKENS[] = {"<unk>",
                                         "<s>",
                                         "</s>",
                                         "zz",
                                         "\xe2\x96\x81",
                                         "a",
                                         "b",
                                         "ab",
                                         "\xe2\x96\x81"
                                         "ab"};
    static const int32_t TYPES[] = {2, 3, 3, 1, 1, 1, 1, 1, 1};
    static const float SCORES[] = {0, 0, 0, 0, -4, -5, -6, -1, -2};
    struct file f;
    struct tokenizer *t = NULL;
    file_init(&f);
    set_text(&f, "tokenizer.ggml.model", "llama");
    set_texts(&f, "tokenizer.ggml.tokens", TOKENS, 9);
    set_numbers(&f, "tokenizer.ggml.token_type", GGUF_I32, TYPES, 9);
    set_numbers(&f, "tokenizer.ggml.scores", GGUF_F32, SCORES, 9);
    set_int(&f, "tokenizer.ggml.bos_token_id", 1);
    set_int(&f, "tokenizer.ggml.eos_token_id", 2);
    finish(&f, 3);
    struct gguf *g = parse(&f);
    if (gguf_tokenizer(&t, g, &e) != 0) {
        fail_msg("%s", e.text);
    }
    expect_ids(t, "ab bac", (const int32_t[]){1, 8, 4, 6, 5, 0}, 6);
    assert_int_equal(tokenizer_eos(t), 2);
    tokenizer_free(t);
    gguf_free(g);
    file_release(&f);
}

/* Gemma-4's: spaces are marked, merges know no words, what has no token is bytes. */
static void a_vocabulary_of_marked_spaces_encodes(void **state)
{
    (void)state;
    static const char *const OWN[] = {"\xe2\x96\x81",         "a",  "ab",  "b",
                                      "\xe2\x96\x81\x61\x62", "\n", "\n\n"};
    static const char *const MERGES[] = {"a b", "\xe2\x96\x81 ab", "\n \n"};
    enum { BYTES = 256, N_OWN = ARRAY_LEN(OWN), N = 1 + BYTES + N_OWN };
    const char *tokens[N] = {"<bos>"};
    int32_t types[N] = {3};
    char bytes[BYTES][8];
    struct file f;
    struct tokenizer *t = NULL;

    for (int i = 0; i < BYTES; i++) {
        snprintf(bytes[i], sizeof(bytes[i]), "<0x%02X>", i);
        tokens[1 + i] = bytes[i];
        types[1 + i] = 6;
    }
    for (int i = 0; i < N_OWN; i++) {
        tokens[1 + BYTES + i] = OWN[i];
        types[1 + BYTES + i] = 1;
    }
    file_init(&f);
    set_text(&f, "tokenizer.ggml.model", "gemma4");
    set_texts(&f, "tokenizer.ggml.tokens", tokens, N);
    set_texts(&f, "tokenizer.ggml.merges", MERGES, ARRAY_LEN(MERGES));
    set_numbers(&f, "tokenizer.ggml.token_type", GGUF_I32, types, N);
    set_int(&f, "tokenizer.ggml.bos_token_id", 0);
    finish(&f, 3);
    struct gguf *g = parse(&f);
    if (gguf_tokenizer(&t, g, &e) != 0) {
        fail_msg("%s", e.text);
    }
    expect_ids(t, "ab ab \xc3\xa9\n\n",
               (const int32_t[]){0, 259, 261, 257, 1 + 0xc3, 1 + 0xa9, 263}, 7);
    tokenizer_free(t);
    gguf_free(g);
    file_release(&f);
}

static void broken_vocabularies_are_refused(void **state)
{
    (void)state;
    static const char *const TOKENS[] = {"a", "b"}, *const MERGES[] = {"a c"};
    static const struct {
        const char *model, *pre, *words;
        bool merges;
        uint32_t bos;
    } CASES[] = {{"bert", "gpt-2", "'bert'; gpt2, llama and gemma4 are read", true, 0},
                 {"gpt2", "odd", "'odd' is not known; known are default", true, 0},
                 {"gpt2", "gpt-2", "merges is missing", false, 0},
                 {"gpt2", "gpt-2", "bos_token_id is 2", true, 2},
                 {"gpt2", "gpt-2", "not in the vocabulary", true, 0}};
    for (size_t i = 0; i < ARRAY_LEN(CASES); i++) {
        struct file f;
        struct tokenizer *t = NULL;
        file_init(&f);
        set_text(&f, "tokenizer.ggml.model", CASES[i].model);
        set_text(&f, "tokenizer.ggml.pre", CASES[i].pre);
        set_texts(&f, "tokenizer.ggml.tokens", TOKENS, 2);
        if (CASES[i].merges) {
            set_texts(&f, "tokenizer.ggml.merges", MERGES, 1);
        }
        set_int(&f, "tokenizer.ggml.bos_token_id", CASES[i].bos);
        finish(&f, 3);
        struct gguf *g = parse(&f);
        e = (struct err){0};
        int rc = gguf_tokenizer(&t, g, &e);
        if (rc >= 0 || !strstr(e.text, CASES[i].words)) {
            fail_msg("code %d, text '%s', expected '%s'", rc, e.text, CASES[i].words);
        }
        gguf_free(g);
        file_release(&f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_header_is_read),
        cmocka_unit_test(lying_headers_are_refused),
        cmocka_unit_test(lying_tensors_are_refused),
        cmocka_unit_test(cut_files_are_refused),
        cmocka_unit_test(block_formats_decode_as_their_layouts_say),
        cmocka_unit_test(block_formats_decode_as_the_reference_does),
        cmocka_unit_test(plain_floats_decode_exactly),
        cmocka_unit_test(values_are_rounded_to_the_type_asked_for),
        cmocka_unit_test(metadata_becomes_a_configuration),
        cmocka_unit_test(what_is_not_supported_is_refused),
        cmocka_unit_test(rows_of_q_go_back_to_their_places),
        cmocka_unit_test(gpt2_is_transposed_back),
        cmocka_unit_test(families_tensors_get_their_names),
        cmocka_unit_test(experts_become_tensors_of_their_own),
        cmocka_unit_test(gates_and_ups_in_one_tensor_are_two),
        cmocka_unit_test(a_byte_level_vocabulary_encodes),
        cmocka_unit_test(words_end_as_the_vocabularys_kind_says),
        cmocka_unit_test(a_sentencepiece_vocabulary_encodes),
        cmocka_unit_test(a_vocabulary_of_marked_spaces_encodes),
        cmocka_unit_test(broken_vocabularies_are_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
