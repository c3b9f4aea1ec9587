/* `quire bench kernels`: picks the device, the one named or a GPU if there is one;
 * kernels/bench/bench_ops.h does the measuring. */
#include <stdio.h>
#include <string.h>

#include "engine/commands.h"
#include "engine/engine.h"
#include "kernels/bench/bench_ops.h"

int kernels_main(int argc, char **argv)
{
    const char *device = "auto";
    struct err e = {0};
    int n = 0; /* arguments left in argv */

    for (int i = 0; i < argc; i++) {
        if (strcmp(argv[i], "--device") == 0 && i + 1 < argc) {
            device = argv[++i];
        } else {
            argv[n++] = argv[i];
        }
    }
    if (bench_run(device, n, argv, stdout, &e) < 0) {
        fprintf(stderr, "quire: %s\n", e.text);
        return 1;
    }
    return 0;
}
