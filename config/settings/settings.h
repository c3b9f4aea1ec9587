/* The settings. Each is one row of the table in settings_table.c: YAML key, flag,
 * environment variable, alias, type, bounds, default and help. Validation, `--help`,
 * docs/settings.md, config/quire.yaml, the manual page and `quire config` come from it.
 * Precedence: flag, environment, file, default.
 */
#ifndef QUIRE_CONFIG_SETTINGS_SETTINGS_H
#define QUIRE_CONFIG_SETTINGS_SETTINGS_H

#include <stdio.h>

#include "config/base/base.h"
#include "config/base/log.h"
#include "config/base/policies.h"

enum device_kind { DEVICE_AUTO, DEVICE_CPU, DEVICE_CUDA };
enum dtype_choice { DTYPE_AUTO, DTYPE_BFLOAT16, DTYPE_FLOAT16, DTYPE_FLOAT32 };
/* A thing that is on or off, or decided by the program. */
enum switch_choice { SWITCH_OFF, SWITCH_ON, SWITCH_AUTO };
enum load_format { LOAD_AUTO, LOAD_SAFETENSORS, LOAD_GGUF, LOAD_DUMMY };
enum quantization {
    QUANTIZE_NONE,
    QUANTIZE_FP8,
    QUANTIZE_INT8,                   /* symmetric, a scale a row */
    QUANTIZE_INT8_GROUPS,            /* symmetric, a scale for 128 columns */
    QUANTIZE_INT8_ASYMMETRIC,        /* a scale and a zero point a row */
    QUANTIZE_INT8_GROUPS_ASYMMETRIC, /* for 128 columns */
    QUANTIZE_INT4,
    QUANTIZE_MXFP4,
};
enum kv_cache_dtype { KV_CACHE_AUTO, KV_CACHE_BF16, KV_CACHE_F32, KV_CACHE_FP8, KV_CACHE_INT8 };
enum access_log { ACCESS_ALL, ACCESS_ERRORS, ACCESS_NONE };
enum prefix_cache_scope { PREFIX_CACHE_KEY, PREFIX_CACHE_SERVER };
enum unknown_fields { UNKNOWN_WARN, UNKNOWN_REJECT };

enum { SETTINGS_MAX = 96 }; /* rows of the table at most */

/* One entry of `prefixes:` in the YAML file. */
struct prefix_setting {
    char *text; /* owned; computed at start and kept in the prefix cache */
};

/* Strings are owned by the struct; NULL: not set. */
struct settings {
    /* model */
    /* Directory, file or hub name; "null": the null executor; NULL: the bundled
     * model. */
    char *model;
    char *served_model_name;    /* NULL: derived from `model` */
    char *chat_format;          /* NULL: told from the chat template */
    bool generic_tools;         /* tools also for a chat template without a place for them */
    int device;                 /* enum device_kind */
    int dtype;                  /* enum dtype_choice */
    int load_format;            /* enum load_format */
    int quantization;           /* enum quantization */
    double quantization_smooth; /* SmoothQuant's exponent; 0: not smoothed */
    char *quantization_text;    /* a file; NULL: none */
    char *generation_config;    /* "auto" or "none" */
    int64_t max_model_len;      /* tokens; 0: the model's, or what the pool holds */
    /* scheduling and memory */
    int64_t max_num_seqs;           /* 0: by device */
    int64_t max_num_batched_tokens; /* 0: by device */
    double target_itl_ms;           /* 0: by device; -1: none, throughput first */
    int kv_cache_dtype;             /* enum kv_cache_dtype */
    int64_t block_size;             /* tokens */
    int64_t state_snapshot_tokens;  /* between snapshots of recurrent states; 0: by the block */
    int64_t kv_blocks;              /* 0: from memory */
    int64_t kv_cache_memory;        /* bytes; 0: from utilisation */
    double gpu_memory_utilization;
    int64_t swap_space;       /* bytes */
    int preemption;           /* enum preemption */
    int policy;               /* enum policy */
    int kv_policy;            /* enum kv_policy */
    int speculate;            /* enum speculate */
    int64_t max_draft;        /* drafts of a sequence in a step */
    char *draft_model;        /* NULL: none */
    char *speculative_config; /* vLLM's JSON, which settings_speculation has read; NULL: none */
    bool prefix_cache;
    struct prefix_setting *prefixes; /* [n_prefixes], YAML only */
    int64_t n_prefixes;
    int64_t tensor_parallel_size;
    int64_t pipeline_parallel_size;
    int expert_parallel;       /* enum switch_choice */
    int64_t nnodes, node_rank; /* machines that share the model; this one's number */
    char *master_addr;         /* of node 0; NULL: none given */
    int64_t master_port;
    double node_timeout;            /* seconds */
    int64_t local_rank, local_size; /* this node among the nodes on the same machine */
    bool deterministic;
    int64_t threads; /* 0: physical cores */
    int64_t seed;    /* -1: random */
    /* server */
    char *host;
    int64_t port;
    char *uds;
    char *ssl_certfile;
    char *ssl_keyfile;
    char **api_key; /* [n_api_keys]; without those of api_key_file, which the server reads */
    int64_t n_api_keys;
    char *api_key_file;
    int prefix_cache_scope; /* enum prefix_cache_scope */
    int64_t max_queue;
    double queue_timeout;   /* seconds, 0: none */
    double request_timeout; /* seconds, 0: none */
    int64_t max_connections;
    int64_t max_connections_per_address; /* 0: a quarter of max_connections */
    char *trusted_proxies;               /* addresses and networks, comma-separated, or NULL */
    double header_timeout, body_timeout; /* seconds */
    char *admin_listen;                  /* ADDRESS:PORT, unix:PATH, or NULL */
    int64_t max_body_bytes;
    int64_t client_buffer_bytes; /* 0: a share of memory */
    int64_t http_threads;        /* 0: by cores */
    double shutdown_timeout;     /* seconds */
    double step_timeout;         /* seconds */
    char *metrics_prefix;
    int unknown_fields; /* enum unknown_fields */
    int64_t max_logprobs;
    int log_format; /* enum log_format */
    int log_level;  /* enum log_level */
    int access_log; /* enum access_log */
    bool log_prompts;
    char *cors_origins; /* comma-separated, or NULL */
    bool ui;
    char *config; /* the YAML file that was read, or NULL */

    /* QUIRE_PORT was ignored because it is tcp://…, as Kubernetes sets it for a service
     * named quire. */
    bool kubernetes_port;
    uint8_t origin[SETTINGS_MAX]; /* enum setting_origin of each row's value */
};

/* Read flags (argv without the names of program and subcommand), environment and file
 * into `ret`. With --help only *ret_help is set, and the caller prints settings_help.
 * On error nothing is left allocated. */
int settings_load(struct settings *ret, int argc, char **argv, char **env, bool *ret_help,
                  struct err *e);
void settings_release(struct settings *s);
/* The settings that a worker process needs, as flags for its settings_load: how `model`
 * and, unless that is NULL, `draft_model` are computed and how to log, but no keys.
 * Both are where the names in `s` were found. *ret is NULL-terminated and freed by
 * settings_pass_on_free. */
int settings_pass_on(char ***ret, const struct settings *s, const char *model,
                     const char *draft_model, struct err *e);
void settings_pass_on_free(char **flags);
/* The `--help` text of all settings, by group. */
void settings_help(FILE *out);
/* The settings' table as a JSON array, one object a setting, for scripts/make-docs. */
void settings_list(FILE *out);
/* The settings' part of the manual page, in the macros of man(7). */
void settings_man(FILE *out);
/* `quire config`: every setting as YAML, each with a comment naming where its value
 * came from. Keys are masked. */
void settings_print(const struct settings *s, FILE *out);

#endif
