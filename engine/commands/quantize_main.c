/* `quire quantize`: a quantised directory made of a model's (models/quantise/).
 *
 * A child does the work, so that what it has written is removed whatever ends it: a
 * signal, or a kernel that is out of memory. */
#include <errno.h>
#include <float.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/commands.h"
#include "models/quantise/quantise.h"
#include "models/tokenizer/tokenizer.h"

enum { MOST_TOKENS = 1 << 20, DEFAULT_TOKENS = 8192, MOST_TEXT_BYTES = 64 << 20 };

static const char USAGE[] =
    "usage: quire quantize FROM TO --format fp8|int8|int4|nvfp4|mxfp4 [--asymmetric]\n"
    "                      [--text FILE [--tokens N] [--static] [--smooth ALPHA | --search]]\n"
    "                      [--report]\n\n"
    "Writes the directory TO, which must not exist: the model of the Hugging Face directory\n"
    "FROM with its linear layers rounded to nearest, in the form of compressed-tensors.\n"
    "Prints the error of each weight: root mean square, as a share of the weight's own.\n\n"
    "  --asymmetric    int8, int4: zero points, so that codes range from the least value of a\n"
    "                  row or group to its greatest\n"
    "  --text FILE     also prints the perplexity of the second half of this text before and\n"
    "                  after; the first half calibrates\n"
    "  --tokens N      of the text at most, default 8192\n"
    "  --static        fp8, int8: a scale for all activations of a product, by the greatest of\n"
    "                  the text's first half; without it each token gets its own\n"
    "  --smooth ALPHA  int8: move the size of large activations into the weights (SmoothQuant),\n"
    "                  0 < ALPHA < 1, usually 0.5\n"
    "  --search        int8, int4: choose how far for each product, by the error of its output\n"
    "  --report        write what is printed to " QUANTISE_REPORT " in TO instead\n";

struct arguments {
    const char *from, *to, *text; /* text: a file */
    int32_t tokens;               /* of it, at most */
    bool report;                  /* into a file of `to` */
    struct quantise_options options;
};

static bool format_named(const char *name, struct quantise_options *ret)
{
    static const struct {
        const char *name;
        enum weight_format_id id;
        int32_t fp4_group;
    } FORMATS[] = {{"fp8", FORMAT_FP8, 0},
                   {"int8", FORMAT_INT8, 0},
                   {"int4", FORMAT_INT4, 0},
                   {"nvfp4", FORMAT_FP4, 16},
                   {"mxfp4", FORMAT_FP4, 32}};

    for (size_t i = 0; i < ARRAY_LEN(FORMATS); i++) {
        if (strcmp(name, FORMATS[i].name) == 0) {
            ret->format = FORMATS[i].id;
            ret->fp4_group = FORMATS[i].fp4_group;
            return true;
        }
    }
    return false;
}

static bool number(const char *text, double least, double most, double *ret)
{
    char *end;

    *ret = strtod(text, &end);
    return end > text && !*end && *ret >= least && *ret <= most;
}

/* One option with its value. */
static bool read_option(struct arguments *a, const char *name, const char *value)
{
    double x;

    if (strcmp(name, "--format") == 0) {
        return format_named(value, &a->options);
    }
    if (strcmp(name, "--text") == 0) {
        a->text = value;
        return true;
    }
    if (strcmp(name, "--tokens") == 0 && number(value, 8, MOST_TOKENS, &x)) {
        a->tokens = (int32_t)x;
        return true;
    }
    if (strcmp(name, "--smooth") == 0 && number(value, FLT_MIN, 0.99, &x)) {
        a->options.smooth = (float)x;
        return true;
    }
    return false;
}

/* argv[*i], an option: alone, as "--name=value" or before its value. false: there is no
 * such option, or it does not take this value. */
static bool read_flag(struct arguments *a, int argc, char **argv, int *i)
{
    const struct {
        const char *name;
        bool *ret;
    } switches[] = {{"--search", &a->options.search},
                    {"--static", &a->options.fixed},
                    {"--asymmetric", &a->options.zeros},
                    {"--report", &a->report}};
    char name[32];
    const char *equals = strchr(argv[*i], '=');

    for (size_t k = 0; k < ARRAY_LEN(switches); k++) {
        if (strcmp(argv[*i], switches[k].name) == 0) {
            *switches[k].ret = true;
            return true;
        }
    }
    if (!equals) {
        const char *value = *i + 1 < argc ? argv[*i + 1] : "";
        return read_option(a, argv[(*i)++], value);
    }
    snprintf(name, sizeof(name), "%.*s", (int)(equals - argv[*i]), argv[*i]);
    return read_option(a, name, equals + 1);
}

static bool read_arguments(struct arguments *a, int argc, char **argv)
{
    for (int i = 0; i < argc; i++) {
        int at = i;
        bool taken = true;
        if (strncmp(argv[i], "--", 2) == 0) {
            taken = read_flag(a, argc, argv, &i);
        } else if (!a->from) {
            a->from = argv[i];
        } else if (!a->to) {
            a->to = argv[i];
        } else {
            taken = false;
        }
        if (!taken) {
            fprintf(stderr, "quire quantize: %s%s%s is not understood\n", argv[at],
                    i > at && i < argc ? " " : "", i > at && i < argc ? argv[i] : "");
            return false;
        }
    }
    bool calibrated = a->options.search || a->options.smooth > 0 || a->options.fixed;
    return a->to && a->options.format != FORMAT_F32 && (!calibrated || a->text) &&
           !(a->options.search && a->options.smooth > 0);
}

/* *ret, of *ret_len bytes, is the caller's. */
static int read_text(const char *path, char **ret, size_t *ret_len, struct err *e)
{
    FILE *f = fopen(path, "rbe");
    char *text = f ? malloc(MOST_TEXT_BYTES) : NULL;
    size_t n = text ? fread(text, 1, MOST_TEXT_BYTES, f) : 0;
    int rc = !f          ? err_set(e, ERR_IO, "%s: %s", path, strerror(errno))
             : !text     ? err_nomem(e, path)
             : ferror(f) ? err_set(e, ERR_IO, "%s: not readable", path)
             : n == MOST_TEXT_BYTES
                 ? err_set(e, ERR_FULL, "%s: a text of less than %d bytes is needed", path,
                           MOST_TEXT_BYTES)
                 : 0;

    if (f) {
        fclose(f);
    }
    if (rc < 0) {
        free(text);
        return rc;
    }
    *ret = text;
    *ret_len = n;
    return 0;
}

/* The tokens of the text by FROM's tokenizer, at most a->tokens of them. */
static int encode(struct arguments *a, struct token_list *ret, struct err *e)
{
    struct tokenizer *t;
    char *text;
    size_t len;
    int rc = read_text(a->text, &text, &len, e);

    if (rc < 0) {
        return rc;
    }
    rc = tokenizer_open(&t, a->from, e);
    if (rc == 0) {
        rc = tokenizer_encode(t, text, len, false, MOST_TEXT_BYTES, ret, e);
        tokenizer_free(t);
    }
    free(text);
    a->options.token = ret->id;
    a->options.n_tokens = MIN(ret->n, a->tokens);
    return rc;
}

/* The child's work; returns the exit status. */
static int work(struct arguments *a)
{
    struct token_list tokens = {0};
    struct err e = {0};
    int rc = a->text ? encode(a, &tokens, &e) : 0;

    if (rc == 0 && a->text && tokens.n == 0) {
        rc = err_set(&e, ERR_INVALID, "%s: an empty text", a->text);
    }
    rc = rc < 0 ? rc
                : quantise_directory(a->from, a->to, &a->options, a->report ? NULL : stdout, &e);
    token_list_release(&tokens);
    if (rc < 0) {
        fprintf(stderr, "quire quantize: %s\n", e.text);
    }
    return rc < 0 ? 1 : 0;
}

/* Signals that end a command, unless whatever started it has them ignored. */
static void ending_signals(sigset_t *ret)
{
    static const int ENDING[] = {SIGINT, SIGTERM, SIGHUP};
    struct sigaction now;

    sigemptyset(ret);
    for (size_t i = 0; i < ARRAY_LEN(ENDING); i++) {
        if (sigaction(ENDING[i], NULL, &now) == 0 && now.sa_handler != SIG_IGN) {
            sigaddset(ret, ENDING[i]);
        }
    }
    sigaddset(ret, SIGCHLD);
}

/* Wait for the child, which gets the signals of `waited` that come. Returns its wait
 * status. */
static int wait_for(pid_t child, const sigset_t *waited)
{
    int status = 0, sig;

    while (waitpid(child, &status, WNOHANG) == 0) {
        if (sigwait(waited, &sig) == 0 && sig != SIGCHLD) {
            kill(child, sig);
        }
    }
    return status;
}

/* The exit status, when the child has ended. */
static int finish(const struct arguments *a, pid_t child, int status)
{
    char partial[4096];
    struct err e = {0};

    if (!WIFSIGNALED(status)) {
        return WEXITSTATUS(status);
    }
    if (quantise_partial(partial, sizeof(partial), a->to, child, &e) == 0) {
        quantise_discard(partial);
    }
    fprintf(stderr, "quire quantize: ended by signal %d (%s); %s was not written\n",
            WTERMSIG(status), strsignal(WTERMSIG(status)), a->to);
    return 1;
}

int quantize_main(int argc, char **argv)
{
    struct arguments a = {.tokens = DEFAULT_TOKENS};
    sigset_t waited, before;

    if (argc > 0 && strcmp(argv[0], "--help") == 0) {
        printf("%s", USAGE);
        return 0;
    }
    if (!read_arguments(&a, argc, argv)) {
        fprintf(stderr, "%s", USAGE);
        return 2;
    }
    signal(SIGCHLD, SIG_DFL); /* ignored, it would leave no status to wait for */
    ending_signals(&waited);
    sigprocmask(SIG_BLOCK, &waited, &before);
    pid_t child = fork();
    if (child < 0) {
        fprintf(stderr, "quire quantize: fork: %s\n", strerror(errno));
        return 1;
    }
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGTERM);
        sigprocmask(SIG_SETMASK, &before, NULL);
        return work(&a);
    }
    return finish(&a, child, wait_for(child, &waited));
}
