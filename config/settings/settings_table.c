/* The settings, one row each. Order is the order of --help and of the README. */
#include "config/settings/settings_table.h"

#include <assert.h>
#include <string.h>

#include "config/base/limits.h"

static const struct setting_choice DEVICES[] = {
    {"auto", DEVICE_AUTO}, {"cpu", DEVICE_CPU}, {"cuda", DEVICE_CUDA}, {0}};
static const struct setting_choice DTYPES[] = {{"auto", DTYPE_AUTO},
                                               {"bfloat16", DTYPE_BFLOAT16},
                                               {"float16", DTYPE_FLOAT16},
                                               {"float32", DTYPE_FLOAT32},
                                               {"half", DTYPE_FLOAT16},
                                               {"float", DTYPE_FLOAT32},
                                               {0}};
static const struct setting_choice LOAD_FORMATS[] = {{"auto", LOAD_AUTO},
                                                     {"safetensors", LOAD_SAFETENSORS},
                                                     {"gguf", LOAD_GGUF},
                                                     {"dummy", LOAD_DUMMY},
                                                     {0}};
static const struct setting_choice GENERATION_CONFIGS[] = {{"auto", 0}, {"none", 1}, {0}};
static const struct setting_choice PREEMPTIONS[] = {
    {"auto", PREEMPT_AUTO}, {"swap", PREEMPT_SWAP}, {"recompute", PREEMPT_RECOMPUTE}, {0}};
static const struct setting_choice POLICIES[] = {
    {"fcfs", POLICY_FCFS}, {"priority", POLICY_PRIORITY}, {"fair", POLICY_FAIR}, {0}};
static const struct setting_choice KV_POLICIES[] = {{"paged", KV_PAGED},
                                                    {"orca-max", KV_ORCA_MAX},
                                                    {"orca-pow2", KV_ORCA_POW2},
                                                    {"orca-oracle", KV_ORCA_ORACLE},
                                                    {0}};
static const struct setting_choice UNKNOWN_FIELDS[] = {
    {"warn", UNKNOWN_WARN}, {"reject", UNKNOWN_REJECT}, {0}};
static const struct setting_choice LOG_FORMATS[] = {{"text", LOG_TEXT}, {"json", LOG_JSON}, {0}};
static const struct setting_choice ACCESS_LOGS[] = {
    {"all", ACCESS_ALL}, {"errors", ACCESS_ERRORS}, {"none", ACCESS_NONE}, {0}};
static const struct setting_choice PREFIX_CACHE_SCOPES[] = {
    {"key", PREFIX_CACHE_KEY}, {"server", PREFIX_CACHE_SERVER}, {0}};
static const struct setting_choice LOG_LEVELS[] = {{"debug", LOG_DEBUG},  {"info", LOG_INFO},
                                                   {"warn", LOG_WARN},    {"error", LOG_ERROR},
                                                   {"warning", LOG_WARN}, {0}};

#define KIB 1024.0
#define MIB (1024.0 * KIB)
#define GIB (1024.0 * MIB)
#define TIB (1024.0 * GIB)
#define DAY_S 86400.0

#define AT(name) .key = #name, .offset = offsetof(struct settings, name)
#define STRING(name, preset_) AT(name), .type = SETTING_STRING, .preset = preset_
#define INT(name, preset_, min_, max_) \
    AT(name), .type = SETTING_INT, .preset = preset_, .min = min_, .max = max_
#define BYTES(name, preset_, min_, max_) \
    AT(name), .type = SETTING_BYTES, .preset = preset_, .min = min_, .max = max_
#define FLOAT(name, preset_, min_, max_) \
    AT(name), .type = SETTING_FLOAT, .preset = preset_, .min = min_, .max = max_
#define SECONDS(name, preset_, min_, max_) \
    AT(name), .type = SETTING_SECONDS, .preset = preset_, .min = min_, .max = max_
#define BOOL(name, preset_) AT(name), .type = SETTING_BOOL, .preset = preset_
#define CHOICE(name, preset_, choice_) \
    AT(name), .type = SETTING_CHOICE, .preset = preset_, .choice = choice_

/* clang-format off */
const struct setting setting_table[] = {
    {STRING(model, NULL), .metavar = "DIR", .group = "Model",
     .help = "Hugging Face directory, GGUF file, or hub name (org/name[@revision], downloaded "
             "when it is not in the cache); null serves an executor that answers at once; "
             "without one the bundled model is served"},
    {STRING(served_model_name, NULL), .metavar = "NAME", .group = "Model",
     .help = "name that clients see; else the directory's or hub name"},
    {CHOICE(device, "auto", DEVICES), .group = "Model",
     .help = "where the model runs; auto takes a GPU when one is usable"},
    {CHOICE(dtype, "auto", DTYPES), .group = "Model",
     .help = "type of the weights; auto keeps them as stored"},
    {CHOICE(load_format, "auto", LOAD_FORMATS), .group = "Model",
     .help = "how weights are stored; dummy makes random ones"},
    {STRING(generation_config, "auto"), .choice = GENERATION_CONFIGS, .group = "Model",
     .help = "whether the model's generation_config.json gives defaults for temperature, top_p "
             "and the like"},
    {INT(max_model_len, "0", 0, LIMIT_MODEL_LEN), .metavar = "TOKENS", .group = "Model",
     .help = "longest prompt and answer together; 0: the model's, or what the pool holds"},

    {INT(max_num_seqs, "0", 0, LIMIT_NUM_SEQS), .metavar = "N", .group = "Scheduling",
     .help = "sequences that run at once; 0: 1024 on a GPU, 64 on a CPU"},
    {INT(max_num_batched_tokens, "0", 0, LIMIT_BATCHED_TOKENS), .metavar = "TOKENS",
     .group = "Scheduling",
     .help = "tokens computed in one step; 0: 8192 on a GPU, 512 on a CPU"},
    {FLOAT(target_itl_ms, "0", -1, 60000), .metavar = "MS", .group = "Scheduling",
     .help = "time between tokens that prefill may not push a step beyond; 0: 54 on a GPU (11 "
             "for whole steps while keys share it, with policy fair), none on a CPU (50 with "
             "policy fair); -1: none"},
    {CHOICE(preemption, "auto", PREEMPTIONS), .alias = "preemption_mode", .group = "Scheduling",
     .help = "what happens to the newest group when blocks run out; auto takes the cheaper"},
    {CHOICE(policy, "fcfs", POLICIES), .alias = "scheduling_policy", .group = "Scheduling",
     .help = "first come first served; by the request's priority; or fair shares of tokens among "
             "API keys"},
    {BOOL(deterministic, "false"), .group = "Scheduling",
     .help = "the same tokens bit for bit whatever else is in the batch; slower"},
    {INT(seed, "-1", -1, 0x1p63), .metavar = "N", .group = "Scheduling",
     .help = "seed of requests that bring none; -1: random"},
    {INT(tensor_parallel_size, "1", 1, 64), .metavar = "N", .group = "Scheduling",
     .help = "processes that share each layer, on as many GPUs or on the CPU"},
    {INT(pipeline_parallel_size, "1", 1, 64), .metavar = "N", .group = "Scheduling",
     .help = "stages that hold a part of the layers each; each is tensor_parallel_size processes"},
    {INT(threads, "0", 0, 1024), .metavar = "N", .group = "Scheduling",
     .help = "CPU threads that compute, of all ranks together; 0: physical cores"},

    {INT(nnodes, "1", 1, 64), .metavar = "N", .group = "Nodes",
     .help = "machines that share the model, each with as many of its ranks; all get the same "
             "settings but for node_rank"},
    {INT(node_rank, "0", 0, 63), .metavar = "N", .group = "Nodes",
     .help = "which of the nnodes this is; 0 answers requests"},
    {STRING(master_addr, NULL), .metavar = "ADDRESS", .group = "Nodes",
     .help = "where node 0 is reached by the others"},
    {INT(master_port, "29500", 1, 65535), .metavar = "PORT", .group = "Nodes",
     .help = "TCP port of node 0 for the other nodes; for the cluster's own network, it asks for "
             "no key"},
    {SECONDS(node_timeout, "300", 0.1, DAY_S), .metavar = "SECONDS", .group = "Nodes",
     .help = "how long nodes wait for each other at start"},
    {INT(local_rank, "0", 0, 63), .metavar = "N", .group = "Nodes",
     .help = "where several of the nnodes are one machine: which of them this is there"},
    {INT(local_size, "1", 1, 64), .metavar = "N", .group = "Nodes",
     .help = "how many of the nnodes are this machine"},

    {INT(block_size, "16", 1, 256), .metavar = "TOKENS", .group = "Memory",
     .help = "tokens of one KV block"},
    {INT(kv_blocks, "0", 0, INT32_MAX), .alias = "num_gpu_blocks_override", .metavar = "N",
     .group = "Memory",
     .help = "KV blocks; 0: from memory"},
    {BYTES(kv_cache_memory, "0", 0, 1024 * TIB), .alias = "kv_cache_memory_bytes",
     .metavar = "SIZE", .group = "Memory",
     .help = "memory of the KV blocks of a rank; 0: by gpu-memory-utilization, on a CPU 2 GiB or "
             "a quarter of its free memory"},
    {CHOICE(kv_policy, "paged", KV_POLICIES), .group = "Memory",
     .help = "to measure paging against: admit as if each sequence needed contiguous room for "
             "its whole life (the model's length, the next power of two of its answer, or "
             "exactly its answer), with no cached prefixes"},
    {FLOAT(gpu_memory_utilization, "0.9", 0.01, 1), .metavar = "PART", .group = "Memory",
     .help = "part of the GPU's memory that may be used"},
    {BYTES(swap_space, "4GiB", 0, 64 * TIB), .metavar = "SIZE", .group = "Memory",
     .gib_without_unit = true,
     .help = "host memory for swapped-out blocks; a number below 1024 without a unit is in GiB"},
    {BOOL(prefix_cache, "true"), .alias = "enable_prefix_caching", .group = "Memory",
     .help = "requests share the blocks of equal beginnings"},
    {AT(prefixes), .type = SETTING_PREFIXES, .group = "Memory",
     .help = "list of texts that are computed at start and stay in the cache (YAML only)"},

    {STRING(host, "127.0.0.1"), .metavar = "ADDRESS", .group = "Server",
     .help = "address to listen on"},
    {INT(port, "8000", 0, 65535), .metavar = "N", .group = "Server",
     .help = "port to listen on; 0: any free one"},
    {STRING(uds, NULL), .metavar = "PATH", .group = "Server",
     .help = "Unix socket to listen on instead"},
    {STRING(ssl_certfile, NULL), .metavar = "FILE", .group = "Server",
     .help = "TLS certificate, PEM"},
    {STRING(ssl_keyfile, NULL), .metavar = "FILE", .group = "Server",
     .help = "TLS private key, PEM"},
    {AT(api_key), .type = SETTING_KEYS, .metavar = "KEY", .group = "Server",
     .help = "key that clients must send; may be given several times, in the environment with "
             "commas"},
    {STRING(api_key_file, NULL), .metavar = "FILE", .group = "Server",
     .help = "file of keys, with names and limits; read again on SIGHUP"},
    {CHOICE(prefix_cache_scope, "key", PREFIX_CACHE_SCOPES), .group = "Server",
     .help = "which requests share cached beginnings where keys are set: those of one key, or "
             "all; prefixes are shared by all"},
    {INT(max_queue, "1024", 1, 1000000), .metavar = "N", .group = "Server",
     .help = "requests that wait; one more is answered 429"},
    {SECONDS(queue_timeout, "0", 0, DAY_S), .metavar = "SECONDS", .group = "Server",
     .help = "longest wait for a first token's turn; 0: none"},
    {SECONDS(request_timeout, "0", 0, DAY_S), .metavar = "SECONDS", .group = "Server",
     .help = "longest life of a request; 0: none"},
    {INT(max_connections, "10000", 1, 1000000), .metavar = "N", .group = "Server",
     .help = "connections at once"},
    {INT(max_connections_per_address, "0", 0, 1000000), .metavar = "N", .group = "Server",
     .help = "connections at once of one peer address (IPv6: of one /64); 0: a quarter of "
             "max-connections; loopback, Unix sockets and trusted-proxies are not counted"},
    {STRING(trusted_proxies, NULL), .metavar = "ADDRESSES", .group = "Server",
     .help = "addresses and networks (10.0.0.0/8, with commas) that may open as many connections "
             "as they like"},
    {SECONDS(header_timeout, "10", 0.01, DAY_S), .metavar = "SECONDS", .group = "Server",
     .help = "within which a request's head must come whole, on a new connection with its TLS "
             "handshake"},
    {SECONDS(body_timeout, "30", 0.01, DAY_S), .metavar = "SECONDS", .group = "Server",
     .help = "within which a request's body must come, with a second more for each 64 KiB of it"},
    {STRING(admin_listen, NULL), .metavar = "ADDRESS:PORT", .group = "Server",
     .help = "where /health, /ping and /metrics alone are served too, by a thread of their own "
             "(or unix:PATH); without TLS; no key is asked there where it is this machine's "
             "loopback or a Unix socket"},
    {BYTES(max_body_bytes, "8MiB", KIB, GIB), .metavar = "SIZE", .group = "Server",
     .help = "largest request body; more is answered 413"},
    {BYTES(client_buffer_bytes, "0", 0, 64 * TIB), .metavar = "SIZE", .group = "Server",
     .help = "bytes held for clients at once: bodies, answers not read yet; beyond it requests "
             "are answered 503, slow readers cut off; 0: an eighth of memory, at least 64 MiB"},
    {INT(http_threads, "0", 0, 256), .metavar = "N", .group = "Server",
     .help = "threads of the HTTP server; 0: by cores"},
    {SECONDS(shutdown_timeout, "30", 0, DAY_S), .metavar = "SECONDS", .group = "Server",
     .help = "how long running requests may go on after SIGTERM"},
    {SECONDS(step_timeout, "60", 0.1, DAY_S), .metavar = "SECONDS", .group = "Server",
     .help = "a step that takes longer turns /health red"},
    {CHOICE(unknown_fields, "warn", UNKNOWN_FIELDS), .group = "Server",
     .help = "request fields nobody knows: name them in a response header, or answer 400"},
    {INT(max_logprobs, "20", 0, LIMIT_LOGPROBS), .metavar = "N", .group = "Server",
     .help = "most logprobs a request may ask for"},
    {STRING(cors_origins, NULL), .metavar = "ORIGINS", .group = "Server",
     .help = "origins that browsers may call from, with commas, or *"},
    {BOOL(ui, "true"), .group = "Server",
     .help = "the page at /, and /debug/kv that it draws"},

    {STRING(metrics_prefix, "quire_"), .metavar = "PREFIX", .group = "Observing",
     .help = "front of every metric's name; vllm: suits existing dashboards"},
    {CHOICE(log_format, "text", LOG_FORMATS), .group = "Observing",
     .help = "key=value lines or JSON lines"},
    {CHOICE(log_level, "info", LOG_LEVELS), .group = "Observing",
     .help = "the least that is logged"},
    {CHOICE(access_log, "all", ACCESS_LOGS), .group = "Observing",
     .help = "requests that get a line when they end; errors: those answered 400 or more"},
    {BOOL(log_prompts, "false"), .group = "Observing",
     .help = "write the beginning of every prompt into the log, as the model gets it"},
    {STRING(config, NULL), .metavar = "FILE", .group = "Observing",
     .help = "YAML file of settings; without one /etc/quire/quire.yaml where there is one; none: "
             "no file"},
};
/* clang-format on */

const int setting_count = ARRAY_LEN(setting_table);
static_assert(ARRAY_LEN(setting_table) <= SETTINGS_MAX, "settings.origin has a place for each row");

enum { NAME_MAX_BYTES = 64 };

/* Both spellings of a name as one: dashes become underscores. False where it is longer
 * than any name. */
static bool underscored(char out[NAME_MAX_BYTES], const char *name, size_t len)
{
    if (len >= NAME_MAX_BYTES) {
        return false;
    }
    for (size_t i = 0; i < len; i++) {
        out[i] = name[i] == '-' ? '_' : name[i];
    }
    out[len] = '\0';
    return true;
}

const struct setting *setting_find(const char *name, size_t len)
{
    char wanted[NAME_MAX_BYTES];

    if (!underscored(wanted, name, len)) {
        return NULL;
    }
    for (int i = 0; i < setting_count; i++) {
        const struct setting *row = &setting_table[i];
        if (strcmp(row->key, wanted) == 0 || (row->alias && strcmp(row->alias, wanted) == 0)) {
            return row;
        }
    }
    return NULL;
}

/* Levenshtein's distance, both strings shorter than NAME_MAX_BYTES. */
static int edits(const char *a, const char *b)
{
    int row[NAME_MAX_BYTES + 1];
    int n = (int)strlen(b);

    for (int j = 0; j <= n; j++) {
        row[j] = j;
    }
    for (int i = 1; a[i - 1] != '\0'; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= n; j++) {
            int change = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = MIN(change, MIN(row[j], row[j - 1]) + 1);
        }
    }
    return row[n];
}

const char *setting_nearest(const char *name, size_t len)
{
    char wanted[NAME_MAX_BYTES];

    underscored(wanted, name, MIN(len, (size_t)NAME_MAX_BYTES - 1));
    const char *best = setting_table[0].key;
    int least = NAME_MAX_BYTES * 2;
    for (int i = 0; i < setting_count; i++) {
        const char *candidate[] = {setting_table[i].key, setting_table[i].alias};
        for (size_t k = 0; k < ARRAY_LEN(candidate) && candidate[k] != NULL; k++) {
            int distance = edits(wanted, candidate[k]);
            if (distance < least) {
                least = distance;
                best = candidate[k];
            }
        }
    }
    return best;
}
