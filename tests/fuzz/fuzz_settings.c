/* The YAML file of settings. covers: config/settings/settings_yaml.c */
#include "config/settings/settings_table.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct settings s = {0};
    struct err e = {0};

    if (settings_parse_yaml(&s, (const char *)data, size, "fuzz.yaml", &e) < 0 &&
        (e.code >= 0 || e.text[0] == '\0')) {
        __builtin_trap(); /* a refusal without its sentence */
    }
    settings_release(&s);
    return 0;
}
