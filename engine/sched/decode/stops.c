/* Knuth-Morris-Pratt, one automaton a stop string: its state is the length of the
 * longest prefix of the string that ends the text so far. So no earlier text is needed
 * for a match, and the greatest state is exactly the number of bytes to hold back. A
 * plain search would be quadratic for strings like "aaaa…b", which a client may send.
 */
#include "engine/sched/decode/stops.h"

#include <stdlib.h>
#include <string.h>

static size_t length_of(char *const *stop, const int32_t *len, int32_t i)
{
    return len ? (size_t)len[i] : strlen(stop[i]);
}

static void stop_string_init(struct stop_string *s, const char *text, size_t len, int16_t *border)
{
    *s = (struct stop_string){.text = text, .len = (int32_t)len, .border = border};
    border[0] = border[1] = 0;
    for (int32_t i = 1; i < s->len; i++) {
        int16_t m = border[i];
        while (m > 0 && text[m] != text[i]) {
            m = border[m];
        }
        border[i + 1] = (int16_t)(text[m] == text[i] ? m + 1 : 0);
    }
}

int stop_set_new(struct stop_set **ret, char *const *stop, const int32_t *stop_len, int32_t n,
                 struct err *e)
{
    if (n == 0) {
        *ret = NULL;
        return 0;
    }
    if (n > LIMIT_STOP_STRINGS) {
        return err_set_param(e, ERR_INVALID, "stop", "%d stop strings; at most %d are allowed", n,
                             LIMIT_STOP_STRINGS);
    }
    size_t borders = 0;
    for (int32_t i = 0; i < n; i++) {
        size_t len = length_of(stop, stop_len, i);
        if (len == 0 || len > LIMIT_STOP_BYTES) {
            return err_set_param(e, ERR_INVALID, "stop",
                                 "a stop string of %zu bytes; 1 to %d are allowed", len,
                                 LIMIT_STOP_BYTES);
        }
        borders += len + 1;
    }
    struct stop_set *s = calloc(1, sizeof(*s) + borders * sizeof(int16_t));
    if (!s) {
        return err_nomem(e, "stop strings");
    }
    s->n = n;
    int16_t *border = (int16_t *)(s + 1);
    for (int32_t i = 0; i < n; i++) {
        stop_string_init(&s->stop[i], stop[i], length_of(stop, stop_len, i), border);
        border += s->stop[i].len + 1;
        s->first[(unsigned char)stop[i][0]] = true;
    }
    *ret = s;
    return 0;
}

void stop_set_free(struct stop_set *s)
{
    free(s);
}

/* Advance all automata by one byte. Returns the index of the longest string that it
 * completes, or -1. */
static int32_t stop_step(const struct stop_set *s, struct stop_state *st, char c)
{
    int32_t which = -1;

    st->held = 0;
    for (int32_t i = 0; i < s->n; i++) {
        const struct stop_string *p = &s->stop[i];
        int16_t m = st->matched[i];
        while (m > 0 && (m == p->len || p->text[m] != c)) {
            m = p->border[m];
        }
        if (p->text[m] == c) {
            m++;
        }
        st->matched[i] = m;
        if (m == p->len && (which < 0 || m > s->stop[which].len)) {
            which = i;
        }
        /* A complete string that does not count (not armed) holds back only what may
         * begin another match. */
        int16_t may = m == p->len ? p->border[m] : m;
        st->held = MAX(st->held, may);
    }
    return which;
}

int64_t stop_feed(const struct stop_set *s, struct stop_state *st, const char *text, size_t len,
                  bool armed, int32_t *ret_which)
{
    for (size_t i = 0; i < len; i++) {
        if (st->held == 0 && !s->first[(unsigned char)text[i]]) {
            /* a complete string that did not count has no border, as held is 0 */
            memset(st->matched, 0, sizeof(st->matched));
            continue;
        }
        int32_t which = stop_step(s, st, text[i]);
        if (which >= 0 && armed) {
            *ret_which = which;
            return (int64_t)i + 1;
        }
    }
    return -1;
}
