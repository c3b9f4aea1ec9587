/* Every setting once: a row of the table in settings.c gives YAML key, flag,
 * environment variable, aliases, type, bounds, default and help; `--help`, the README's
 * reference, `quire config` and validation come from it. Precedence: flag, environment,
 * file, default.
 */
#ifndef QUIRE_CONFIG_SETTINGS_SETTINGS_H
#define QUIRE_CONFIG_SETTINGS_SETTINGS_H

#include <stdio.h>

#include "config/base/base.h"
#include "config/base/log.h"
#include "config/base/policies.h"

enum device_kind { DEVICE_AUTO, DEVICE_CPU, DEVICE_CUDA };
enum dtype_choice { DTYPE_AUTO, DTYPE_BFLOAT16, DTYPE_FLOAT16, DTYPE_FLOAT32 };
enum load_format { LOAD_AUTO, LOAD_SAFETENSORS, LOAD_GGUF, LOAD_DUMMY };
enum access_log { ACCESS_ALL, ACCESS_ERRORS, ACCESS_NONE };
enum prefix_cache_scope { PREFIX_CACHE_KEY, PREFIX_CACHE_SERVER };
enum unknown_fields { UNKNOWN_WARN, UNKNOWN_REJECT };

enum { SETTINGS_MAX = 96 }; /* rows of the table at most */

/* One entry of `prefixes:` in the YAML file. */
struct prefix_setting {
    char *text;
};

/* Strings are owned by the struct; NULL where nothing is set. */
struct settings {
    /* model */
    /* directory, file, hub name; "null" for the null executor; NULL: the bundled one */
    char *model;
    char *served_model_name; /* NULL: derived from `model` */
    int device;              /* enum device_kind */
    int dtype;               /* enum dtype_choice */
    int load_format;         /* enum load_format */
    char *generation_config; /* "auto" or "none" */
    int64_t max_model_len;   /* tokens; 0: the model's, or what the pool holds */
    /* scheduling and memory */
    int64_t max_num_seqs;           /* 0: by device */
    int64_t max_num_batched_tokens; /* 0: by device */
    double target_itl_ms;           /* 0: by device; -1: none, throughput first */
    int64_t block_size;             /* tokens */
    int64_t kv_blocks;              /* 0: from memory */
    int64_t kv_cache_memory;        /* bytes; 0: from utilisation */
    double gpu_memory_utilization;
    int64_t swap_space; /* bytes */
    int preemption;     /* enum preemption */
    int policy;         /* enum policy */
    int kv_policy;      /* enum kv_policy */
    bool prefix_cache;
    struct prefix_setting *prefixes; /* [n_prefixes], YAML only */
    int64_t n_prefixes;
    int64_t tensor_parallel_size;
    int64_t pipeline_parallel_size;
    int64_t nnodes, node_rank; /* machines of a model that is cut, and which this is */
    char *master_addr;         /* of node 0; NULL: none given */
    int64_t master_port;
    double node_timeout;            /* seconds */
    int64_t local_rank, local_size; /* this node among those that are one machine */
    bool deterministic;
    int64_t threads; /* 0: physical cores */
    int64_t seed;    /* -1: random */
    /* server */
    char *host;
    int64_t port;
    char *uds;
    char *ssl_certfile;
    char *ssl_keyfile;
    char **api_key; /* [n_api_keys]; those of api_key_file are the server's affair */
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

    /* QUIRE_PORT said tcp://…, as Kubernetes makes it for a service called quire:
     * passed over */
    bool kubernetes_port;
    uint8_t origin[SETTINGS_MAX]; /* where each row's value came from; for settings_print */
};

/* Read flags (argv without the program and subcommand names), environment and file into
 * `ret`. `help` is set where --help was given (the caller prints settings_help). On
 * error nothing is left allocated. */
int settings_load(struct settings *ret, int argc, char **argv, char **env, bool *ret_help,
                  struct err *e);
void settings_release(struct settings *s);
/* The settings that decide how `model` is computed and what is logged, as flags for
 * settings_load in a process of our own; no keys. *ret is NULL-terminated, for
 * settings_pass_on_free. */
int settings_pass_on(char ***ret, const struct settings *s, const char *model, struct err *e);
void settings_pass_on_free(char **flags);
/* `--help` text of all settings, grouped. */
void settings_help(FILE *out);
/* The settings' table as a JSON array, one object a setting, for scripts/make-docs. */
void settings_list(FILE *out);
/* The settings' part of the manual page, in the macros of man(7). */
void settings_man(FILE *out);
/* `quire config`: every setting as YAML, each with a comment naming where its value
 * came from. Keys are masked. */
void settings_print(const struct settings *s, FILE *out);

#endif
