/* Settings: every source, their precedence, and malformed input. */
#include "config/settings/settings.h"

#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cJSON.h>
#include <cmocka.h>

#include "config/base/limits.h"
#include "config/settings/settings_table.h"

enum { MAX_WORDS = 32 };

/* "a b c" as an argument vector; a word cannot hold a blank. */
static int words(char *text, char *out[MAX_WORDS])
{
    int n = 0;

    for (char *w = strtok(text, " "); w != NULL && n < MAX_WORDS - 1; w = strtok(NULL, " ")) {
        out[n++] = w;
    }
    out[n] = NULL;
    return n;
}

/* settings_load of flags and environment, both written as blank-separated words. */
static int load(struct settings *s, const char *flags, const char *environment, struct err *e)
{
    char f[2048], v[2048];
    char *argv[MAX_WORDS], *env[MAX_WORDS];
    bool help;

    snprintf(f, sizeof(f), "%s", flags);
    snprintf(v, sizeof(v), "%s", environment);
    words(v, env);
    int argc = words(f, argv);
    *e = (struct err){0};
    return settings_load(s, argc, argv, env, &help, e);
}

static void expect_error(const char *flags, const char *environment, const char *message)
{
    struct settings s;
    struct err e;
    int rc = load(&s, flags, environment, &e);

    if (rc == 0) {
        fail_msg("accepted: %s %s", flags, environment);
    }
    if (!strstr(e.text, message)) {
        fail_msg("'%s' does not contain '%s'", e.text, message);
    }
}

static char yaml_path[] = "/tmp/quire-test-settings-XXXXXX";

static const char *with_yaml(const char *text)
{
    FILE *f = fopen(yaml_path, "w");

    assert_non_null(f);
    fputs(text, f);
    fclose(f);
    static char flag[64];
    snprintf(flag, sizeof(flag), "--config=%s", yaml_path);
    return flag;
}

static int make_file(void **state)
{
    (void)state;
    int fd = mkstemp(yaml_path);
    return fd < 0 ? -1 : close(fd);
}

static int remove_file(void **state)
{
    (void)state;
    return unlink(yaml_path);
}

static void defaults_are_those_of_the_reference(void **state)
{
    (void)state;
    struct settings s;
    struct err e;
    assert_int_equal(load(&s, "--config none", "", &e), 0);
    assert_null(s.model);
    assert_string_equal(s.host, "127.0.0.1");
    assert_int_equal(s.port, 8000);
    assert_int_equal(s.block_size, 16);
    assert_int_equal(s.max_queue, 1024);
    assert_int_equal(s.max_connections, 10000);
    assert_int_equal(s.max_body_bytes, 8 << 20);
    assert_int_equal(s.swap_space, (int64_t)4 << 30);
    assert_true(s.gpu_memory_utilization == 0.9);
    assert_true(s.shutdown_timeout == 30 && s.step_timeout == 60);
    assert_true(s.queue_timeout == 0 && s.request_timeout == 0 && s.target_itl_ms == 0);
    assert_true(s.prefix_cache && s.ui && !s.log_prompts && !s.deterministic);
    assert_int_equal(s.max_logprobs, 20);
    assert_int_equal(s.seed, -1);
    assert_string_equal(s.metrics_prefix, "quire_");
    assert_string_equal(s.generation_config, "auto");
    assert_int_equal(s.device, DEVICE_AUTO);
    assert_int_equal(s.log_level, LOG_INFO);
    assert_int_equal(s.tensor_parallel_size, 1);
    assert_int_equal(s.n_api_keys, 0);
    settings_release(&s);
    settings_release(&s);
}

static void flags_in_every_spelling(void **state)
{
    (void)state;
    struct settings s;
    struct err e;
    assert_int_equal(load(&s,
                          "demo --config=none --port=9000 --max_num_seqs 8 --no-ui --log-prompts "
                          "--prefix-cache false "
                          "--deterministic true --swap-space 2 --kv-cache-memory 1.5GiB "
                          "--queue-timeout 2m --dtype half "
                          "--preemption-mode swap --num-gpu-blocks-override 77 --seed -1 "
                          "--shutdown-timeout 1500ms",
                          "", &e),
                     0);
    assert_string_equal(s.model, "demo");
    assert_int_equal(s.port, 9000);
    assert_int_equal(s.max_num_seqs, 8);
    assert_true(!s.ui && s.log_prompts && !s.prefix_cache && s.deterministic);
    assert_int_equal(s.swap_space, (int64_t)2 << 30);
    assert_int_equal(s.kv_cache_memory, (int64_t)3 << 29);
    assert_true(s.queue_timeout == 120 && s.shutdown_timeout == 1.5);
    assert_int_equal(s.dtype, DTYPE_FLOAT16);
    assert_int_equal(s.preemption, PREEMPT_SWAP);
    assert_int_equal(s.kv_blocks, 77);
    settings_release(&s);
    assert_int_equal(
        load(&s, "--config none --no-enable-prefix-caching --ui demo --port 1 --port 2", "", &e),
        0);
    assert_true(!s.prefix_cache && s.ui);
    assert_string_equal(s.model, "demo");
    assert_int_equal(s.port, 2);
    settings_release(&s);
}

static void a_switch_is_on_off_or_left_to_the_program(void **state)
{
    (void)state;
    static const struct {
        const char *flags, *env;
        int value;
    } CASES[] = {{"demo", "", SWITCH_AUTO},
                 {"--expert-parallel demo", "", SWITCH_ON},
                 {"--enable-expert-parallel", "", SWITCH_ON},
                 {"--no-expert-parallel demo", "", SWITCH_OFF},
                 {"--expert-parallel=no demo", "", SWITCH_OFF},
                 {"--expert-parallel False demo", "", SWITCH_OFF},
                 {"--expert-parallel auto demo", "QUIRE_EXPERT_PARALLEL=true", SWITCH_AUTO},
                 {"demo", "QUIRE_EXPERT_PARALLEL=1", SWITCH_ON}};

    for (size_t i = 0; i < ARRAY_LEN(CASES); i++) {
        struct settings s;
        struct err e;
        char flags[128];
        snprintf(flags, sizeof(flags), "--config=none %s", CASES[i].flags);
        assert_int_equal(load(&s, flags, CASES[i].env, &e), 0);
        assert_int_equal(s.expert_parallel, CASES[i].value);
        settings_release(&s);
    }
    expect_error("--config=none --expert-parallel=maybe", "",
                 "--expert-parallel: 'maybe' is not true, false or auto");
}

static void flag_beats_environment_beats_file_beats_default(void **state)
{
    (void)state;
    struct settings s;
    struct err e;
    char flags[256];
    const char *config = with_yaml("port: 1\nmax-queue: 11\nmax_num_seqs: 21\nhost: ::1\n");
    snprintf(flags, sizeof(flags), "%s --max-num-seqs 23", config);
    assert_int_equal(load(&s, flags, "QUIRE_MAX_QUEUE=12 QUIRE_MAX_NUM_SEQS=22", &e), 0);
    assert_int_equal(s.port, 1);
    assert_int_equal(s.max_queue, 12);
    assert_int_equal(s.max_num_seqs, 23);
    assert_string_equal(s.host, "::1");
    assert_int_equal(s.block_size, 16);

    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    settings_print(&s, out);
    fclose(out);
    assert_non_null(strstr(text, "\nport: 1  # from /tmp/quire-test-settings-"));
    assert_non_null(strstr(text, "\nmax_queue: 12  # from QUIRE_MAX_QUEUE\n"));
    assert_non_null(strstr(text, "\nmax_num_seqs: 23  # from --max-num-seqs\n"));
    assert_non_null(strstr(text, "\nblock_size: 16  # default\n"));
    free(text);
    settings_release(&s);
}

static void the_file_may_be_named_by_the_environment(void **state)
{
    (void)state;
    struct settings s;
    struct err e;
    char env[128];
    with_yaml("port: 77\n");
    snprintf(env, sizeof(env), "QUIRE_CONFIG=%s", yaml_path);
    assert_int_equal(load(&s, "", env, &e), 0);
    assert_int_equal(s.port, 77);
    assert_string_equal(s.config, yaml_path);
    settings_release(&s);
    expect_error("--config /nonexistent/x.yaml", "",
                 "'/nonexistent/x.yaml' cannot be opened: No such file");
    expect_error("--config /tmp", "", "cannot be read: Is a directory");
}

static void keys_come_from_all_places_and_never_go_out(void **state)
{
    (void)state;
    struct settings s;
    struct err e;
    assert_int_equal(load(&s, "--config none", "QUIRE_API_KEY=one,two", &e), 0);
    assert_int_equal(s.n_api_keys, 2);
    assert_string_equal(s.api_key[1], "two");
    settings_release(&s);
    char flags[256];
    snprintf(flags, sizeof(flags), "%s --api-key secret-a --api-key b,c",
             with_yaml("api_key: [x, y]\n"));
    assert_int_equal(load(&s, flags, "QUIRE_API_KEY=one", &e), 0);
    assert_int_equal(s.n_api_keys, 2);
    assert_string_equal(s.api_key[1], "b,c");
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    settings_print(&s, out);
    fclose(out);
    assert_null(strstr(text, "secret"));
    assert_non_null(strstr(text, "api_key: [\"***\", \"***\"]  # from --api-key\n"));
    free(text);
    settings_release(&s);

    assert_int_equal(load(&s, with_yaml("api_key: x\n"), "", &e), 0);
    assert_int_equal(s.n_api_keys, 1);
    settings_release(&s);
    expect_error("--config none", "QUIRE_API_KEY=", "QUIRE_API_KEY: a key is empty");
    expect_error("--config none", "QUIRE_API_KEY=a,,b", "a key is empty");
    expect_error("--config none --api-key=", "", "--api-key: a key is empty");
}

static void wrong_flags(void **state)
{
    (void)state;
    expect_error("--prot 1", "", "--prot is not a flag; the nearest is --port");
    expect_error("--max-num-sequences=1", "", "the nearest is --max-num-seqs");
    expect_error("--no-port", "", "--no-port is not a flag");
    expect_error("--no-ui=true", "", "takes no value");
    expect_error("--", "", "is not a flag");
    expect_error("--=3", "", "is not a flag");
    expect_error("-p 3", "", "flags begin with two dashes");
    expect_error("--port", "", "--port: a value must follow");
    expect_error("--port --ui", "", "--port: a value must follow");
    expect_error("a b", "", "'b': only one MODEL is allowed, and 'a' was given before");
    expect_error("--prefixes x", "", "only be given in the YAML file");
    char big[600] = "--";
    memset(big + 2, 'x', 500);
    expect_error(big, "", "is not a flag; the nearest is");
}

static void wrong_values(void **state)
{
    (void)state;
    static const char *const bad[][2] = {
        {"--port 65536", "--port: '65536' is out of range; allowed: 0 to 65535"},
        {"--port -1", "out of range"},
        {"--port 80x", "not a whole number"},
        {"--port 8e3", "not a whole number"},
        {"--port=", "not a whole number"},
        {"--port 99999999999999999999", "out of range"},
        {"--seed 9223372036854775808", "out of range; allowed: -1 to 2^63 - 1"},
        {"--block-size 0", "allowed: 1 to 256"},
        {"--max-body-bytes 8Mi", "the unit is one of"},
        {"--max-body-bytes big", "a size such as"},
        {"--max-body-bytes 1", "allowed: 1KiB to 1GiB"},
        {"--max-body-bytes nan", "a size such as"},
        {"--swap-space -1", "out of range"},
        {"--swap-space 1e300TiB", "out of range"},
        {"--swap-space 0x10", "a size such as"},
        {"--gpu-memory-utilization 1.01", "allowed: 0.01 to 1"},
        {"--gpu-memory-utilization inf", "a finite number"},
        {"--gpu-memory-utilization nan", "a finite number"},
        {"--gpu-memory-utilization 1e999", "a finite number"},
        {"--gpu-memory-utilization 0.9x", "a finite number"},
        {"--shutdown-timeout 1d", "the unit is one of ms, s, m, h"},
        {"--shutdown-timeout 25h", "out of range"},
        {"--ui=maybe", "--ui: 'maybe' is not true or false"},
        {"--device tpu", "'tpu' is not one of auto, cpu, cuda"},
        {"--device CPU", "is not one of"},
        {"--generation-config maybe", "is not one of auto, none"},
        {"--metrics-prefix 1a", "a metric prefix"},
        {"--metrics-prefix a-b", "a metric prefix"},
        {"--max-logprobs 21", "allowed: 0 to 20"},
        {"--host=", "--host: the value is empty"},
        {"--ssl-certfile a", "ssl_keyfile is missing"},
        {"--ssl-keyfile a", "ssl_certfile is missing"},
        {"--max-num-seqs 8 --max-num-batched-tokens 4", "less than max_num_seqs, 8"},
    };
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        char flags[256];
        snprintf(flags, sizeof(flags), "--config none %s", bad[i][0]);
        expect_error(flags, "", bad[i][1]);
    }
    char name[400];
    snprintf(name, sizeof(name), "--config none --served-model-name %0300d", 1);
    expect_error(name, "", "at most 256 bytes");
    expect_error("--config none --uds a\x01"
                 "b",
                 "", "control character");
}

static void the_environment_is_checked_too(void **state)
{
    (void)state;
    struct settings s;
    struct err e;
    expect_error("--config none", "QUIRE_PORT=http", "QUIRE_PORT: 'http' is not a whole number");
    expect_error("--config none", "QUIRE_UI=", "QUIRE_UI: '' is not true or false");
    assert_int_equal(load(&s, "--config none",
                          "QUIRE_PORT=tcp://10.0.0.1:80 QUIRE_SERVICE_HOST=10.0.0.1 PORT=1 "
                          "QUIRE_MAX_QUEUE QUIRE_CORS_ORIGINS= "
                          "QUIRE_ENABLE_PREFIX_CACHING=0",
                          &e),
                     0);
    assert_int_equal(s.port, 8000);
    assert_true(s.kubernetes_port);
    assert_int_equal(s.max_queue, 1024);
    assert_null(s.cors_origins);
    assert_false(s.prefix_cache);
    settings_release(&s);
}

static void yaml_in_its_forms(void **state)
{
    (void)state;
    struct settings s;
    struct err e;
    const char *config =
        with_yaml("# comment\n---\nmodel: /srv/m\nmax-num-seqs: '4'\nui: off\nuds: ~\nhost:\n"
                  "swap_space: 1GiB\nlog_level: warning\nenable_prefix_caching: false\n"
                  "prefixes:\n  - You are a helpful assistant.\n  - {text: \"two\\nlines\"}\n  - "
                  "&a x\n  - *a\n");
    assert_int_equal(load(&s, config, "", &e), 0);
    assert_string_equal(s.model, "/srv/m");
    assert_int_equal(s.max_num_seqs, 4);
    assert_false(s.ui);
    assert_null(s.uds);
    assert_string_equal(s.host, "127.0.0.1");
    assert_int_equal(s.log_level, LOG_WARN);
    assert_int_equal(s.n_prefixes, 4);
    assert_string_equal(s.prefixes[1].text, "two\nlines");
    assert_string_equal(s.prefixes[3].text, "x");
    settings_release(&s);
    const char *empty[] = {"",     "# only a comment\n", "---\n",         "~\n",
                           "{}\n", "prefixes: one\n",    "prefixes: []\n"};
    for (size_t i = 0; i < ARRAY_LEN(empty); i++) {
        assert_int_equal(load(&s, with_yaml(empty[i]), "", &e), 0);
        settings_release(&s);
    }
}

static void malformed_yaml(void **state)
{
    (void)state;
    static const char *const bad[][2] = {
        {"port: 1\nprot: 2\n", "line 2: prot is not a setting; the nearest is 'port'"},
        {"port: 1\nport: 2\n", "line 2: port: set twice"},
        {"prefix_cache: true\nenable_prefix_caching: true\n", "set twice"},
        {"port: [1]\n", "line 1: port: a single value is required"},
        {"port: {a: 1}\n", "a single value is required"},
        {"port: eighty\n", "line 1: port: 'eighty' is not a whole number"},
        {"config: other.yaml\n", "cannot name another"},
        {"- a\n- b\n", "the file must be a mapping"},
        {"just text\n", "the file must be a mapping"},
        {"? [a]\n: b\n", "a key must be the name of a setting"},
        {"port: 1\n---\nport: 2\n", "more than one document"},
        {"port: 1\n--- {a: 1}\n", "more than one document"},
        {"port: \"1\n", "is not valid YAML"},
        {"port: 1\n\thost: x\n", "is not valid YAML"},
        {"{{{{", "is not valid YAML"},
        {"a: *b\n", "is not valid YAML"},
        {"host: \"a\\0b\"\n", "NUL character"},
        {"\"po\\0rt\": 1\n", "a key must be the name of a setting"},
        {"host: \xff\xfe\n", "is not valid YAML"},
        {"prefixes: [{txt: a}]\n", "one key 'text'"},
        {"prefixes: [{text: a, more: b}]\n", "one key 'text'"},
        {"prefixes: [{text: [a]}]\n", "a single value is required"},
        {"prefixes: [{[a]: b}]\n", "one key 'text'"},
        {"prefixes: [[a]]\n", "a single value is required"},
        {"prefixes: [a, '']\n", "an entry is empty"},
        {"prefixes: {text: a}\n", "a single value is required"},
        {"api_key: [a, {b: c}]\n", "a single value is required"},
        {"api_key: ''\n", "a key is empty"},
    };
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        expect_error(with_yaml(bad[i][0]), "", bad[i][1]);
    }
}

static void large_files_are_refused(void **state)
{
    (void)state;
    FILE *f = fopen(yaml_path, "w");
    for (size_t i = 0; i <= LIMIT_YAML_BYTES / 16; i++) {
        fputs("# fifteen bytes\n", f);
    }
    fclose(f);
    char flag[64];
    snprintf(flag, sizeof(flag), "--config=%s", yaml_path);
    expect_error(flag, "", "is larger than 1048576 bytes");
    f = fopen(yaml_path, "w");
    for (int i = 0; i < 20000; i++) {
        fputc('[', f);
    }
    fclose(f);
    expect_error(flag, "", "is not valid YAML");
    f = fopen(yaml_path, "w");
    fputs("prefixes:\n", f);
    for (int i = 0; i <= LIMIT_PREFIXES; i++) {
        fputs(" - x\n", f);
    }
    fclose(f);
    expect_error(flag, "", "more than 256 entries");
}

static void what_is_printed_reads_back_the_same(void **state)
{
    (void)state;
    struct settings s, again;
    struct err e;
    const char *config = with_yaml(
        "model: \"a b \\\" \xC3\xA9 \\\\\"\nswap_space: 3\nprefixes: [\"p\\n: q\", '# r']\n"
        "target_itl_ms: 12.5\nseed: 9223372036854775807\nmetrics_prefix: 'vllm:'\n");
    assert_int_equal(load(&s, config, "", &e), 0);
    char *text = NULL, *text_again = NULL;
    size_t size = 0, size_again = 0;
    FILE *out = open_memstream(&text, &size);
    settings_print(&s, out);
    fclose(out);
    if (load(&again, with_yaml(text), "", &e) < 0) {
        fail_msg("%s in\n%s", e.text, text);
    }
    out = open_memstream(&text_again, &size_again);
    settings_print(&again, out);
    fclose(out);
    /* equal but for the origins */
    for (const char *line = text, *other = text_again; *line != '\0';) {
        size_t len = (size_t)(strstr(line, "  # ") - line);
        assert_memory_equal(line, other, len);
        line = strchr(line, '\n') + 1;
        other = strchr(other, '\n') + 1;
    }
    free(text);
    free(text_again);
    settings_release(&s);
    settings_release(&again);
}

/* The flags with which a worker process is started. */
static void what_is_passed_on_reads_back_without_keys(void **state)
{
    (void)state;
    struct settings s, again;
    struct err e;
    bool help;
    char **flags, *none[] = {NULL};
    char *argv[] = {"--config=none",
                    "--dtype=float16",
                    "--kv-cache-memory=1000",
                    "--swap-space=3",
                    "--deterministic",
                    "--step-timeout=1.5",
                    "--api-key=hush",
                    "--log-format=json",
                    "--max-num-seqs=7",
                    "--model=elsewhere",
                    "--cors-origins=secret",
                    "--served-model-name=a 'name' #1",
                    "--speculative-config={\"model\": \"a/head\", \"num_speculative_tokens\": 3}"};
    if (settings_load(&s, ARRAY_LEN(argv), argv, none, &help, &e) < 0) {
        fail_msg("%s", e.text);
    }
    assert_int_equal(settings_pass_on(&flags, &s, "/models/a b", "/models/a head", &e), 0);
    int n = 0;
    for (; flags[n]; n++) {
        assert_null(strstr(flags[n], "hush"));
        assert_null(strstr(flags[n], "secret"));
    }
    if (settings_load(&again, n, flags, none, &help, &e) < 0) {
        fail_msg("%s", e.text);
    }
    assert_string_equal(again.model, "/models/a b");
    assert_string_equal(again.draft_model, "/models/a head");
    assert_int_equal(again.speculate, SPECULATE_DRAFT);
    assert_int_equal(again.max_draft, 3);
    assert_null(again.speculative_config);
    assert_string_equal(again.served_model_name, "a 'name' #1");
    assert_int_equal(again.dtype, DTYPE_FLOAT16);
    assert_int_equal(again.kv_cache_memory, 1000);
    assert_int_equal(again.swap_space, INT64_C(3) << 30);
    assert_true(again.deterministic);
    assert_true(again.step_timeout == 1.5);
    assert_int_equal(again.log_format, LOG_JSON);
    assert_int_equal(again.max_num_seqs, 7);
    assert_int_equal(again.n_api_keys, 0);
    settings_pass_on_free(flags);
    settings_release(&again);
    settings_release(&s);
}

static void help_and_reference_name_every_setting(void **state)
{
    (void)state;
    struct settings s = {0};
    struct err e;
    char *flag[] = {"--port", "x", "--help", NULL}, *text = NULL, *table = NULL;
    size_t size = 0;
    bool help = false;
    assert_int_equal(settings_load(&s, 3, flag, NULL, &help, &e), 0);
    assert_true(help);
    FILE *out = open_memstream(&text, &size);
    settings_help(out);
    fclose(out);
    out = open_memstream(&table, &size);
    settings_list(out);
    fclose(out);
    for (int i = 0; i < setting_count; i++) {
        char name[80];
        snprintf(name, sizeof(name), "{\"key\": \"%s\", ", setting_table[i].key);
        assert_non_null(strstr(table, name));
        snprintf(name, sizeof(name), "%s", setting_table[i].key);
        for (char *c = name; *c != '\0'; c++) {
            *c = *c == '_' ? '-' : *c;
        }
        if (setting_table[i].type != SETTING_PREFIXES) {
            assert_non_null(strstr(text, name));
        }
        assert_true(strlen(setting_table[i].help) > 0 && strlen(setting_table[i].key) < 48);
    }
    assert_non_null(strstr(table, "\"flag\": \"--kv-blocks\", \"env\": \"QUIRE_KV_BLOCKS\", "
                                  "\"alias\": \"--num-gpu-blocks-override\", \"metavar\": \"N\", "
                                  "\"default\": \"0\", \"choices\": [], "));
    cJSON *list = cJSON_Parse(table);
    assert_int_equal(cJSON_GetArraySize(list), setting_count);
    cJSON_Delete(list);
    free(text);
    free(table);
}

/* config/quire.yaml, which `make install` puts into /etc, as it is and with all
 * settings uncommented. */
static void the_shipped_file_shows_every_default(void **state)
{
    (void)state;
    struct settings s;
    struct err e;
    static char text[32768], open_text[32768];
    FILE *f = fopen("config/quire.yaml", "r");
    assert_non_null(f);
    text[fread(text, 1, sizeof(text) - 1, f)] = '\0';
    fclose(f);
    size_t n = 0;
    for (const char *c = text; *c != '\0'; c++) {
        if (*c != '#' || (c != text && c[-1] != '\n') || (c[1] == ' ' && c[2] != ' ') ||
            c[1] == '#') {
            open_text[n++] = *c;
        }
    }
    assert_int_equal(load(&s, "--config config/quire.yaml", "", &e), 0);
    settings_release(&s);
    if (load(&s, with_yaml(open_text), "", &e) < 0) {
        fail_msg("%s", e.text);
    }
    for (int i = 0; i < setting_count; i++) {
        const struct setting *row = &setting_table[i];
        char line[128];
        snprintf(line, sizeof(line), "\n#%s:%s%s", row->key, !row->preset ? "" : " ",
                 !row->preset ? "" : row->preset);
        if (strcmp(row->key, "config") != 0 && !strstr(text, line)) {
            fail_msg("config/quire.yaml lacks the line '%s'", line + 1);
        }
    }
    assert_int_equal(s.n_prefixes, 1);
    settings_release(&s);
}

static void a_draft_model_must_be_wanted(void **state)
{
    (void)state;
    struct settings s;
    struct err e;
    assert_int_equal(load(&s, "--config none --speculate auto --draft-model small", "", &e), 0);
    settings_release(&s);
    expect_error("--config none --speculate draft", "", "needs a draft_model");
    expect_error("--config none --speculate suffix --draft-model small", "",
                 "speculate is neither draft nor auto");
    expect_error("--config none --speculate draft --draft-model small --pipeline-parallel-size 2",
                 "", "draft_model: a model in stages has no draft model or head");
    expect_error("--config none --speculate mtp --pipeline-parallel-size 2", "",
                 "speculate: a model in stages has no draft model or head");
}

static int load_method(struct settings *s, const char *method, struct err *e)
{
    char args[160];

    snprintf(args, sizeof(args), "--config none --speculative-config {\"method\":\"%s\"}", method);
    return load(s, args, "", e);
}

/* All that vLLM has. */
static void every_vllm_method_is_taken_or_refused_by_name(void **state)
{
    (void)state;
    static const char *const TEXT[] = {"ngram", "ngram_gpu", "suffix"};
    static const char *const HEAD[] = {
        "mtp",        "deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "qwen3_next_mtp",
        "qwen3_5_mtp"};
    static const char *const REFUSED[] = {
        "eagle",       "medusa",         "mlp_speculator",      "extract_hidden_states",
        "dflash",      "dspark",         "custom_class",        "dots3_note_mtp",
        "mimo_mtp",    "mimo_v2_mtp",    "glm_ocr_mtp",         "ernie_mtp",
        "hy_v3_mtp",   "nemotron_h_mtp", "exaone_moe_mtp",      "exaone4_5_mtp",
        "hy_v4_mtp",   "step3p5_mtp",    "longcat_flash_mtp",   "bailing_hybrid_v3_mtp",
        "gemma4_mtp",  "minimax_m3_mtp", "bailing_hybrid_mtp",  "kimi_k3_mtp",
        "inkling_mtp", "glm5_next_mtp",  "pangu_ultra_moe_mtp", "unheard_of"};
    struct settings s;
    struct err e;

    for (size_t i = 0; i < ARRAY_LEN(TEXT) + ARRAY_LEN(HEAD); i++) {
        bool head = i >= ARRAY_LEN(TEXT);
        assert_int_equal(load_method(&s, head ? HEAD[i - ARRAY_LEN(TEXT)] : TEXT[i], &e), 0);
        assert_int_equal(s.speculate, head ? SPECULATE_MTP : SPECULATE_SUFFIX);
        settings_release(&s);
    }
    for (size_t i = 0; i < ARRAY_LEN(REFUSED); i++) {
        char why[80];
        assert_int_equal(load_method(&s, REFUSED[i], &e), ERR_UNSUPPORTED);
        snprintf(why, sizeof(why), "the method %s is not there", REFUSED[i]);
        assert_non_null(strstr(e.text, why));
    }
}

static void vllm_speculative_config_is_read(void **state)
{
    (void)state;
    struct settings s;
    struct err e;
    assert_int_equal(load(&s, "--config none", "", &e), 0);
    assert_int_equal(s.speculate, SPECULATE_OFF);
    settings_release(&s);
    assert_int_equal(load(&s,
                          "--config none --speculative-config "
                          "{\"method\":\"ngram\",\"num_speculative_tokens\":5,"
                          "\"prompt_lookup_max\":4}",
                          "", &e),
                     0);
    assert_int_equal(s.speculate, SPECULATE_SUFFIX);
    assert_int_equal(s.max_draft, 5);
    settings_release(&s);
    assert_int_equal(load(&s, "--config none --speculative-config {\"method\":\"mtp\"}", "", &e),
                     0);
    assert_int_equal(s.speculate, SPECULATE_MTP);
    settings_release(&s);
    assert_int_equal(load(&s,
                          "--config none --speculative-config "
                          "{\"method\":\"eagle3\",\"model\":\"head\"}",
                          "", &e),
                     0);
    assert_int_equal(s.speculate, SPECULATE_DRAFT);
    assert_string_equal(s.draft_model, "head");
    settings_release(&s);
    expect_error("--config none --speculative-config {\"method\":\"eagle3\"}", "", "needs a model");
    expect_error("--config none --speculative-config {\"method\":\"medusa\"}", "",
                 "the method medusa is not there");
    expect_error("--config none --draft-model x --speculate mtp", "",
                 "speculate is neither draft nor auto");
    expect_error("--config none --speculative-config {\"num_speculative_tokens\":5}", "",
                 "names no method");
    expect_error(
        "--config none --speculative-config {\"method\":\"ngram\",\"num_speculative_tokens\":33}",
        "", "allowed are 1 to 32");
    expect_error("--config none --speculative-config {\"method\":\"ngram\",\"model\":\"x\"}", "",
                 "the method ngram has no model");
    expect_error("--config none --speculative-config {\"method\":\"draft_model\"}", "",
                 "needs a model");
    expect_error("--config none --speculative-config {\"draft\":\"x\"}", "",
                 "\"draft\" is not known here");
    assert_int_equal(load(&s,
                          "--config none --speculative-config "
                          "{\"model\":\"small\",\"num_speculative_tokens\":3}",
                          "", &e),
                     0);
    assert_int_equal(s.speculate, SPECULATE_DRAFT);
    assert_string_equal(s.draft_model, "small");
    assert_int_equal(s.max_draft, 3);
    settings_release(&s);
    expect_error("--config none --speculative-config ngram", "", "speculative_config");
    expect_error("--config none --max-draft 33", "", "max-draft");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_are_those_of_the_reference),
        cmocka_unit_test(flags_in_every_spelling),
        cmocka_unit_test(a_switch_is_on_off_or_left_to_the_program),
        cmocka_unit_test(flag_beats_environment_beats_file_beats_default),
        cmocka_unit_test(the_file_may_be_named_by_the_environment),
        cmocka_unit_test(keys_come_from_all_places_and_never_go_out),
        cmocka_unit_test(wrong_flags),
        cmocka_unit_test(wrong_values),
        cmocka_unit_test(the_environment_is_checked_too),
        cmocka_unit_test(yaml_in_its_forms),
        cmocka_unit_test(malformed_yaml),
        cmocka_unit_test(large_files_are_refused),
        cmocka_unit_test(what_is_printed_reads_back_the_same),
        cmocka_unit_test(what_is_passed_on_reads_back_without_keys),
        cmocka_unit_test(help_and_reference_name_every_setting),
        cmocka_unit_test(the_shipped_file_shows_every_default),
        cmocka_unit_test(every_vllm_method_is_taken_or_refused_by_name),
        cmocka_unit_test(vllm_speculative_config_is_read),
        cmocka_unit_test(a_draft_model_must_be_wanted),
    };

    return cmocka_run_group_tests(tests, make_file, remove_file);
}
