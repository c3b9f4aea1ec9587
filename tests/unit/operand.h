/* The type in which products take their inputs. */
#ifndef QUIRE_TESTS_UNIT_OPERAND_H
#define QUIRE_TESTS_UNIT_OPERAND_H

#include <string.h>

#include "kernels/backend.h"

/* With weights of type t: AVX-512-bf16 by pairs and AMX round x to the weights' type,
 * as activations of a GPU are. */
static inline enum dtype operand_type(const struct backend *b, enum dtype t)
{
    bool pairs = strstr(b->device, "avx512bf16") && !strstr(b->device, "by floats");
    bool rounds = pairs || strstr(b->device, "amx");

    return rounds && t == DTYPE_BF16 ? DTYPE_BF16 : backend_act_dtype(b, t);
}

#endif
