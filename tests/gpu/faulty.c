/* A plugin for test_faults.py. It wraps the real one, named by QUIRE_TEST_PLUGIN, and
 * loses the device in the middle of step QUIRE_TEST_LOST_AT: an operation gets an
 * invalid address, so the driver ends the context as for any fault. */
#include <dlfcn.h>
#include <stdlib.h>

#include "kernels/backend.h"

static struct backend_ops ops;
static int (*real_step_end)(struct backend *b, struct err *e);
static struct mat row;
static long steps_left;

static int step_end(struct backend *b, struct err *e)
{
    if (steps_left-- == 0) {
        struct mat nowhere = row;
        nowhere.data = (char *)row.data + (1ll << 46);
        ops.add(b, nowhere, row, false);
    }
    return real_step_end(b, e);
}

__attribute__((visibility("default"))) int
quire_backend_open(struct backend **ret, int abi, const struct backend_config *k, struct err *e);

int quire_backend_open(struct backend **ret, int abi, const struct backend_config *k, struct err *e)
{
    void *real = dlopen(getenv("QUIRE_TEST_PLUGIN"), RTLD_NOW | RTLD_LOCAL);
    backend_open_fn *open = real ? (backend_open_fn *)dlsym(real, "quire_backend_open") : NULL;
    int rc = open ? open(ret, abi, k, e) : -1;

    if (rc < 0) {
        return rc;
    }
    ops = *(*ret)->ops;
    real_step_end = ops.step_end;
    ops.step_end = step_end;
    (*ret)->ops = &ops;
    steps_left = atol(getenv("QUIRE_TEST_LOST_AT"));
    return ops.scratch(*ret, 1, 64, DTYPE_F32, &row, e);
}
