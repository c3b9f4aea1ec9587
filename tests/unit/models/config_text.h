/* Reading a model's configuration from the text of a config.json. */
#ifndef QUIRE_TESTS_UNIT_MODELS_CONFIG_TEXT_H
#define QUIRE_TESTS_UNIT_MODELS_CONFIG_TEXT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "models/checkpoint/hfconfig_internal.h"

static struct model_config c; /* what was read last */

static void read_config(const char *text)
{
    struct generation_defaults gen;
    struct err e = {0};
    bool dtype_given;

    if (model_config_parse(&c, &gen, &dtype_given, text, strlen(text), NULL, 0, &e) != 0) {
        fail_msg("%s", e.text);
    }
    assert_true(dtype_given);
}

static void assert_shape(int32_t hidden, int32_t heads, int32_t kv_heads, int32_t head_dim,
                         int32_t positions)
{
    assert_int_equal(c.hidden, hidden);
    assert_int_equal(c.n_heads, heads);
    assert_int_equal(c.n_kv_heads, kv_heads);
    assert_int_equal(c.head_dim, head_dim);
    assert_int_equal(c.max_positions, positions);
}

#endif
