/* `quire bench kernels` as a program of its own: build/tests/bench/kernels [--device
 * cuda] [what ...] (kernels/bench/bench_ops.h). */
#include "engine/commands.h"
#include "engine/engine.h"

int main(int argc, char **argv)
{
    return kernels_main(argc - 1, argv + 1);
}
