/* The results: latency histograms, the report as table and JSON, the progress bar. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cjson/cJSON.h>

#include "server/bench/bench.h"

/* ---- latency histograms ---- */

/* One bucket per microsecond below LATENCY_SUB, then LATENCY_SUB / 2 per octave. */
static int bucket_of(uint64_t us)
{
    int shift = 0;

    while (us >> shift >= LATENCY_SUB) {
        shift++;
    }
    int i = shift * (LATENCY_SUB / 2) + (int)(us >> shift);
    return MIN(i, LATENCY_OCTAVES * LATENCY_SUB - 1);
}

static double middle_of(int bucket)
{
    if (bucket < LATENCY_SUB) {
        return bucket;
    }
    int shift = bucket / (LATENCY_SUB / 2) - 1;
    int64_t low = (int64_t)(bucket - shift * (LATENCY_SUB / 2)) << shift;
    return (double)low + (double)((1LL << shift) - 1) / 2;
}

void latency_hist_add(struct latency_hist *s, int64_t us)
{
    us = MAX(us, 0);
    s->count[bucket_of((uint64_t)us)]++;
    s->min_us = s->n == 0 ? us : MIN(s->min_us, us);
    s->max_us = MAX(s->max_us, us);
    s->sum_us += (double)us;
    s->n++;
}

double latency_hist_percentile_ms(const struct latency_hist *s, double p)
{
    if (s->n == 0) {
        return NAN;
    }
    uint64_t rank = (uint64_t)MAX(ceil(p / 100 * (double)s->n), 1), seen = 0;
    for (int i = 0; i < LATENCY_OCTAVES * LATENCY_SUB; i++) {
        if ((seen += s->count[i]) >= rank) {
            return MIN(MAX(middle_of(i), (double)s->min_us), (double)s->max_us) / 1e3;
        }
    }
    return (double)s->max_us / 1e3;
}

double latency_hist_mean_ms(const struct latency_hist *s)
{
    return s->n ? s->sum_us / (double)s->n / 1e3 : NAN;
}

/* ---- the report ---- */

struct bench_report {
    cJSON *json;
    char *table;
    size_t table_len;
    FILE *out; /* writes to `table` */
};

int bench_report_new(struct bench_report **ret, const char *what, const struct bench_options *o,
                     struct err *e)
{
    struct bench_report *r = calloc(1, sizeof(*r));

    if (r) {
        r->json = cJSON_CreateObject();
    }
    if (r && r->json) {
        r->out = open_memstream(&r->table, &r->table_len);
    }
    if (!r || !r->out) {
        bench_report_free(r);
        return err_nomem(e, "the report");
    }
    cJSON_AddStringToObject(r->json, "what", what);
    if (o->name) {
        cJSON_AddStringToObject(r->json, "name", o->name);
    }
    *ret = r;
    return 0;
}

void bench_report_free(struct bench_report *r)
{
    if (!r) {
        return;
    }
    if (r->out) {
        fclose(r->out);
    }
    free(r->table);
    cJSON_Delete(r->json);
    free(r);
}

/* Print about four significant digits. */
static void put_number(FILE *out, double v)
{
    fprintf(out, "%14.*f", fabs(v) >= 1000 || v == floor(v) ? 0 : fabs(v) >= 10 ? 2 : 4, v);
}

void bench_report_number(struct bench_report *r, const char *key, double value, const char *unit)
{
    if (isnan(value)) {
        return; /* not measured */
    }
    cJSON_AddNumberToObject(r->json, key, value);
    fprintf(r->out, "%-28s", key);
    put_number(r->out, value);
    fprintf(r->out, " %s\n", unit);
}

void bench_report_add(struct bench_report *r, const char *key, double value)
{
    cJSON *list = cJSON_GetObjectItemCaseSensitive(r->json, key);

    cJSON_AddItemToArray(list ? list : cJSON_AddArrayToObject(r->json, key),
                         cJSON_CreateNumber(value));
}

void bench_report_text(struct bench_report *r, const char *key, const char *value)
{
    cJSON_AddStringToObject(r->json, key, value);
    fprintf(r->out, "%-28s %s\n", key, value);
}

void bench_report_latency(struct bench_report *r, const char *key, const struct latency_hist *s)
{
    static const struct {
        const char *name;
        double p;
    } points[] = {{"p50", 50}, {"p90", 90}, {"p99", 99}, {"max", 100}};

    if (s->n == 0) {
        return;
    }
    cJSON *o = cJSON_AddObjectToObject(r->json, key);
    cJSON_AddNumberToObject(o, "mean", latency_hist_mean_ms(s));
    fprintf(r->out, "%-28s mean %.3f", key, latency_hist_mean_ms(s));
    for (size_t i = 0; i < ARRAY_LEN(points); i++) {
        double ms = latency_hist_percentile_ms(s, points[i].p);
        cJSON_AddNumberToObject(o, points[i].name, ms);
        fprintf(r->out, "  %s %.3f", points[i].name, ms);
    }
    fprintf(r->out, "\n");
}

int bench_report_write(const struct bench_report *r, FILE *out, const struct bench_options *o,
                       struct err *e)
{
    fflush(r->out);
    fwrite(r->table, 1, r->table_len, out);
    if (!o->json) {
        return 0;
    }
    char *text = cJSON_PrintUnformatted(r->json);
    if (!text) {
        return err_nomem(e, "the report");
    }
    FILE *f = strcmp(o->json, "-") == 0 ? stdout : fopen(o->json, "a");
    int rc = f && fprintf(f, "%s\n", text) > 0
                 ? 0
                 : err_set(e, ERR_IO, "%s: %s", o->json, strerror(errno));
    if (f && f != stdout && fclose(f) != 0 && rc == 0) {
        rc = err_set(e, ERR_IO, "%s: %s", o->json, strerror(errno));
    }
    cJSON_free(text);
    return rc;
}

/* ---- the progress bar ---- */

void bench_progress(double fraction, const char *text)
{
    static int64_t drawn_us;
    int64_t now_us = clock_us();

    if (now_us - drawn_us < 100000 || !isatty(STDERR_FILENO)) {
        return;
    }
    drawn_us = now_us;
    struct winsize w;
    if (ioctl(STDERR_FILENO, TIOCGWINSZ, &w) != 0 || w.ws_col == 0) {
        w.ws_col = 80;
    }
    int width = MAX(MIN((int)w.ws_col - (int)strlen(text) - 10, 40), 0);
    int full = (int)(fraction * width);
    fprintf(stderr, "\r\033[K%3.0f %% ", fraction * 100);
    for (int i = 0; i < width; i++) {
        fputs(i < full ? "█" : "░", stderr);
    }
    fprintf(stderr, " %s", text);
    fflush(stderr);
}

void bench_progress_end(void)
{
    if (isatty(STDERR_FILENO)) {
        fputs("\r\033[K", stderr);
    }
}
