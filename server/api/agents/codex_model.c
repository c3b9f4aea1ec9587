/* The served model as Codex describes models, for the member `models` of GET /v1/models
 * (openai/codex, codex-rs/protocol/src/openai_models.rs, ModelInfo). Versions of Codex
 * require different members, and drop the whole list where one is missing: an entry has
 * all that any of them requires. An entry without instructions would leave the model
 * without any. */
#include <string.h>

#include "server/api/api.h"
#include "server/api/json_fields.h"

enum { OUTPUT_TOKENS = 10000 }; /* of a command's output that Codex puts into the prompt */

static const char INSTRUCTIONS[] =
    "You are a coding agent. You work in the user's workspace, with the tools that you are given, "
    "until the task is done.\n\n"
    "- Read the code that a change concerns before you change it, and search with rg where it is "
    "installed.\n"
    "- Change what the task needs and no more, in the style of the code around it.\n"
    "- Look at the output of each command before you go on. When one fails, find out why instead "
    "of repeating it.\n"
    "- Leave changes alone that you did not make. Commit, push or delete only when you are asked "
    "to.\n"
    "- When you have finished, run the tests that there are. Then say briefly what you changed, "
    "how you tested it, and what is left to do.";

static void put_text(struct buf *b, const char *name, const char *text)
{
    buf_printf(b, "\"%s\":", name);
    buf_json_string(b, text, strlen(text));
}

/* What the entry says of tools: a shell that takes a command as text, no tool of the
 * service, calls of several functions at once. */
static void put_tools(struct buf *b)
{
    buf_puts(b, ",\"shell_type\":\"shell_command\",\"apply_patch_tool_type\":null,"
                "\"web_search_tool_type\":\"text\",\"supports_search_tool\":false,"
                "\"experimental_supported_tools\":[],\"supports_parallel_tool_calls\":true,"
                "\"input_modalities\":[\"text\"],\"supports_image_detail_original\":false");
}

static void put_instructions(struct buf *b)
{
    buf_putc(b, ',');
    put_text(b, "base_instructions", INSTRUCTIONS);
    buf_puts(b, ",\"model_messages\":{");
    put_text(b, "instructions_template", INSTRUCTIONS);
    buf_puts(b, ",\"instructions_variables\":null},\"include_skills_usage_instructions\":false,"
                "\"include_plugin_usage_instructions\":false,"
                "\"include_apps_usage_instructions\":false");
}

void api_codex_model(struct buf *b, const struct api_context *ctx)
{
    int32_t len = ctx->info.max_model_len;

    buf_putc(b, '{');
    put_text(b, "slug", ctx->info.model_name);
    buf_putc(b, ',');
    put_text(b, "display_name", ctx->info.model_name);
    buf_printf(b,
               ",\"description\":null,\"context_window\":%d,\"max_context_window\":%d,"
               "\"effective_context_window_percent\":95,"
               "\"truncation_policy\":{\"mode\":\"tokens\",\"limit\":%d}",
               len, len, MIN(OUTPUT_TOKENS, len / 4));
    put_tools(b);
    /* Reasoning is neither summarised nor asked for by a level that the model may not
     * know. */
    buf_puts(b, ",\"supported_reasoning_levels\":[],\"supports_reasoning_summaries\":false,"
                "\"supports_reasoning_summary_parameter\":false,"
                "\"default_reasoning_summary\":\"none\",\"support_verbosity\":false,"
                "\"default_verbosity\":null");
    put_instructions(b);
    buf_puts(b, ",\"visibility\":\"list\",\"supported_in_api\":true,\"priority\":0,"
                "\"availability_nux\":null,\"upgrade\":null}");
}
