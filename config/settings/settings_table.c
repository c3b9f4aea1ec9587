/* The table of settings, in the order of --help and of docs/settings.md. */
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
static const struct setting_choice QUANTIZATIONS[] = {
    {"none", QUANTIZE_NONE},
    {"fp8", QUANTIZE_FP8},
    {"int8", QUANTIZE_INT8},
    {"int8-g128", QUANTIZE_INT8_GROUPS},
    {"int8-asymmetric", QUANTIZE_INT8_ASYMMETRIC},
    {"int8-g128-asymmetric", QUANTIZE_INT8_GROUPS_ASYMMETRIC},
    {"int4", QUANTIZE_INT4},
    {"mxfp4", QUANTIZE_MXFP4},
    {0}};
static const struct setting_choice KV_CACHE_DTYPES[] = {
    {"auto", KV_CACHE_AUTO},    {"bf16", KV_CACHE_BF16},
    {"float32", KV_CACHE_F32},  {"fp8", KV_CACHE_FP8},
    {"int8", KV_CACHE_INT8},    {"bfloat16", KV_CACHE_BF16},
    {"fp8_e4m3", KV_CACHE_FP8}, {0}};
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
static const struct setting_choice SPECULATES[] = {{"off", SPECULATE_OFF},
                                                   {"auto", SPECULATE_AUTO},
                                                   {"suffix", SPECULATE_SUFFIX},
                                                   {"grammar", SPECULATE_GRAMMAR},
                                                   {"draft", SPECULATE_DRAFT},
                                                   {"mtp", SPECULATE_MTP},
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
#define SWITCH(name, preset_) AT(name), .type = SETTING_SWITCH, .preset = preset_
#define CHOICE(name, preset_, choice_) \
    AT(name), .type = SETTING_CHOICE, .preset = preset_, .choice = choice_

/* clang-format off */
const struct setting setting_table[] = {
    {STRING(model, NULL), .metavar = "DIR", .group = "Model",
     .help = "model to serve: a Hugging Face directory, a GGUF file, or a hub name "
             "(org/name[@revision], downloaded if it is not in the cache); null: no model, "
             "requests are answered at once (for tests); not set: the bundled model"},
    {STRING(served_model_name, NULL), .metavar = "NAME", .group = "Model",
     .help = "model name that clients see; not set: the name of the directory or on the hub"},
    {STRING(chat_format, NULL), .metavar = "NAME", .group = "Model",
     .help = "format of the model's tool calls and reasoning; not set: told from its chat "
             "template"},
    {BOOL(generic_tools, "false"), .group = "Model",
     .help = "where the chat template has no place for tools, describe them in the system "
             "message and read calls as JSON between <tool_call> marks"},
    {CHOICE(device, "auto", DEVICES), .group = "Model",
     .help = "device that runs the model; auto: a GPU if one is usable, else the CPU"},
    {CHOICE(dtype, "auto", DTYPES), .group = "Model",
     .help = "data type of the weights; auto: as stored"},
    {CHOICE(load_format, "auto", LOAD_FORMATS), .group = "Model",
     .help = "format of the weight files; dummy: random weights instead of files"},
    {CHOICE(quantization, "none", QUANTIZATIONS), .group = "Model",
     .help = "quantise the linear layers of a model that is stored as floats while it is loaded: "
             "fp8 (e4m3, a scale a row), int8 (a scale a row), int8-g128 (one for 128 columns), "
             "int8-asymmetric (a scale and a zero point a row), int8-g128-asymmetric (for 128 "
             "columns), int4 (groups of 128 with zero points) or mxfp4 (groups of 32); none: as "
             "stored"},
    {FLOAT(quantization_smooth, "0", 0, 0.99), .metavar = "ALPHA", .group = "Model",
     .help = "with quantization int8 or int8-asymmetric: move the size of large activations into "
             "the weights by this exponent (SmoothQuant), usually 0.5; the first start makes a "
             "directory of them in the cache directory, which later ones read; 0: off"},
    {STRING(quantization_text, NULL), .metavar = "FILE", .group = "Model",
     .help = "text that shows the activations for quantization_smooth, of the kind that the model "
             "will see; 8192 tokens of it at most"},
    {STRING(generation_config, "auto"), .choice = GENERATION_CONFIGS, .group = "Model",
     .help = "auto: use the sampling defaults (temperature, top_p, ...) of the model's "
             "generation_config.json; none: ignore that file"},
    {INT(max_model_len, "0", 0, LIMIT_MODEL_LEN), .metavar = "TOKENS", .group = "Model",
     .help = "maximum tokens of prompt and answer together; 0: the model's limit, or what the "
             "KV blocks can hold"},

    {INT(max_num_seqs, "0", 0, LIMIT_NUM_SEQS), .metavar = "N", .group = "Scheduling",
     .help = "maximum number of sequences that run at once; 0: 1024 on a GPU, 64 on a CPU"},
    {INT(max_num_batched_tokens, "0", 0, LIMIT_BATCHED_TOKENS), .metavar = "TOKENS",
     .group = "Scheduling",
     .help = "maximum number of tokens computed in one step; 0: 8192 on a GPU, 512 on a CPU"},
    {FLOAT(target_itl_ms, "0", -1, 60000), .metavar = "MS", .group = "Scheduling",
     .help = "target inter-token latency: prefill is limited so that steps with running "
             "requests take no longer; 0: 54 on a GPU (with policy fair, 11 while several keys "
             "share a step), no limit on a CPU (50 with policy fair); -1: no limit"},
    {CHOICE(preemption, "auto", PREEMPTIONS), .alias = "preemption_mode", .group = "Scheduling",
     .help = "what to do with the newest request when KV blocks run out: swap its blocks to "
             "host memory, or free them and recompute later; auto: whichever is cheaper"},
    {CHOICE(policy, "fcfs", POLICIES), .alias = "scheduling_policy", .group = "Scheduling",
     .help = "order of requests: first come, first served; by the field priority; or fair "
             "shares of tokens for each API key"},
    {BOOL(deterministic, "false"), .group = "Scheduling",
     .help = "batch-invariant results: the same request gives bit-identical tokens whatever "
             "else is in the batch; slower"},
    {CHOICE(speculate, "off", SPECULATES), .group = "Scheduling",
     .help = "speculative decoding: several tokens of a sequence in one step, with the same "
             "texts, as far as a step has room; grammar: tokens that a schema or grammar "
             "forces are drafted; suffix: these, and where the text repeats its prompt, itself "
              "or a recent answer; draft: forced tokens, and what the draft model says; mtp: "
              "forced tokens, and what the MTP head of the checkpoint says; auto: whichever of "
              "grammar, suffix and draft pays"},
    {STRING(draft_model, NULL), .metavar = "DIR", .group = "Scheduling",
     .help = "a small model of the same vocabulary, or an EAGLE-3 head of the model, which "
             "drafts tokens for the served one (speculate draft or auto); named as model is"},
    {INT(max_draft, "8", 1, LIMIT_DRAFT), .metavar = "TOKENS", .group = "Scheduling",
     .help = "maximum number of tokens that are drafted for a sequence in one step"},
    {STRING(speculative_config, NULL), .metavar = "JSON", .group = "Scheduling",
     .help = "the same as vLLM writes it, with method ngram, suffix, "
             "draft_model, eagle3 or mtp, model and num_speculative_tokens; sets speculate, "
             "draft-model and max-draft"},
    {INT(seed, "-1", -1, 0x1p63), .metavar = "N", .group = "Scheduling",
     .help = "seed for requests without one of their own; -1: random"},
    {INT(tensor_parallel_size, "1", 1, 64), .metavar = "N", .group = "Scheduling",
     .help = "number of ranks (processes) that split each layer, one GPU each, or all on the "
             "CPU"},
    {INT(pipeline_parallel_size, "1", 1, 64), .metavar = "N", .group = "Scheduling",
     .help = "number of pipeline stages that split the layers among them, each of "
             "tensor_parallel_size ranks"},
    {SWITCH(expert_parallel, "auto"), .alias = "enable_expert_parallel", .group = "Scheduling",
     .help = "ranks hold whole experts of each layer, equally many, in place of a slice of each; "
             "auto: where slices would cut groups of quantised weights or have slow kernels"},
    {INT(threads, "0", 0, 1024), .metavar = "N", .group = "Scheduling",
     .help = "number of CPU threads that compute, for all ranks together; 0: the number of "
             "physical cores"},

    {INT(nnodes, "1", 1, 64), .metavar = "N", .group = "Nodes",
     .help = "number of nodes (machines) that share the model, with equally many ranks each; "
             "all nodes need the same settings except node_rank"},
    {INT(node_rank, "0", 0, 63), .metavar = "N", .group = "Nodes",
     .help = "number of this node, from 0 to nnodes - 1; node 0 answers requests"},
    {STRING(master_addr, NULL), .metavar = "ADDRESS", .group = "Nodes",
     .help = "address at which the other nodes reach node 0"},
    {INT(master_port, "29500", 1, 65535), .metavar = "PORT", .group = "Nodes",
     .help = "TCP port of node 0 for the other nodes; not authenticated, so expose it only to "
             "the cluster's own network"},
    {SECONDS(node_timeout, "300", 0.1, DAY_S), .metavar = "SECONDS", .group = "Nodes",
     .help = "how long nodes wait for each other at start"},
    {INT(local_rank, "0", 0, 63), .metavar = "N", .group = "Nodes",
     .help = "number of this node among those on the same machine, if several of the nnodes "
             "run there"},
    {INT(local_size, "1", 1, 64), .metavar = "N", .group = "Nodes",
     .help = "number of the nnodes that run on this machine"},

    {CHOICE(kv_cache_dtype, "auto", KV_CACHE_DTYPES), .group = "Memory",
     .help = "type of cached keys and values; auto: that of the activations on a GPU, on a CPU "
             "bf16, or float32 for weights of float32 and for latents; bf16; float32 (on a CPU); "
             "fp8: e4m3 with the checkpoint's k_scale and v_scale, or 1; int8: a scale a token and "
             "head"},
    {INT(block_size, "16", 1, 256), .metavar = "TOKENS", .group = "Memory",
     .help = "number of tokens in a KV block; models with recurrent states have larger ones, "
             "multiples of it in which a state fits"},
    {INT(state_snapshot_tokens, "0", 0, INT32_MAX), .metavar = "TOKENS", .group = "Memory",
     .help = "models with recurrent states: distance of the snapshots from which cached prefixes "
             "are continued, a multiple of their block; 0: at least 256"},
    {INT(kv_blocks, "0", 0, INT32_MAX), .alias = "num_gpu_blocks_override", .metavar = "N",
     .group = "Memory",
     .help = "number of KV blocks, each of one KV group's layers; 0: as many as fit into memory"},
    {BYTES(kv_cache_memory, "0", 0, 1024 * TIB), .alias = "kv_cache_memory_bytes",
     .metavar = "SIZE", .group = "Memory",
     .help = "memory for the KV blocks of each rank; 0: on a GPU by gpu-memory-utilization, on "
             "a CPU 2 GiB or a quarter of the free memory"},
    {CHOICE(kv_policy, "paged", KV_POLICIES), .group = "Memory",
     .help = "paged: KV memory is allocated in blocks; the others are baselines for "
             "measurements, which reserve contiguous memory for a sequence's whole life: the "
             "model's maximum length, the next power of two of the answer's length, or exactly "
             "that length; without cached prefixes"},
    {FLOAT(gpu_memory_utilization, "0.9", 0.01, 1), .metavar = "PART", .group = "Memory",
     .help = "fraction of the GPU's memory that may be used"},
    {BYTES(swap_space, "4GiB", 0, 64 * TIB), .metavar = "SIZE", .group = "Memory",
     .gib_without_unit = true,
     .help = "host memory for swapped-out KV blocks; a number below 1024 without a unit is in "
             "GiB"},
    {BOOL(prefix_cache, "true"), .alias = "enable_prefix_caching", .group = "Memory",
     .help = "share KV blocks among requests whose prompts begin with the same tokens"},
    {AT(prefixes), .type = SETTING_PREFIXES, .group = "Memory",
     .help = "list of texts that are computed at start and stay in the prefix cache (YAML file "
             "only)"},

    {STRING(host, "127.0.0.1"), .metavar = "ADDRESS", .group = "Server",
     .help = "address to listen on"},
    {INT(port, "8000", 0, 65535), .metavar = "N", .group = "Server",
     .help = "port to listen on; 0: any free port"},
    {STRING(uds, NULL), .metavar = "PATH", .group = "Server",
     .help = "path of a Unix socket to listen on, instead of host and port"},
    {STRING(ssl_certfile, NULL), .metavar = "FILE", .group = "Server",
     .help = "TLS certificate chain (PEM)"},
    {STRING(ssl_keyfile, NULL), .metavar = "FILE", .group = "Server",
     .help = "TLS private key (PEM)"},
    {AT(api_key), .type = SETTING_KEYS, .metavar = "KEY", .group = "Server",
     .help = "key that clients must send; may be given several times, in the environment "
             "separated by commas"},
    {STRING(api_key_file, NULL), .metavar = "FILE", .group = "Server",
     .help = "file of keys with names and limits; read again on SIGHUP"},
    {CHOICE(prefix_cache_scope, "key", PREFIX_CACHE_SCOPES), .group = "Server",
     .help = "which requests share cached prefixes when keys are set: only those with the same "
             "key, or all on the server; the setting prefixes is shared by all"},
    {INT(max_queue, "1024", 1, 1000000), .metavar = "N", .group = "Server",
     .help = "maximum number of waiting requests; further ones are answered 429"},
    {SECONDS(queue_timeout, "0", 0, DAY_S), .metavar = "SECONDS", .group = "Server",
     .help = "maximum time a request waits in the queue before its first token; 0: no limit"},
    {SECONDS(request_timeout, "0", 0, DAY_S), .metavar = "SECONDS", .group = "Server",
     .help = "maximum time from a request's arrival to its end; 0: no limit"},
    {INT(max_connections, "10000", 1, 1000000), .metavar = "N", .group = "Server",
     .help = "maximum number of open connections"},
    {INT(max_connections_per_address, "0", 0, 1000000), .metavar = "N", .group = "Server",
     .help = "maximum number of open connections from one address (IPv6: one /64 network); 0: "
             "a quarter of max-connections; loopback, Unix sockets and trusted-proxies are not "
             "limited"},
    {STRING(trusted_proxies, NULL), .metavar = "ADDRESSES", .group = "Server",
     .help = "addresses and networks (such as 10.0.0.0/8, separated by commas) without a limit "
             "of connections per address"},
    {SECONDS(header_timeout, "10", 0.01, DAY_S), .metavar = "SECONDS", .group = "Server",
     .help = "time within which a request's head must arrive; on a new connection including "
             "the TLS handshake"},
    {SECONDS(body_timeout, "30", 0.01, DAY_S), .metavar = "SECONDS", .group = "Server",
     .help = "time within which a request's body must arrive, plus one second for each 64 KiB "
             "of it"},
    {STRING(admin_listen, NULL), .metavar = "ADDRESS:PORT", .group = "Server",
     .help = "further address (or unix:PATH) that serves only /health, /ping and /metrics, by "
             "a thread of its own and without TLS; no key is required there if it is a "
             "loopback address or a Unix socket"},
    {BYTES(max_body_bytes, "8MiB", KIB, GIB), .metavar = "SIZE", .group = "Server",
     .help = "maximum size of a request body; larger ones are answered 413"},
    {BYTES(client_buffer_bytes, "0", 0, 64 * TIB), .metavar = "SIZE", .group = "Server",
     .help = "maximum memory for clients: request bodies and answers that are not read yet; "
             "beyond it new requests are answered 503 and slow readers are disconnected; 0: an "
             "eighth of memory, at least 64 MiB"},
    {INT(http_threads, "0", 0, 256), .metavar = "N", .group = "Server",
     .help = "number of threads of the HTTP server; 0: by the number of cores"},
    {SECONDS(shutdown_timeout, "30", 0, DAY_S), .metavar = "SECONDS", .group = "Server",
     .help = "how long running requests may continue after SIGTERM"},
    {SECONDS(step_timeout, "60", 0.1, DAY_S), .metavar = "SECONDS", .group = "Server",
     .help = "a step that takes longer makes /health answer 503"},
    {CHOICE(unknown_fields, "warn", UNKNOWN_FIELDS), .group = "Server",
     .help = "what to do with unknown request fields: name them in a response header, or "
             "answer 400"},
    {INT(max_logprobs, "20", 0, LIMIT_LOGPROBS), .metavar = "N", .group = "Server",
     .help = "maximum number of log-probabilities per token that a request may ask for"},
    {STRING(cors_origins, NULL), .metavar = "ORIGINS", .group = "Server",
     .help = "origins from which browsers may send requests, separated by commas; *: any"},
    {BOOL(ui, "true"), .group = "Server",
     .help = "serve the page at / and what it displays, /debug/kv and /debug/masks"},

    {STRING(metrics_prefix, "quire_"), .metavar = "PREFIX", .group = "Observing",
     .help = "prefix of all metric names; vllm: fits existing dashboards"},
    {CHOICE(log_format, "text", LOG_FORMATS), .group = "Observing",
     .help = "text: key=value lines; json: one JSON object per line"},
    {CHOICE(log_level, "info", LOG_LEVELS), .group = "Observing",
     .help = "lowest level that is logged"},
    {CHOICE(access_log, "all", ACCESS_LOGS), .group = "Observing",
     .help = "which requests are logged when they end; errors: those answered with status 400 "
             "or above"},
    {BOOL(log_prompts, "false"), .group = "Observing",
     .help = "log the beginning of every prompt, as the model gets it"},
    {STRING(config, NULL), .metavar = "FILE", .group = "Observing",
     .help = "YAML file of settings; not set: /etc/quire/quire.yaml if it exists; none: no "
             "file"},
};
/* clang-format on */

const int setting_count = ARRAY_LEN(setting_table);
static_assert(ARRAY_LEN(setting_table) <= SETTINGS_MAX, "settings.origin has a place for each row");

enum { NAME_MAX_BYTES = 64 };

/* Copy a name with underscores for dashes. False: it is longer than any name. */
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

/* The Levenshtein distance of two strings shorter than NAME_MAX_BYTES. */
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
