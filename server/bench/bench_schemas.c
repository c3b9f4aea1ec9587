/* The file of --schemas: a JSON Schema a line, that the answers of a run are
 * constrained to in turn. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "server/bench/bench.h"

static int add_line(struct bench_schemas *s, int32_t *cap, char *line, struct err *e)
{
    line[strcspn(line, "\r\n")] = '\0';
    if (line[strspn(line, " \t")] == '\0') {
        return 0;
    }
    if (s->n == *cap) {
        int32_t more = MAX(*cap * 2, 64);
        char **text = realloc(s->text, (size_t)more * sizeof(*text));
        if (!text) {
            return err_nomem(e, "the schemas");
        }
        s->text = text;
        *cap = more;
    }
    s->text[s->n] = strdup(line);
    if (!s->text[s->n]) {
        return err_nomem(e, "the schemas");
    }
    s->n++;
    return 0;
}

int bench_schemas_read(struct bench_schemas *ret, const char *path, struct err *e)
{
    struct bench_schemas s = {0};
    FILE *f = fopen(path, "r");
    char *line = NULL;
    size_t size = 0;
    int32_t cap = 0;
    int rc = 0;

    if (!f) {
        return err_set(e, ERR_IO, "%s: %s", path, strerror(errno));
    }
    while (rc == 0 && getline(&line, &size, f) >= 0) {
        rc = add_line(&s, &cap, line, e);
    }
    free(line);
    fclose(f);
    if (rc == 0 && s.n == 0) {
        rc = err_set(e, ERR_INVALID, "%s holds no schema", path);
    }
    if (rc < 0) {
        bench_schemas_release(&s);
        return rc;
    }
    *ret = s;
    return 0;
}

void bench_schemas_release(struct bench_schemas *s)
{
    for (int32_t i = 0; i < s->n; i++) {
        free(s->text[i]);
    }
    free(s->text);
    *s = (struct bench_schemas){0};
}
