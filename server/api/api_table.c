/* The field table of the two generating routes: one row for every field. */
#include <math.h>

#include "server/api/field_rows.h"

/* Rows of only one route. */
#define ROW_FOR(r, n, f, s, h) \
    {.name = n, .type = FIELD_CUSTOM, .only = r, .given = -1, .read = f, .schema = s, .help = h}
#define ROW_CHAT(n, f, s, h) ROW_FOR(ROUTE_CHAT, n, f, s, h)
/* A string without effect. */
#define ROW_ACCEPTED(n, h) \
    {.name = n, .type = FIELD_STRING, .only = ROUTE_CHAT, .given = -1, .help = h}
#define ROW_CHAT_MISSING(n, h) \
    {.name = n, .type = FIELD_MISSING, .only = ROUTE_CHAT, .given = -1, .help = h}

#define FUNCTION_SCHEMA                                                                \
    "{\"type\":\"object\",\"required\":[\"name\"],\"properties\":{\"name\":{\"type\":" \
    "\"string\",\"pattern\":\"^[A-Za-z0-9_.:-]{1,128}$\"},\"description\":{\"type\":"  \
    "\"string\"},\"parameters\":{\"type\":\"object\"},\"strict\":{\"type\":\"boolean\"}}}"

static const struct field completion_rows[] = {
    ROW_CUSTOM("model", read_model, "{\"type\":\"string\"}",
               "The served model; it may be left out."),
    ROW_FOR(ROUTE_COMPLETIONS, "prompt", read_later,
            "{\"oneOf\":[{\"type\":\"string\",\"minLength\":1},"
            "{\"type\":\"array\",\"minItems\":1,\"maxItems\":1024,\"items\":{\"type\":\"string\","
            "\"minLength\":1}},"
            "{\"type\":\"array\",\"minItems\":1,\"items\":{\"type\":\"integer\",\"minimum\":0,"
            "\"maximum\":@vocab}},"
            "{\"type\":\"array\",\"minItems\":1,\"maxItems\":1024,\"items\":{\"type\":\"array\","
            "\"minItems\":1,"
            "\"items\":{\"type\":\"integer\",\"minimum\":0,\"maximum\":@vocab}}}]}",
            "A text, a list of texts, a list of token ids, or a list of lists of token ids."),
    {.name = "max_tokens",
     .type = FIELD_INT,
     AT(params.max_tokens),
     GIVEN(has_max_tokens),
     .lo = 0,
     .hi = INT32_MAX,
     .help = "Most tokens to generate; 16 by default (0 only with echo), in a chat the rest of the "
             "model's length."},
    ROW_INT("n", params.n, 1, LIMIT_CHOICES, "Number of choices for each prompt."),
    {.name = "best_of",
     .type = FIELD_INT,
     AT(params.best_of),
     GIVEN(has_best_of),
     .lo = 1,
     .hi = LIMIT_CHOICES,
     .help =
         "Samples for each prompt, of which the n best are returned; at least n, and equal to it "
         "with stream."},
    ROW_BOOL("use_beam_search", use_beam_search,
             "Beam search instead of sampling; the n best beams are returned."),
    {.name = "beam_width",
     .type = FIELD_INT,
     AT(params.beam_width),
     GIVEN(has_beam_width),
     .lo = 1,
     .hi = LIMIT_CHOICES,
     .help = "Width of the beam; n by default and at least n."},
    {.name = "length_penalty",
     .type = FIELD_FLOAT,
     AT(params.length_penalty),
     GIVEN(has_length_penalty),
     .lo = -INFINITY,
     .hi = INFINITY,
     .help = "A finished beam scores cumulative log-probability / length^length_penalty."},
    {.name = "early_stopping",
     .type = FIELD_CUSTOM,
     .given = offsetof(struct completion, has_early_stopping),
     .read = read_early_stopping,
     .schema = "{\"oneOf\":[{\"type\":\"boolean\"},{\"type\":\"string\",\"const\":\"never\"}]}",
     .help = "When a beam search may end: true, false or \"never\"."},
    {.name = "temperature",
     .type = FIELD_FLOAT,
     AT(params.temperature),
     GIVEN(has_temperature),
     .lo = 0,
     .hi = 2,
     .help = "0 is greedy."},
    SAMPLING_ROWS,
    ROW_CUSTOM("stop", read_stop,
               "{\"oneOf\":[{\"type\":\"string\",\"minLength\":1},{\"type\":\"array\",\"maxItems\":"
               "16,\"items\":{"
               "\"type\":\"string\",\"minLength\":1}}]}",
               "The text ends before any of these."),
    {.name = "echo",
     .type = FIELD_BOOL,
     .only = ROUTE_COMPLETIONS,
     AT(params.echo),
     .given = -1,
     .help = "Return the prompt before the text."},
    ROW_FOR(ROUTE_COMPLETIONS, "logprobs", read_logprobs,
            "{\"type\":\"integer\",\"minimum\":0,\"maximum\":@logprobs}",
            "Return log-probabilities, and those of this many likeliest tokens."),
    {.name = "prompt_logprobs",
     .type = FIELD_CUSTOM,
     .only = ROUTE_COMPLETIONS,
     .given = offsetof(struct completion, has_prompt_logprobs),
     .read = read_prompt_logprobs,
     .schema = "{\"type\":\"integer\",\"minimum\":0,\"maximum\":@logprobs}",
     .help = "The same for the prompt's tokens."},
    ROW_BOOL("stream", params.stream, "Server-sent events instead of one JSON body."),
    ROW_CUSTOM("stream_options", read_stream_options,
               "{\"type\":\"object\",\"properties\":{\"include_usage\":{\"type\":\"boolean\"},"
               "\"continuous_usage_"
               "stats\":{\"type\":\"boolean\"}}}",
               "Only with stream."),
    ROW_FOR(ROUTE_COMPLETIONS, "suffix", read_suffix, "{\"type\":\"string\",\"maxLength\":@suffix}",
            "The text after the completion; only for models with fill-in-the-middle tokens, with "
            "others \"\" only."),
    ROW_BOOL("add_special_tokens", add_special,
             "Add the tokenizer's special tokens (BOS) to text prompts."),
    ROW_INT("truncate_prompt_tokens", truncate, 1, LIMIT_MODEL_LEN,
            "Keep the last N tokens of each prompt."),
    ROW_BOOL("return_token_ids", return_token_ids,
             "token_ids and prompt_token_ids in the choices; in streams also drafted, the places "
             "of those of an event's tokens that were drafts."),
    {.name = "user", .type = FIELD_STRING, .given = -1, .help = "Accepted, but has no effect."},
    ROW_CUSTOM("response_format", read_later,
               "{\"type\":\"object\",\"required\":[\"type\"],\"properties\":{\"type\":{\"enum\":["
               "\"text\",\"json_object\",\"json_schema\",\"structural_tag\"]},\"json_schema\":{"
               "\"type\":\"object\",\"properties\":{\"name\":{\"type\":\"string\"},\"schema\":{"
               "\"type\":\"object\"},\"strict\":{\"type\":\"boolean\"}}}}}",
               "The answer is JSON, valid by the schema if one is given; a schema that cannot be "
               "enforced is refused."),
    CONSTRAINT_ROWS,
    {.name = "guided_decoding_backend",
     .type = FIELD_STRING,
     .given = -1,
     .help = "Accepted; there is one way to constrain output."},
    ROW_CHAT("messages", read_later,
             "{\"type\":\"array\",\"minItems\":1,\"maxItems\":4096,\"items\":{\"type\":\"object\","
             "\"required\":[\"role\"],\"properties\":{\"role\":{\"enum\":[\"system\","
             "\"developer\",\"user\",\"assistant\",\"tool\",\"function\"]},"
             "\"name\":{\"type\":\"string\"},\"content\":{\"oneOf\":[{\"type\":\"string\"},{"
             "\"type\":\"array\",\"items\":{\"type\":\"object\",\"required\":[\"type\","
             "\"text\"],\"properties\":{\"type\":{\"const\":\"text\"},\"text\":{\"type\":"
             "\"string\"}}}},{\"type\":\"null\"}]},\"tool_calls\":{\"type\":\"array\",\"items\":{"
             "\"type\":\"object\",\"required\":[\"id\",\"function\"],\"properties\":{\"id\":{"
             "\"type\":\"string\"},\"type\":{\"const\":\"function\"},\"function\":{\"type\":"
             "\"object\",\"required\":[\"name\"],\"properties\":{\"name\":{\"type\":\"string\"},"
             "\"arguments\":{\"type\":\"string\"}}}}}},\"tool_call_id\":{\"type\":\"string\"},"
             "\"reasoning\":{\"type\":\"string\"},\"reasoning_content\":{\"type\":"
             "\"string\"}}}}",
             "The conversation, rendered by the model's chat template."),
    {.name = "max_completion_tokens",
     .type = FIELD_INT,
     AT(max_completion_tokens),
     GIVEN(has_max_completion_tokens),
     .lo = 1,
     .hi = INT32_MAX,
     .help = "The newer name of max_tokens; takes precedence over it."},
    {.name = "logprobs",
     .type = FIELD_BOOL,
     .only = ROUTE_CHAT,
     AT(chat_logprobs),
     .given = -1,
     .help = "The log-probabilities of the answer's tokens."},
    {.name = "top_logprobs",
     .type = FIELD_CUSTOM,
     .only = ROUTE_CHAT,
     .given = offsetof(struct completion, has_top_logprobs),
     .read = read_top_logprobs,
     .schema = "{\"type\":\"integer\",\"minimum\":0,\"maximum\":@logprobs}",
     .help = "Also those of this many likeliest tokens; with logprobs: true."},
    {.name = "add_generation_prompt",
     .type = FIELD_BOOL,
     .only = ROUTE_CHAT,
     AT(add_generation_prompt),
     GIVEN(has_add_generation_prompt),
     .help = "Start the assistant's turn after the messages; true by default."},
    {.name = "continue_final_message",
     .type = FIELD_BOOL,
     .only = ROUTE_CHAT,
     AT(continue_final_message),
     .given = -1,
     .help = "Continue the last message instead of starting a turn."},
    ROW_CHAT("chat_template_kwargs", read_any_object, "{\"type\":\"object\"}",
             "Further variables for the chat template."),
    ROW_CHAT("tools", read_list,
             "{\"type\":\"array\",\"maxItems\":512,\"items\":{\"type\":\"object\",\"required\":["
             "\"type\",\"function\"],\"properties\":{\"type\":{\"const\":\"function\"},"
             "\"function\":" FUNCTION_SCHEMA "}}}",
             "Functions that the model may call."),
    ROW_CHAT("tool_choice", read_tool_choice,
             "{\"oneOf\":[{\"enum\":[\"none\",\"auto\",\"required\"]},{\"type\":\"object\","
             "\"required\":[\"type\",\"function\"],\"properties\":{\"type\":{\"const\":"
             "\"function\"},\"function\":{\"type\":\"object\",\"required\":[\"name\"],"
             "\"properties\":{\"name\":{\"type\":\"string\"}}}}}]}",
             "Whether a tool is called: auto (as the model wants) with tools, none, required, or "
             "the one that is named."),
    {.name = "parallel_tool_calls",
     .type = FIELD_BOOL,
     .only = ROUTE_CHAT,
     AT(parallel_tool_calls),
     .given = -1,
     .help = "Whether an answer may have several calls; true by default."},
    ROW_CHAT("functions", read_list,
             "{\"type\":\"array\",\"maxItems\":512,\"items\":" FUNCTION_SCHEMA "}",
             "The older form of tools; the answer has function_call."),
    ROW_CHAT("function_call", read_tool_choice,
             "{\"oneOf\":[{\"enum\":[\"none\",\"auto\"]},{\"type\":\"object\",\"required\":["
             "\"name\"],\"properties\":{\"name\":{\"type\":\"string\"}}}]}",
             "The older form of tool_choice."),
    ROW_CHAT("reasoning_effort", read_word,
             "{\"enum\":[\"none\",\"minimal\",\"low\",\"medium\",\"high\",\"xhigh\","
             "\"max\"]}",
             "A variable of the chat template; none also sets enable_thinking to false."),
    ROW_CHAT("verbosity", read_word, "{\"enum\":[\"low\",\"medium\",\"high\"]}",
             "A variable of the chat template."),
    ROW_CHAT("modalities", read_modalities,
             "{\"type\":\"array\",\"minItems\":1,\"maxItems\":1,\"items\":{\"const\":"
             "\"text\"}}",
             "Answers are text."),
    ROW_CHAT("prediction", read_any_object, "{\"type\":\"object\"}",
             "Accepted: a guess of the answer changes nothing in it."),
    ROW_CHAT("metadata", read_any_object, "{\"type\":\"object\"}", "Accepted, but not stored."),
    {.name = "store",
     .type = FIELD_BOOL,
     .only = ROUTE_CHAT,
     AT(ignored_bool),
     .given = -1,
     .help = "Accepted; answers are never stored."},
    ROW_CHAT("service_tier", read_word,
             "{\"enum\":[\"auto\",\"default\",\"flex\",\"scale\",\"priority\"]}",
             "Accepted; the server has one tier (see priority)."),
    ROW_ACCEPTED("prompt_cache_key", "Accepted: equal prefixes share their cache without a key."),
    ROW_CHAT("prompt_cache_retention", read_word,
             "{\"enum\":[\"in-memory\",\"in_memory\",\"24h\"]}",
             "Accepted: prefixes stay cached while there is room."),
    ROW_CHAT("prompt_cache_options", read_any_object, "{\"type\":\"object\"}",
             "Accepted: every prefix is cached, and stays while there is room."),
    ROW_ACCEPTED("safety_identifier", "Accepted, but has no effect."),
    ROW_CHAT_MISSING("chat_template", "templates of clients"),
    ROW_CHAT_MISSING("documents", "documents in prompts"),
    ROW_CHAT_MISSING("audio", "audio"),
    ROW_CHAT_MISSING("web_search_options", "web search"),
    ROW_CHAT_MISSING("moderation", "moderation"),
    ROW_CHAT_MISSING("prompt_logprobs",
                     "log-probabilities of a chat's prompt (/v1/completions has)"),
    ROW_MISSING("guided_whitespace_pattern", "choice of the whitespace in JSON"),
    ROW_MISSING("logits_processors", "logits processors"),
    ROW_MISSING("prompt_embeds", "prompts as embeddings"),
};

const struct field_table completion_fields = {completion_rows, ARRAY_LEN(completion_rows),
                                              ROUTE_COMPLETIONS};
const struct field_table chat_fields = {completion_rows, ARRAY_LEN(completion_rows), ROUTE_CHAT};
