/* Every cap in one place: what a client, a file or a setting may ask for at most. */
#ifndef QUIRE_CONFIG_BASE_LIMITS_H
#define QUIRE_CONFIG_BASE_LIMITS_H

enum {
    LIMIT_PROMPTS = 1024,         /* prompts a request */
    LIMIT_CHOICES = 128,          /* n, best_of, beam_width */
    LIMIT_REQUEST_CHOICES = 4096, /* prompts x best_of of one HTTP request */
    LIMIT_STOP_STRINGS = 16,
    LIMIT_STOP_BYTES = 1024, /* one stop string */
    LIMIT_STOP_TOKEN_IDS = 128,
    LIMIT_BAD_WORDS = 128,
    LIMIT_BAD_WORD_TOKENS = 16, /* one bad word, encoded */
    LIMIT_LOGIT_BIAS = 1024,
    LIMIT_ALLOWED_TOKEN_IDS = 65536,
    LIMIT_LOGPROBS = 20,        /* ceiling of the setting max_logprobs */
    LIMIT_CANDIDATES = 2 * 128, /* top-2k of a beam row */
    LIMIT_JSON_DEPTH = 32,      /* request bodies */
    /* values in one request body: about 100 MB of tree while it is read */
    LIMIT_JSON_VALUES = 1 << 20,
    LIMIT_JSON_MEMBERS = 256,      /* fields at the top of a request body */
    LIMIT_FILE_JSON_DEPTH = 64,    /* config.json, tokenizer.json, safetensors headers */
    LIMIT_HEADER_BYTES = 7 * 1024, /* a request's line and headers */
    LIMIT_HEADER_FIELDS = 100,
    /* What an open connection holds for a head: larger, so that one over the limit is
     * seen, and its answer has a place. */
    LIMIT_CONNECTION_BYTES = 16 * 1024,
    LIMIT_RESERVED_CONNECTIONS = 32, /* beyond max-connections, for health checks */
    LIMIT_RESERVED_S = 1,            /* for the whole head on one of those */
    LIMIT_IDLE_S = 75,               /* of a connection between two requests */
    /* a body that comes so fast may take longer than body-timeout */
    LIMIT_BODY_BYTES_PER_S = 64 * 1024,
    LIMIT_REQUEST_ID_BYTES = 128,
    LIMIT_CACHE_SALT_BYTES = 256,
    LIMIT_MODEL_NAME_BYTES = 256,
    /* Unread bytes of one stream that make its client a slow one. It is cut off after
     * LIMIT_BURST_BYTES more, when it has taken nothing for LIMIT_SLOW_S, or when all
     * clients together are held more than client-buffer-bytes. */
    LIMIT_STREAM_BYTES = 1 << 20,
    LIMIT_BURST_BYTES = 16 << 20,
    LIMIT_SLOW_S = 5,
    /* a client that takes not one byte of a full socket for so long is cut off */
    LIMIT_STALL_S = 60,
    LIMIT_KEEPALIVE_S = 10,    /* silence on a stream before an SSE comment */
    LIMIT_KV_SUBSCRIBERS = 32, /* readers of /debug/kv at once */
    LIMIT_API_KEYS = 1024,
    /* who requests are counted for: every key, and those without one */
    LIMIT_TENANTS = LIMIT_API_KEYS + 1,
    LIMIT_API_KEY_BYTES = 4096,
    LIMIT_KEY_NAME_BYTES = 64,
    LIMIT_KEY_SCOPE_BYTES = 97, /* a name, and 16 bytes in hexadecimal behind a slash */
    LIMIT_PREFIX_SALT_BYTES = LIMIT_KEY_SCOPE_BYTES + 1 + LIMIT_CACHE_SALT_BYTES,
    LIMIT_SETTING_BYTES = 4096, /* one text of a setting */
    LIMIT_PREFIXES = 256,       /* entries of the setting prefixes */
    LIMIT_MODEL_LEN = 1 << 20,  /* positions: 2^20 */
    LIMIT_LAYERS = 512,
    LIMIT_HEADS = 1024,
    LIMIT_HEAD_DIM = 512,
    LIMIT_HIDDEN = 1 << 17,
    LIMIT_VOCAB = 1 << 22,
    LIMIT_TENSORS = 1 << 16, /* of one checkpoint */
    LIMIT_SHARDS = 1024,
    LIMIT_GGUF_PAIRS = 1 << 14, /* metadata of one GGUF file */
    LIMIT_EOS_IDS = 16,
    LIMIT_NUM_SEQS = 16384,
    LIMIT_BATCHED_TOKENS = 1 << 18,
    /* Biases of one sampling row: those asked for, and bans of ends and of bad
     * words, each encoded in two ways. */
    LIMIT_ROW_BIASES =
        LIMIT_LOGIT_BIAS + LIMIT_STOP_TOKEN_IDS + LIMIT_EOS_IDS + 2 * LIMIT_BAD_WORDS,
    LIMIT_TEMPLATE_DEPTH = 200, /* nesting of a chat template, macros' calls included */
    /* work of one rendering: operations, characters looked at by the 16 */
    LIMIT_TEMPLATE_STEPS = 20000000,
    LIMIT_MESSAGES = 4096, /* of one chat request */
};

/* A JSON answer that grows beyond this is given up; streams have no such end. */
#define LIMIT_RESPONSE_BYTES ((size_t)256 << 20)
#define LIMIT_CONFIG_JSON_BYTES ((size_t)4 << 20)
#define LIMIT_TOKENIZER_JSON_BYTES ((size_t)256 << 20)
#define LIMIT_SAFETENSORS_HEADER_BYTES ((size_t)100 << 20)
#define LIMIT_TEMPLATE_BYTES ((size_t)1 << 20)         /* a chat template */
#define LIMIT_TEMPLATE_TREE_BYTES ((size_t)64 << 20)   /* the same, read */
#define LIMIT_TEMPLATE_MEMORY_BYTES ((size_t)96 << 20) /* values of one rendering */
#define LIMIT_TEMPLATE_OUTPUT_BYTES ((size_t)16 << 20) /* what it writes */
#define LIMIT_YAML_BYTES ((size_t)1 << 20)

#endif
