/* Rows of the field tables that fill a `struct completion`. */
#ifndef QUIRE_SERVER_API_FIELD_ROWS_H
#define QUIRE_SERVER_API_FIELD_ROWS_H

#include "server/api/api.h"

#define AT(m) .offset = offsetof(struct completion, m)
#define GIVEN(m) .given = offsetof(struct completion, m)

#define ROW_BOOL(n, m, h) {.name = n, .type = FIELD_BOOL, AT(m), .given = -1, .help = h}
#define ROW_INT(n, m, l, u, h) \
    {.name = n, .type = FIELD_INT, AT(m), .given = -1, .lo = l, .hi = u, .help = h}
#define ROW_FLOAT(n, m, l, u, h) \
    {.name = n, .type = FIELD_FLOAT, AT(m), .given = -1, .lo = l, .hi = u, .help = h}
#define ROW_OVER(n, m, l, u, h) \
    {.name = n,                 \
     .type = FIELD_FLOAT,       \
     AT(m),                     \
     .given = -1,               \
     .lo = l,                   \
     .hi = u,                   \
     .lo_open = true,           \
     .help = h}
#define ROW_CUSTOM(n, f, s, h) \
    {.name = n, .type = FIELD_CUSTOM, .given = -1, .read = f, .schema = s, .help = h}
#define ROW_STRING(n, h) {.name = n, .type = FIELD_STRING, .given = -1, .help = h}
#define ROW_MISSING(n, h) {.name = n, .type = FIELD_MISSING, .given = -1, .help = h}

#define IDS_SCHEMA \
    "{\"type\":\"array\",\"items\":{\"type\":\"integer\",\"minimum\":0,\"maximum\":@vocab}}"

#define JSON_SCHEMA "{\"oneOf\":[{\"type\":\"object\"},{\"type\":\"string\",\"minLength\":2}]}"
#define CHOICE_SCHEMA "{\"type\":\"array\",\"minItems\":1,\"items\":{\"type\":\"string\"}}"

/* Rows of every generating route: how tokens are chosen, where a text ends, and whose
 * request it is. The bounds of repetition_penalty are those of generation_config.json:
 * beyond them finite logits overflow or become equal. */
#define SAMPLING_ROWS                                                                              \
    ROW_OVER("top_p", params.top_p, 0, 1,                                                          \
             "Keep the likeliest tokens whose probabilities sum to this."),                        \
        ROW_CUSTOM("top_k", read_top_k,                                                            \
                   "{\"type\":\"integer\",\"minimum\":-1,\"maximum\":2147483647}",                 \
                   "Keep the k likeliest tokens; -1 or 0: all."),                                  \
        ROW_FLOAT("min_p", params.min_p, 0, 1,                                                     \
                  "Keep tokens of at least this share of the likeliest one's probability."),       \
        ROW_FLOAT("presence_penalty", params.presence_penalty, -2, 2,                              \
                  "Subtracted from the logit of each token that was already generated."),          \
        ROW_FLOAT("frequency_penalty", params.frequency_penalty, -2, 2,                            \
                  "Subtracted once for each time the token was generated."),                       \
        ROW_FLOAT(                                                                                 \
            "repetition_penalty", params.repetition_penalty, 0.001, 1000,                          \
            "Divides positive and multiplies negative logits of tokens that occurred before."),    \
        ROW_CUSTOM(                                                                                \
            "logit_bias", read_logit_bias,                                                         \
            "{\"type\":\"object\",\"maxProperties\":1024,\"propertyNames\":{\"pattern\":\"^[0-9]+" \
            "$\"},"                                                                                \
            "\"additionalProperties\":{\"type\":\"number\",\"minimum\":-100,\"maximum\":100}}",    \
            "Added to the logits of these token ids."),                                            \
        {.name = "seed",                                                                           \
         .type = FIELD_CUSTOM,                                                                     \
         GIVEN(has_seed),                                                                          \
         .read = read_seed,                                                                        \
         .schema = "{\"type\":\"integer\",\"minimum\":-9223372036854775808,\"maximum\":"           \
                   "18446744073709551615}",                                                        \
         .help = "The same seed gives the same tokens. Without one each prompt has its own."},     \
        ROW_CUSTOM("stop_token_ids", read_stop_token_ids, IDS_SCHEMA,                              \
                   "Tokens that end a choice."),                                                   \
        ROW_BOOL("include_stop_str_in_output", params.include_stop_str,                            \
                 "Keep the stop string that matched."),                                            \
        ROW_BOOL("ignore_eos", params.ignore_eos,                                                  \
                 "Do not end at the model's end-of-sequence tokens."),                             \
        ROW_CUSTOM("bad_words", read_bad_words,                                                    \
                   "{\"type\":\"array\",\"maxItems\":128,\"items\":{\"type\":\"string\","          \
                   "\"minLength\":1}}",                                                            \
                   "Words that are never generated."),                                             \
        ROW_CUSTOM(                                                                                \
            "allowed_token_ids", read_allowed_token_ids,                                           \
            "{\"type\":\"array\",\"minItems\":1,\"items\":{\"type\":\"integer\",\"minimum\":0,"    \
            "\"maximum\":@vocab}}",                                                                \
            "Only these tokens are generated."),                                                   \
        ROW_INT("min_tokens", params.min_tokens, 0, INT32_MAX,                                     \
                "Least tokens to generate before an end; at most max_tokens."),                    \
        ROW_BOOL("skip_special_tokens", params.skip_special,                                       \
                 "Leave special tokens out of the text."),                                         \
        ROW_BOOL("spaces_between_special_tokens", params.spaces_between_special,                   \
                 "Spaces between special tokens that are left in."),                               \
        {.name = "priority",                                                                       \
         .type = FIELD_INT,                                                                        \
         AT(params.priority),                                                                      \
         GIVEN(has_priority),                                                                      \
         .lo = INT32_MIN,                                                                          \
         .hi = INT32_MAX,                                                                          \
         .help = "Lower runs first, with the setting policy: priority."},                          \
        ROW_CUSTOM("cache_salt", read_cache_salt,                                                  \
                   "{\"type\":\"string\",\"minLength\":1,\"maxLength\":256}",                      \
                   "Share cached prefixes only with requests that have the same salt."),           \
        ROW_CUSTOM("request_id", read_request_id,                                                  \
                   "{\"type\":\"string\",\"pattern\":\"^[A-Za-z0-9._:-]{1,128}$\"}",               \
                   "Id of the request in the answer and the log.")

/* Likewise: what constrains the answer, read by structured_read from the tree. */
#define CONSTRAINT_ROWS                                                                           \
    ROW_CUSTOM("structured_outputs", read_later,                                                  \
               "{\"type\":\"object\",\"maxProperties\":2,\"properties\":{\"json\":" JSON_SCHEMA   \
               ",\"regex\":{\"type\":\"string\",\"minLength\":1},\"choice\":" CHOICE_SCHEMA       \
               ",\"grammar\":{\"type\":\"string\",\"minLength\":1},\"json_object\":{\"type\":"    \
               "\"boolean\"},\"structural_tag\":{\"oneOf\":[{\"type\":\"string\"},{\"type\":"     \
               "\"object\"}]}}}",                                                                 \
               "Constrains the answer by one of: a JSON Schema, a regular expression, a list of " \
               "texts, a grammar in Lark's notation, any JSON object, tags in free text."),       \
        ROW_CUSTOM("guided_json", read_later, JSON_SCHEMA,                                        \
                   "Older name of structured_outputs.json."),                                     \
        ROW_CUSTOM("guided_regex", read_later, "{\"type\":\"string\",\"minLength\":1}",           \
                   "Older name of structured_outputs.regex."),                                    \
        ROW_CUSTOM("guided_choice", read_later, CHOICE_SCHEMA,                                    \
                   "Older name of structured_outputs.choice."),                                   \
        ROW_CUSTOM("guided_grammar", read_later, "{\"type\":\"string\",\"minLength\":1}",         \
                   "Older name of structured_outputs.grammar."),                                  \
        ROW_CUSTOM("guided_json_object", read_later, "{\"type\":\"boolean\"}",                    \
                   "Older name of structured_outputs.json_object.")

#endif
