/* Subcommands of `quire` that the engine has, and the service of a node without HTTP.
 */
#ifndef QUIRE_ENGINE_COMMANDS_H
#define QUIRE_ENGINE_COMMANDS_H

#include "config/settings/settings.h"

/* `quire rank`, a process that ranks.c starts: arguments behind the name; the exit
 * status. */
int worker_main(int argc, char **argv);
/* `quire serve` where node_rank > 0: the ranks of this node, until rank 0 stops (0) or
 * one fails (ERR_DEVICE; without a text where that rank has logged why). */
int node_run(const struct settings *s, struct err *e);
/* `quire bench kernels`: arguments behind the word kernels; the exit status. */
int kernels_main(int argc, char **argv);
/* `quire simulate`: arguments behind the subcommand's name; the exit status. */
int simulate_main(int argc, char **argv);

#endif
