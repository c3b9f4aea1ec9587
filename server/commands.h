/* The subcommands of `quire`. Each takes the arguments after its name and returns an
 * exit status. */
#ifndef QUIRE_SERVER_COMMANDS_H
#define QUIRE_SERVER_COMMANDS_H

int serve_main(int argc, char **argv, char **env);
int health_main(int argc, char **argv, char **env);

#endif
