/* Progress of a download on stderr: a bar that is redrawn if stderr is a terminal, else
 * a line of the log from time to time. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "config/base/log.h"
#include "models/hub/hub_internal.h"

enum { DRAW_EVERY_US = 100 * 1000, LOG_EVERY_US = 10 * 1000 * 1000, BAR_CHARS = 24 };

static double gigabytes(int64_t n)
{
    return (double)n / 1e9;
}

/* Bytes per second since the start. */
static double speed(const struct hub_progress *p)
{
    double seconds = (double)(clock_us() - p->start_us) / 1e6;

    return seconds > 0 ? (double)(p->done - p->first_done) / seconds : 0;
}

static void draw(const struct hub_progress *p)
{
    char bar[BAR_CHARS + 1];
    int full = p->total > 0 ? (int)(p->done * BAR_CHARS / p->total) : BAR_CHARS;
    double rate = speed(p), left_s = rate > 0 ? (double)(p->total - p->done) / rate : 0;

    memset(bar, '-', BAR_CHARS);
    memset(bar, '#', (size_t)MIN(MAX(full, 0), BAR_CHARS));
    bar[BAR_CHARS] = '\0';
    fprintf(stderr, "\r%.48s [%s] %.2f of %.2f GB, %.1f MB/s, %d:%02d left \033[K", p->model, bar,
            gigabytes(p->done), gigabytes(p->total), rate / 1e6, (int)MIN(left_s / 60, 9999),
            (int)(left_s < 6e5 ? left_s : 0) % 60);
}

void hub_progress_begin(struct hub_progress *p, const char *model, int32_t n_files, int64_t total,
                        int64_t done)
{
    int64_t now = clock_us();

    *p = (struct hub_progress){.model = model,
                               .total = total,
                               .done = done,
                               .first_done = done,
                               .start_us = now,
                               .reported_us = now,
                               .n_files = n_files,
                               .terminal = isatty(STDERR_FILENO)};
    if (!p->terminal) {
        log_event(LOG_INFO, "downloading", LOG_STR("model", model), LOG_I64("files", n_files),
                  LOG_I64("bytes", total), LOG_I64("done", done));
    }
}

void hub_progress_step(struct hub_progress *p, int64_t done)
{
    int64_t now = clock_us();

    p->done = done;
    if (now - p->reported_us < (p->terminal ? DRAW_EVERY_US : LOG_EVERY_US)) {
        return;
    }
    p->reported_us = now;
    if (p->terminal) {
        draw(p);
    } else {
        log_event(LOG_INFO, "downloading", LOG_STR("model", p->model), LOG_I64("bytes", p->total),
                  LOG_I64("done", done), LOG_F64("mb_per_s", speed(p) / 1e6));
    }
}

void hub_progress_end(struct hub_progress *p, bool ok)
{
    if (p->terminal) {
        draw(p);
        fputc('\n', stderr);
    } else if (ok) {
        log_event(LOG_INFO, "downloaded", LOG_STR("model", p->model), LOG_I64("files", p->n_files),
                  LOG_I64("bytes", p->total),
                  LOG_F64("seconds", (double)(clock_us() - p->start_us) / 1e6));
    }
}
