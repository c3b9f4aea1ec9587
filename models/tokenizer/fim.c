#include "models/tokenizer/fim.h"

#include <string.h>

/* The tokens' texts in the vocabularies of the families. */
static const struct {
    const char *prefix, *suffix, *middle, *end;
} FORMATS[] = {
    {"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", NULL}, /* Qwen2.5-Coder, CodeGemma */
    {"<fim_prefix>", "<fim_suffix>", "<fim_middle>", NULL},       /* StarCoder 1 and 2, Granite */
    {"<fim-prefix>", "<fim-suffix>", "<fim-middle>", NULL},       /* SantaCoder */
    /* Code Llama: U+2581 for a space */
    {"\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", "\u2581<EOT>"},
    {"<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>",
     NULL}, /* DeepSeek-Coder */
};

static int32_t find(const struct tokenizer *t, const char *text)
{
    return text ? tokenizer_find(t, text, strlen(text)) : -1;
}

bool fim_find(const struct tokenizer *t, struct fim *ret)
{
    for (size_t i = 0; i < ARRAY_LEN(FORMATS); i++) {
        struct fim f = {find(t, FORMATS[i].prefix), find(t, FORMATS[i].suffix),
                        find(t, FORMATS[i].middle), find(t, FORMATS[i].end)};
        if (f.prefix >= 0 && f.suffix >= 0 && f.middle >= 0) {
            *ret = f;
            return true;
        }
    }
    return false;
}
