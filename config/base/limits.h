/* All limits on what a client, a file or a setting may request. */
#ifndef QUIRE_CONFIG_BASE_LIMITS_H
#define QUIRE_CONFIG_BASE_LIMITS_H

enum {
    LIMIT_PROMPTS = 1024,         /* prompts of one request */
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
    LIMIT_CANDIDATES = 2 * 128, /* of a beam search of width k: the top 2k tokens */
    LIMIT_JSON_DEPTH = 128,     /* request bodies; a schema takes two levels for one of its own */
    /* Values in one request body; its tree takes about 100 bytes for each. */
    LIMIT_JSON_VALUES = 1 << 20,
    LIMIT_JSON_FIELD_VALUES = 1 << 17, /* of them in one field that is no list of token ids */
    LIMIT_JSON_NAMES = 1 << 16,        /* members of all its objects together */
    LIMIT_JSON_MEMBERS = 256,          /* fields of a request body */
    LIMIT_FILE_JSON_DEPTH = 64,        /* config.json, tokenizer.json, safetensors headers */
    LIMIT_HEADER_BYTES = 7 * 1024,     /* a request's line and headers */
    LIMIT_HEADER_FIELDS = 100,
    /* MHD's memory per connection: larger than a head, so that one over the limit can
     * be detected and answered. */
    LIMIT_CONNECTION_BYTES = 16 * 1024,
    LIMIT_SHORT_BODY_BYTES = 32 * 1024, /* of a body that is parsed on the thread that read it */
    LIMIT_RESERVED_CONNECTIONS = 32,    /* beyond max-connections, for health checks */
    LIMIT_RESERVED_S = 1,               /* for the head on a reserved connection */
    LIMIT_IDLE_S = 75,                  /* of a connection between two requests */
    /* A body that arrives at least this fast may take longer than body-timeout. */
    LIMIT_BODY_BYTES_PER_S = 64 * 1024,
    LIMIT_REQUEST_ID_BYTES = 128,
    LIMIT_CACHE_SALT_BYTES = 256,
    LIMIT_MODEL_NAME_BYTES = 256,
    /* With more unread bytes than LIMIT_STREAM_BYTES a stream's client is slow. It is
     * disconnected after LIMIT_BURST_BYTES more, when it has taken nothing for
     * LIMIT_SLOW_S, or when client-buffer-bytes is exceeded by all clients together. */
    LIMIT_STREAM_BYTES = 1 << 20,
    LIMIT_BURST_BYTES = 16 << 20,
    LIMIT_SLOW_S = 5,
    /* A client that takes no byte from a full socket for this long is disconnected. */
    LIMIT_STALL_S = 60,
    LIMIT_KEEPALIVE_S = 10,    /* silence on a stream before an SSE comment */
    LIMIT_KV_SUBSCRIBERS = 32, /* concurrent clients of /debug/kv */
    LIMIT_API_KEYS = 1024,
    /* One tenant for each key, and one for requests without a key. */
    LIMIT_TENANTS = LIMIT_API_KEYS + 1,
    LIMIT_API_KEY_BYTES = 4096,
    LIMIT_KEY_NAME_BYTES = 64,
    LIMIT_KEY_SCOPE_BYTES = 97, /* a name, a slash, and 16 bytes in hexadecimal */
    LIMIT_PREFIX_SALT_BYTES = LIMIT_KEY_SCOPE_BYTES + 1 + LIMIT_CACHE_SALT_BYTES,
    LIMIT_SETTING_BYTES = 4096, /* the text of one setting */
    LIMIT_PREFIXES = 256,       /* entries of the setting prefixes */
    LIMIT_MODEL_LEN = 1 << 20,  /* positions: 2^20 */
    LIMIT_LAYERS = 512,
    LIMIT_KV_GROUPS = 8,
    LIMIT_TAPS = 8, /* layers whose hidden states a draft head reads */
    LIMIT_HEADS = 1024,
    LIMIT_EXPERTS = 1024, /* of a layer */
    LIMIT_HEAD_DIM = 512,
    LIMIT_STATE_BLOCK_TOKENS = 65536, /* of a block that holds a recurrent state */
    LIMIT_CONV_KERNEL = 16,           /* inputs of a recurrent layer's convolution */
    LIMIT_LATENT_DIM = 2048,          /* elements of a latent and its rotated key */
    LIMIT_HIDDEN = 1 << 17,
    LIMIT_VOCAB = 1 << 22,
    LIMIT_TENSORS = 1 << 16, /* of one checkpoint */
    LIMIT_SHARDS = 1024,
    LIMIT_GGUF_PAIRS = 1 << 14, /* metadata of one GGUF file */
    LIMIT_EOS_IDS = 16,
    LIMIT_DRAFT = 32, /* drafts of a sequence in a step (speculative decoding) */
    LIMIT_NUM_SEQS = 16384,
    LIMIT_BATCHED_TOKENS = 1 << 18,
    /* Logit biases of one sampling row: those of logit_bias, and bans of end tokens and
     * of bad words, of which each has two encodings. */
    LIMIT_ROW_BIASES =
        LIMIT_LOGIT_BIAS + LIMIT_STOP_TOKEN_IDS + LIMIT_EOS_IDS + 2 * LIMIT_BAD_WORDS,
    LIMIT_TEMPLATE_DEPTH = 200, /* nesting in a chat template, including macro calls */
    /* Work of one rendering: operations, and groups of 16 characters examined. */
    LIMIT_TEMPLATE_STEPS = 20000000,
    LIMIT_MESSAGES = 4096, /* of one chat request */
    LIMIT_TOOLS = 512,     /* of one chat request */
    LIMIT_TOOL_NAME_BYTES = 128,
    LIMIT_TOOL_CALLS = 8192,      /* in the messages of one chat request */
    LIMIT_CALLS_UNANSWERED = 256, /* of them, calls without a tool message yet */
    LIMIT_CALL_ID_BYTES = 256,
};

/* The text of a schema, an expression or a grammar that a request brings. */
#define LIMIT_GRAMMAR_BYTES ((size_t)512 << 10)
/* The longest JSON body of an answer; streams have no such limit. */
#define LIMIT_RESPONSE_BYTES ((size_t)256 << 20)
#define LIMIT_CONFIG_JSON_BYTES ((size_t)4 << 20)
#define LIMIT_TOKENIZER_JSON_BYTES ((size_t)256 << 20)
#define LIMIT_SAFETENSORS_HEADER_BYTES ((size_t)100 << 20)
#define LIMIT_TEMPLATE_BYTES ((size_t)1 << 20)         /* a chat template */
#define LIMIT_TEMPLATE_TREE_BYTES ((size_t)64 << 20)   /* its syntax tree */
#define LIMIT_TEMPLATE_MEMORY_BYTES ((size_t)96 << 20) /* values of one rendering */
#define LIMIT_TEMPLATE_OUTPUT_BYTES ((size_t)16 << 20) /* the rendered text */
#define LIMIT_YAML_BYTES ((size_t)1 << 20)

#endif
