/* Subcommands of `quire` that the engine implements, and the service of a node that has
 * no HTTP server. */
#ifndef QUIRE_ENGINE_COMMANDS_H
#define QUIRE_ENGINE_COMMANDS_H

#include "config/settings/settings.h"

/* `quire rank`, the process that worker_spawn starts. Takes the arguments after the
 * subcommand's name and returns the exit status. */
int worker_main(int argc, char **argv);
/* `quire serve` with node_rank > 0: runs this node's ranks until rank 0 stops (returns
 * 0) or one of them fails (ERR_DEVICE; the text is empty if that rank has logged the
 * reason itself). */
int node_run(const struct settings *s, struct err *e);
/* `quire bench kernels`: takes the arguments after `kernels`, returns the exit
 * status. */
int kernels_main(int argc, char **argv);
/* `quire simulate`: takes the arguments after `simulate`, returns the exit status. */
int simulate_main(int argc, char **argv);
/* `quire quantize`: likewise. */
int quantize_main(int argc, char **argv);
/* `quire models`: likewise. */
int models_main(int argc, char **argv);

#endif
