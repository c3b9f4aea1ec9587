/* `quire bench`: dispatch to its three benchmarks. */
#include "server/bench/bench.h"

#include <string.h>

#include "engine/commands.h"
#include "engine/engine.h"

static bool wants_help(int argc, char **argv)
{
    for (int i = 0; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            return true;
        }
    }
    return argc == 0;
}

int bench_main(int argc, char **argv)
{
    struct bench_options o;
    struct err e = {0};
    int n;

    if (wants_help(argc, argv)) {
        bench_options_help(stdout);
        return argc == 0 ? 2 : 0;
    }
    if (strcmp(argv[0], "kernels") == 0) {
        return kernels_main(argc - 1, argv + 1);
    }
    int rc = bench_options_read(&o, argc - 1, argv + 1, &n, &e);
    if (rc == 0 && strcmp(argv[0], "offline") == 0) {
        rc = bench_offline(&o, n, argv + 1, &e);
    } else if (rc == 0 && strcmp(argv[0], "serve") == 0) {
        rc = n > 0 ? err_set(&e, ERR_INVALID, "bench serve has no flag %s", argv[1])
                   : bench_serve(&o, &e);
    } else if (rc == 0) {
        rc = err_set(&e, ERR_INVALID, "there is no bench %s; offline, serve and kernels exist",
                     argv[0]);
    }
    bench_progress_end();
    if (rc < 0) {
        fprintf(stderr, "quire: %s\n", e.text);
    }
    return rc < 0 ? 1 : 0;
}
