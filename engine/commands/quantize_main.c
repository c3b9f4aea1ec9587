/* `quire quantize`: a quantised directory made of a model's (models/quantise/). */
#include <stdio.h>
#include <string.h>

#include "engine/commands.h"
#include "models/quantise/quantise.h"

static const char USAGE[] =
    "usage: quire quantize FROM TO --format fp8|int8|int4\n\n"
    "Writes the directory TO, which must not exist: the model of the Hugging Face directory\n"
    "FROM with its linear layers rounded to nearest, in the form of compressed-tensors.\n"
    "Prints the error of each weight: root mean square, as a share of the weight's own.\n";

static bool format_named(const char *name, enum weight_format_id *ret)
{
    static const struct {
        const char *name;
        enum weight_format_id id;
    } FORMATS[] = {{"fp8", FORMAT_FP8}, {"int8", FORMAT_INT8}, {"int4", FORMAT_INT4}};

    for (size_t i = 0; i < ARRAY_LEN(FORMATS); i++) {
        if (strcmp(name, FORMATS[i].name) == 0) {
            *ret = FORMATS[i].id;
            return true;
        }
    }
    return false;
}

int quantize_main(int argc, char **argv)
{
    enum weight_format_id format;
    struct err e = {0};

    if (argc > 0 && strcmp(argv[0], "--help") == 0) {
        printf("%s", USAGE);
        return 0;
    }
    if (argc != 4 || strcmp(argv[2], "--format") != 0 || !format_named(argv[3], &format)) {
        fprintf(stderr, "%s", USAGE);
        return 2;
    }
    if (quantise_directory(argv[0], argv[1], format, stdout, &e) < 0) {
        fprintf(stderr, "quire quantize: %s\n", e.text);
        return 1;
    }
    return 0;
}
