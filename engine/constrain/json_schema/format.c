/* The formats of JSON Schema as regular expressions: RFC 3339 (times), RFC 5321
 * (e-mail), RFC 1123 (host names), RFC 3986 and 3987 (URIs, IRIs), RFC 6570, RFC 6901,
 * RFC 4122. Names that are no format of any draft are annotations. */
#include <string.h>

#include "engine/constrain/json_schema/schema.h"

#define DATE                                                                                  \
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|" \
    "02-(0[1-9]|1[0-9]|2[0-8]))|([0-9]{2}(0[48]|[2468][048]|[13579][26])|"                    \
    "([02468][048]|[13579][26])00)-02-29)"
#define TIME                                                                             \
    "(([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]+)?([Zz]|[+-]([01][0-9]|2[0-3]):" \
    "[0-5][0-9])|23:59:60(\\.[0-9]+)?([Zz]|[+-]00:00))"
#define DURATION_TIME "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
#define DURATION                                                                       \
    "P([0-9]+W|([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)(" DURATION_TIME \
    ")?|" DURATION_TIME ")"
#define BYTE "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
#define IPV4 BYTE "\\." BYTE "\\." BYTE "\\." BYTE
#define H16 "[0-9A-Fa-f]{1,4}"
#define LS32 "(" H16 ":" H16 "|" IPV4 ")"
#define IPV6                                                                                  \
    "((" H16 ":){6}" LS32 "|::(" H16 ":){5}" LS32 "|(" H16 ")?::(" H16 ":){4}" LS32 "|((" H16 \
    ":){0,1}" H16 ")?::(" H16 ":){3}" LS32 "|((" H16 ":){0,2}" H16 ")?::(" H16 ":){2}" LS32   \
    "|((" H16 ":){0,3}" H16 ")?::" H16 ":" LS32 "|((" H16 ":){0,4}" H16 ")?::" LS32 "|((" H16 \
    ":){0,5}" H16 ")?::" H16 "|((" H16 ":){0,6}" H16 ")?::)"
/* A label without hyphens in the third and fourth place, which only encoded names
 * (RFC 5891) have. */
#define LABEL                                                                         \
    "([A-Za-z0-9]|[A-Za-z0-9][A-Za-z0-9]|[A-Za-z0-9][A-Za-z0-9-][A-Za-z0-9]|"         \
    "[A-Za-z0-9][A-Za-z0-9-]([A-Za-z0-9][A-Za-z0-9-]|-[A-Za-z0-9])[A-Za-z0-9-]{0,58}" \
    "[A-Za-z0-9]|[A-Za-z0-9][A-Za-z0-9-]{2}[A-Za-z0-9])"
#define HOST LABEL "(\\." LABEL ")*"
#define ATOM "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
#define EMAIL                                                                                    \
    "(" ATOM "(\\." ATOM ")*|\"([ !#-\\[\\]-~]|\\\\[ -~])*\")@(" HOST "|\\[(" IPV4 "|IPv6:" IPV6 \
    ")\\])"
/* URIs; `u` is what IRIs have beyond them. */
#define UCS "\\u00A0-\\uD7FF\\uF900-\\uFDCF\\uFDF0-\\uFFEF\xF0\x90\x80\x80-\xF3\xAF\xBF\xBD"
#define PCT "%[0-9A-Fa-f]{2}"
#define PCHAR(u) "([A-Za-z0-9._~!$&'()*+,;=:@" u "-]|" PCT ")"
#define SEGMENTS(u) "(/" PCHAR(u) "*)*"
#define AUTHORITY(u)                                                                             \
    "(([A-Za-z0-9._~!$&'()*+,;=:" u "-]|" PCT ")*@)?(\\[(" IPV6                                  \
    "|[vV][0-9A-Fa-f]+\\.[A-Za-z0-9._~!$&'()*+,;=:-]+)\\]|([A-Za-z0-9._~!$&'()*+,;=" u "-]|" PCT \
    ")*)(:[0-9]*)?"
#define REST(u) "(\\?(" PCHAR(u) "|[/?])*)?(#(" PCHAR(u) "|[/?])*)?"
#define ROOTED(u) "//" AUTHORITY(u) SEGMENTS(u) "|/(" PCHAR(u) "+" SEGMENTS(u) ")?"
#define ABSOLUTE(u) \
    "[A-Za-z][A-Za-z0-9+.-]*:(" ROOTED(u) "|(" PCHAR(u) "+" SEGMENTS(u) ")?)" REST(u)
#define NO_COLON(u) "([A-Za-z0-9._~!$&'()*+,;=@" u "-]|" PCT ")"
#define RELATIVE(u) "(" ROOTED(u) "|(" NO_COLON(u) "+" SEGMENTS(u) ")?)" REST(u)
#define POINTER "(/([^~/]|~[01])*)*"
#define VARNAME "([A-Za-z0-9_]|" PCT ")(\\.?([A-Za-z0-9_]|" PCT "))*"
#define VARSPEC VARNAME "(:[1-9][0-9]{0,3}|\\*)?"
#define TEMPLATE                                                                                   \
    "([^\\x00-\\x20\\x7F-\\x9F\"%<>\\\\^`{|}]|" PCT "|\\{[+#./;?&]?" VARSPEC "(," VARSPEC ")*\\})" \
    "*"

struct format {
    const char *name, *pattern; /* NULL: known, and not enforced */
    int32_t max;                /* characters; 0: any number */
    bool inexact;               /* some texts of the format do not match */
};

static const struct format FORMATS[] = {
    {"date", DATE, 0, false},
    {"time", TIME, 0, true},
    {"date-time", DATE "[Tt]" TIME, 0, true},
    {"duration", DURATION, 0, false},
    {"ipv4", IPV4, 0, false},
    {"ipv6", IPV6, 0, false},
    {"uuid", "[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}", 0, false},
    {"hostname", HOST, 253, true},
    {"email", EMAIL, 0, true},
    {"uri", ABSOLUTE(""), 0, false},
    {"uri-reference", ABSOLUTE("") "|" RELATIVE(""), 0, false},
    {"iri", ABSOLUTE(UCS), 0, true},
    {"iri-reference", ABSOLUTE(UCS) "|" RELATIVE(UCS), 0, true},
    {"uri-template", TEMPLATE, 0, true},
    {"json-pointer", POINTER, 0, false},
    {"relative-json-pointer", "(0|[1-9][0-9]*)(#|" POINTER ")", 0, false},
    {"idn-email", NULL, 0, false},
    {"idn-hostname", NULL, 0, false},
    {"regex", NULL, 0, false},
};

bool format_strings(struct schema *s, const struct value *name, struct string_set *ret)
{
    const struct format *f = NULL;

    for (size_t i = 0; i < ARRAY_LEN(FORMATS); i++) {
        f = doc_is(name, FORMATS[i].name) ? &FORMATS[i] : f;
    }
    if (!f) {
        return false;
    }
    if (!f->pattern) {
        grammar_build_fail(s->b, ERR_UNSUPPORTED,
                           "schema: the keyword 'format' of %s cannot be enforced", f->name);
        return false;
    }
    *ret = (struct string_set){.inexact = f->inexact};
    ret->rx = rx_parse(s->b, f->pattern, strlen(f->pattern), false);
    if (f->max > 0) {
        rx_id one = rx_class(s->b, NULL, 0, true);
        ret->rx = rx_and(s->b, ret->rx, rx_repeat(s->b, one, 0, f->max));
    }
    return true;
}
