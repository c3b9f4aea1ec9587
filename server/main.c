/* `quire`: dispatch to the subcommands. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "config/settings/settings.h"
#include "engine/commands.h"
#include "engine/engine.h"
#include "server/bench/bench.h"
#include "server/commands.h"

extern char **environ;

static void print_help(FILE *out)
{
    fprintf(out,
            "quire " QUIRE_VERSION ": serves large language models to OpenAI clients\n\n"
            "usage: quire COMMAND [flags]\n\n"
            "  serve [MODEL]  answer requests; MODEL: a directory, GGUF file, hub name, or null\n"
            "  bench          measure the engine in this process, or a server: quire bench --help\n"
            "  simulate       the scheduler under a cost model, a day in seconds: quire simulate "
            "--help\n"
            "  quantize       write a model's directory with quantised weights: quire quantize "
            "--help\n"
            "  models         list the architectures that can be served\n"
            "  config         print every setting and where its value came from\n"
            "  health         ask a running server whether it is ready (exit status 0 or 1)\n"
            "  version        print the version\n"
            "  help           print this\n\n"
            "quire serve --help lists the settings.\n");
}

static int config_main(int argc, char **argv, char **env)
{
    struct settings s;
    struct err e = {0};
    bool help = false;

    /* For scripts/make-docs and deploy/make-man. */
    if (argc == 2 && strcmp(argv[0], "--list") == 0 && strcmp(argv[1], "json") == 0) {
        settings_list(stdout);
        return 0;
    }
    if (argc == 1 && strcmp(argv[0], "--man") == 0) {
        settings_man(stdout);
        return 0;
    }
    if (settings_load(&s, argc, argv, env, &help, &e)) {
        fprintf(stderr, "quire: %s\n", e.text);
        return 2;
    }
    if (help) {
        settings_help(stdout);
    } else {
        settings_print(&s, stdout);
    }
    settings_release(&s);
    return 0;
}

static int run_command(const char *name, int n, char **rest)
{
    if (strcmp(name, "serve") == 0) {
        return serve_main(n, rest, environ);
    }
    if (strcmp(name, "bench") == 0) {
        return bench_main(n, rest);
    }
    if (strcmp(name, "simulate") == 0) {
        return simulate_main(n, rest);
    }
    if (strcmp(name, "quantize") == 0) {
        return quantize_main(n, rest);
    }
    if (strcmp(name, "models") == 0) {
        return models_main(n, rest);
    }
    if (strcmp(name, "rank") == 0) { /* internal: started by serve, so not in the help */
        return worker_main(n, rest);
    }
    if (strcmp(name, "config") == 0) {
        return config_main(n, rest, environ);
    }
    if (strcmp(name, "health") == 0) {
        return health_main(n, rest, environ);
    }
    if (strcmp(name, "version") == 0 || strcmp(name, "--version") == 0) {
        printf("quire " QUIRE_VERSION "\n");
        return 0;
    }
    if (strcmp(name, "help") == 0 || strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) {
        print_help(stdout);
        return 0;
    }
    fprintf(stderr, "quire: no command '%.60s'\n\n", name);
    print_help(stderr);
    return 2;
}

/* If the process was started with one of the first three descriptors closed, a file
 * opened later would get its number, and log lines would be written into that file. */
static void reserve_standard_fds(void)
{
    int fd = open("/dev/null", O_RDWR);

    while (fd >= 0 && fd <= STDERR_FILENO) {
        fd = dup(fd);
    }
    if (fd > STDERR_FILENO) {
        close(fd);
    }
}

int main(int argc, char **argv)
{
    reserve_standard_fds();
    int status = run_command(argc > 1 ? argv[1] : "help", argc > 2 ? argc - 2 : 0,
                             argv + (argc > 2 ? 2 : argc));
    /* The result goes to standard output, so a full disk is a failure. */
    if ((fflush(stdout) != 0 || ferror(stdout)) && status == 0) {
        fprintf(stderr, "quire: standard output cannot be written; is the disk full?\n");
        status = 1;
    }
    return status;
}
