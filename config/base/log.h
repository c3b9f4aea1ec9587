/* One line an event on stderr: `ts level event key=value …`, or one JSON object a line
 * on request. Values are quoted and escaped where they must be; a prompt's text is
 * never logged unless log-prompts is on. A write that fails (full disk, closed pipe) is
 * dropped and counted, never fatal, never blocking the engine's state.
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
    enum { LOG_FIELD_STR, LOG_FIELD_TEXT, LOG_FIELD_I64, LOG_FIELD_F64 } type;
    const char *str;
    size_t len; /* of a LOG_FIELD_TEXT */
    int64_t i64;
    double f64;
};

/* Functions, so that a value may be any expression: gcc 11 loses the names of an
 * initializer in which an atomic is read. */
static inline struct log_field log_str(const char *key, const char *value)
{
    return (struct log_field){.key = key, .type = LOG_FIELD_STR, .str = value};
}
/* UTF-8 that may hold any character, as much of it as a line has room for. */
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
/* Thread-safe; one write(2) a line. Field arrays end at n_fields. */
void log_fields(enum log_level level, const char *event, const struct log_field *fields,
                size_t n_fields);
/* Lines dropped because stderr did not take them. */
uint64_t log_dropped(void);

#define log_event(level, event, ...)                                 \
    do {                                                             \
        if ((level) >= log_least()) {                                \
            const struct log_field log_f_[] = {__VA_ARGS__};         \
            log_fields((level), (event), log_f_, ARRAY_LEN(log_f_)); \
        }                                                            \
    } while (0)

#endif
