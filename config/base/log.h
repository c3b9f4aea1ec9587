/* The log: one line per event on stderr, `ts level event key=value …` or one JSON
 * object (setting log-format). Values are quoted and escaped where necessary; a
 * prompt's text is logged only with log-prompts. A line that cannot be written at once
 * (full disk, closed or full pipe) is dropped and counted: logging neither fails nor
 * blocks.
 *
 *     log_event(LOG_INFO, "listening", LOG_STR("host", host), LOG_I64("port", port));
 */
#ifndef QUIRE_CONFIG_BASE_LOG_H
#define QUIRE_CONFIG_BASE_LOG_H

#include "config/base/base.h"

enum log_level { LOG_DEBUG, LOG_INFO, LOG_WARN, LOG_ERROR };
enum log_format { LOG_TEXT, LOG_JSON };

struct log_field {
    const char *key;
    enum {
        LOG_FIELD_STR,
        LOG_FIELD_TEXT,
        LOG_FIELD_I64,
        LOG_FIELD_F64
    } type;          /* which members hold the value */
    const char *str; /* of _STR, NUL-terminated, and of _TEXT */
    size_t len;      /* of _TEXT */
    int64_t i64;     /* of _I64 */
    double f64;      /* of _F64 */
};

/* Functions rather than initializers, so that a value may be any expression: gcc 11
 * mishandles designated initializers that read an atomic. */
static inline struct log_field log_str(const char *key, const char *value)
{
    return (struct log_field){.key = key, .type = LOG_FIELD_STR, .str = value};
}
/* UTF-8 text with any characters, truncated to the space left in the line. */
static inline struct log_field log_text(const char *key, const char *text, size_t len)
{
    return (struct log_field){.key = key, .type = LOG_FIELD_TEXT, .str = text, .len = len};
}
static inline struct log_field log_i64(const char *key, int64_t value)
{
    return (struct log_field){.key = key, .type = LOG_FIELD_I64, .i64 = value};
}
static inline struct log_field log_f64(const char *key, double value)
{
    return (struct log_field){.key = key, .type = LOG_FIELD_F64, .f64 = value};
}
#define LOG_STR(k, v) log_str((k), (v))
#define LOG_PART(k, v, n) log_text((k), (v), (n))
#define LOG_I64(k, v) log_i64((k), (v))
#define LOG_F64(k, v) log_f64((k), (v))

void log_setup(enum log_format format, enum log_level least);
enum log_level log_least(void);
/* Thread-safe; one write(2) per line. */
void log_fields(enum log_level level, const char *event, const struct log_field *fields,
                size_t n_fields);
/* The number of lines dropped because they could not be written. */
uint64_t log_dropped(void);

#define log_event(level, event, ...)                                 \
    do {                                                             \
        if ((level) >= log_least()) {                                \
            const struct log_field log_f_[] = {__VA_ARGS__};         \
            log_fields((level), (event), log_f_, ARRAY_LEN(log_f_)); \
        }                                                            \
    } while (0)

#endif
