/* The inside of chat_format.h: what a description consists of, and the parser's state.
 *
 * A parser reads byte by byte, so that a text gives the same events however it is cut:
 * only where an event's text ends depends on the pieces. Text is looked through for the
 * format's marks (parser.c). A mark that opens calls leads to one of the bodies
 * (body_*.c), which reads until its closing mark. Until a body has seen the function's
 * name it keeps what it read, and gives it back as text where it turns out to be no
 * call.
 */
#ifndef QUIRE_MODELS_CHAT_FORMAT_FORMAT_H
#define QUIRE_MODELS_CHAT_FORMAT_FORMAT_H

#include "config/base/json.h"
#include "models/chat/chat_format.h"

/* How a call is written between the marks around it. */
enum body_kind {
    BODY_NONE,    /* the format has no calls */
    BODY_OBJECT,  /* {"name": …, "arguments": {…}}, alone or in a list */
    BODY_NAMED,   /* the name, then the arguments as JSON: name[ARGS]{…} */
    BODY_TAGGED,  /* a parameter between tags each: <parameter=key>text</parameter> */
    BODY_LITERAL, /* literals: name(key='text', …), name{key:…} */
    BODY_HARMONY, /* messages with channels and recipients (harmony.c) */
};

enum {
    FORMAT_MARKS = 6,      /* marks of one kind in a description */
    MARK_BYTES = 64,       /* of the longest mark, with its NUL */
    NAME_BYTES = 256,      /* of a function's or parameter's name, with its NUL */
    CANDIDATE_BYTES = 768, /* of a call before its name is known */
    SPACE_BYTES = 256,     /* of white space that is held back */
    MAX_CALLS = 512,       /* in one answer; what looks like another one is text */
};

struct chat_format {
    const char *name;
    /* Texts of which a template has all; a second set for the same format. */
    const char *detect[FORMAT_MARKS], *detect_too[FORMAT_MARKS];

    /* ---- reasoning; NULL: none ---- */
    const char *think_open, *think_close;
    /* A label behind the opening mark, or NULL, and the two marks of empty
     * reasoning. */
    const char *think_label, *think_empty;
    bool think_anywhere;               /* the opening mark counts inside an answer too */
    bool think_calls;                  /* a call may be made inside reasoning, and ends it */
    const char *ignored[FORMAT_MARKS]; /* marks in an answer that are dropped */
    const char *ignored_tag;           /* the beginning of one that goes on to the next '>' */

    /* ---- calls ---- */
    enum body_kind body;
    const char *section_open, *section_close; /* around all calls; NULL: none */
    const char *call_open, *call_close;       /* around each call; NULL: none */
    /* Other marks that are read as these; open_too may be name_open, where models leave
     * the mark before it out. */
    const char *open_too, *close_too;
    char bare;     /* a call needs no mark: an answer that begins with this byte may be one */
    bool list;     /* BODY_OBJECT: calls are written as a list, [{…}, {…}] */
    bool name_key; /* BODY_OBJECT: the name is the key, {"name": {…}} */
    bool late_id;  /* BODY_OBJECT: the id follows the arguments */
    /* BODY_OBJECT: the keys that the grammar writes; all known ones are read. */
    const char *key_name, *key_arguments, *key_id;
    /* What the grammar writes inside the marks of a call, before and after it, and
     * between two calls; NULL: nothing. */
    const char *before_call, *after_call, *between_calls;
    int32_t id_chars; /* see chat_format_id_chars */
    /* BODY_NAMED: parts of the text before the arguments that are no part of the name.
     * The grammar writes name_before, the name, name_after. */
    const char *header[FORMAT_MARKS];
    const char *name_before, *name_after;
    bool name_index;     /* the name is followed by ":" and a number; name and number are the id */
    const char *id_mark; /* of an id in the header */
    /* BODY_TAGGED: marks around the name, its call, a parameter's key and value. */
    const char *name_open, *name_close, *name_end;
    const char *key_open, *key_close;
    const char *value_open, *value_close;
    const char *typed; /* behind the key: "true" (the value is text) or "false", then this */
    const char *line;  /* what the grammar puts between the tags: "\n" or "" */
    bool lines;        /* a newline at each end of a value belongs to the tags */
    bool untyped_json; /* a value without a type is JSON where it can be */
    /* BODY_LITERAL */
    const char *quote;       /* a mark that opens and closes a string; NULL: none */
    char open, equal, close; /* '(' '=' ')' or '{' ':' '}' */
};

/* ---- tables ---- */

/* The format's table, of *ret_n. */
const struct chat_format *chat_formats(int32_t *ret_n);

/* ---- schemas of parameters (schema.c) ---- */

enum param_type {
    PARAM_STRING = 1,
    PARAM_INTEGER = 2,
    PARAM_NUMBER = 4,
    PARAM_BOOLEAN = 8,
    PARAM_NULL = 16,
    PARAM_ARRAY = 32,
    PARAM_OBJECT = 64,
    PARAM_ANY = 127,
};

struct json_slice {
    const char *at; /* NULL: absent */
    size_t len;
};

/* Index of the tool with this name, or -1. */
int32_t tools_find(const struct chat_tools *t, const char *name);
/* The value of an object's member; at NULL: there is none, or the text is no object. */
struct json_slice json_member(struct json_slice object, const char *key);
/* The schema of a parameter, by name. */
struct json_slice schema_property(const struct chat_tool *t, const char *name);
/* Whether a JSON value is the string `text`, which needs no escapes. */
bool slice_is_string(struct json_slice s, const char *text);
/* The types that a schema allows, as bits; 0: it says nothing of types. `root` resolves
 * references. */
unsigned schema_types(struct json_slice schema, struct json_slice root);
uint64_t name_hash(const char *text, size_t len);

/* The types of a tool's parameters. */
struct param {
    uint64_t hash; /* of the name */
    unsigned types;
};
struct param_table {
    struct param *param; /* [n] malloc'd */
    int32_t n, cap;
    bool made;
};
/* Fill a zeroed table. ERR_NOMEM. */
int param_table_make(struct param_table *t, const struct chat_tool *tool);
unsigned param_table_types(const struct param_table *t, const char *name); /* 0: unknown */
bool param_table_has(const struct param_table *t, const char *name);
/* Whether the list `required` of a schema names a parameter. */
bool schema_requires(struct json_slice schema, const char *name);
/* Append a parameter's text as JSON by its types: a value of one of them if it can be
 * read so, else a string. */
void value_put(struct buf *out, const char *text, size_t len, unsigned types, bool untyped_json);

/* ---- JSON as it comes ---- */

enum { JSON_DEPTH = 64 };
enum json_scan_rc {
    SCAN_MORE,
    SCAN_DONE,   /* this byte is the value's last */
    SCAN_BEFORE, /* the value ended before this byte */
    SCAN_BAD,    /* no JSON */
};
/* A validator of one value; zeroed at its start. */
struct json_scan {
    uint64_t objects; /* bit d: the container at depth d is an object */
    uint8_t depth, state, expect, escape;
    uint8_t number;   /* state inside a number */
    const char *word; /* rest of a literal name */
};
enum json_scan_rc json_scan_byte(struct json_scan *s, char c);
/* Whether the next byte belongs to a string. */
bool json_scan_in_string(const struct json_scan *s);
/* Whether all of a text is one JSON value. */
bool json_scan_all(const char *text, size_t len);

/* ---- literals of Python and of Gemma as they come ---- */

struct literal {
    char close[JSON_DEPTH]; /* of the open containers: ')' arguments, '}' ']' */
    uint8_t depth, state;
    char quote;       /* of the open string; 'm': the format's mark */
    char equal;       /* between a key and its value at depth 1 */
    const char *mark; /* struct chat_format's quote */
    /* The types by which bare words are read; NULL: as they are written. */
    const struct param_table *params;
    unsigned types; /* of the value at depth 1; 0: unknown */
    bool as_key;    /* the open string or word is a key */
    bool empty;     /* the open container has no items yet */
    uint8_t escape; /* digits that are still to come */
    uint32_t code;  /* of an escaped character */
    char word[128]; /* a bare word; or what may be the mark */
    uint8_t n_word;
};
void literal_begin(struct literal *l, char close, char equal, const char *mark);
/* Read one byte and append JSON; at the end of the outermost container SCAN_DONE. */
enum json_scan_rc literal_byte(struct literal *l, char c, struct buf *out);
/* A whole text as JSON; false: it is none. */
bool literal_all(const char *text, size_t len, struct buf *out);

/* ---- the parser ---- */

enum parser_state {
    IN_CONTENT,
    IN_REASONING,
    IN_BODY,
    IN_HARMONY,
};

/* chat_parser.step of harmony at its start where the prompt opened reasoning. */
enum { HARMONY_REASONING = 100 };

/* What a body says of a byte. */
enum body_rc {
    BODY_MORE,
    BODY_END,    /* the calls have ended with this byte */
    BODY_BEFORE, /* they ended before it */
    BODY_NOT,    /* this is no call */
};

struct chat_parser {
    const struct chat_format *f;
    const struct chat_tools *tools;
    struct param_table *params;         /* [tools->n] made when a tool is first called */
    bool calls_on;                      /* calls are looked for */
    enum parser_state state, body_from; /* body_from: where the open body began */
    int32_t n_calls;
    bool nomem;
    /* Of the event that is being put together: its kind, its call's index, its text. */
    enum chat_event_kind kind;
    struct buf text;
    chat_event_fn *fn; /* during a call */
    void *fn_arg;
    bool begins[256]; /* bytes with which marks in text begin */
    /* Text that may be a mark; white space that may stand before one. */
    char hold[MARK_BYTES];
    int32_t n_hold;
    int32_t n_tag; /* bytes of an ignored tag that may still come before its '>' */
    struct buf space;
    struct buf gap;   /* white space that stood before calls or reasoning inside an answer */
    bool fresh;       /* nothing but white space since the start, reasoning or a call */
    bool trim;        /* white space that comes now is dropped */
    bool had_content; /* the answer has had content */

    /* ---- the open body ---- */
    struct buf raw;  /* its text until its first call has a name */
    size_t raw_mark; /* bytes of its opening mark */
    size_t n_empty;  /* bytes of raw that may be the mark that closes an empty body */
    bool committed;  /* a call of this body has been reported */
    bool open;       /* a call is open */
    bool broken;     /* its arguments were invalid */
    bool bare;       /* no mark opened it */
    bool as_object;  /* calls are written as BODY_OBJECT, whatever the format says */
    bool in_section; /* the mark around all calls was read */
    bool in_list;    /* a bracket is open */
    uint8_t step;    /* of the body's machine */
    uint8_t sub;
    struct buf word;  /* the name, key or header that is being read */
    struct buf value; /* a value that cannot be streamed, or is not yet due */
    char name[NAME_BYTES], id[NAME_BYTES];
    bool has_name, has_id, has_value;
    int32_t n_params; /* of the open call */
    int32_t tool;     /* of the open call, or -1 */
    unsigned types;   /* of the value that is being read */
    int32_t newlines; /* of the value's end, held back */
    /* BODY_TAGGED: a key's mark counts here, inside a value; one was read, and `word`
     * is what stands behind it. */
    bool line, next_key;
    struct json_scan scan;
    struct literal literal;
    uint64_t ids[MAX_CALLS]; /* hashes of the ids so far */
    int32_t n_ids;
    char key;       /* BODY_OBJECT: which member is read */
    int32_t nested; /* BODY_OBJECT: objects around the call */
};

/* One byte of the answer. */
void parser_byte(struct chat_parser *p, char c);
/* Append to the event of this kind. */
void parser_put(struct chat_parser *p, enum chat_event_kind kind, const char *text, size_t len);
/* Report what has been put together. `all`: even where it ends inside a character. */
void parser_flush(struct chat_parser *p, bool all);
/* Content or reasoning, with its white space held back. */
void parser_text(struct chat_parser *p, char c);
/* White space that is held back becomes text, or is dropped. */
void parser_put_space(struct chat_parser *p);
void parser_drop_space(struct chat_parser *p);
/* White space before calls or reasoning: text only if content comes behind them. */
void parser_keep_gap(struct chat_parser *p);
/* Whether hold, with one more byte, is one of the marks [n] (its index in *ret), or may
 * become one. */
enum mark_rc { MARK_NO, MARK_PART, MARK_WHOLE };
enum mark_rc parser_mark(const struct chat_parser *p, const char *const *mark, int32_t n,
                         int32_t *ret);

/* Begin a call. False: it may not begin here; then it is no call. */
bool call_begin(struct chat_parser *p, const char *name, const char *id);
/* The types of the open call's parameters; NULL: its tool was not given. */
const struct param_table *call_params(struct chat_parser *p);
void call_arguments(struct chat_parser *p, const char *text, size_t len);
void call_end(struct chat_parser *p);
/* A byte of arguments that are written as a JSON object, read by p->scan: one that is
 * not valid breaks the call, the last one ends it. Control characters in strings are
 * escaped. */
enum json_scan_rc call_json_byte(struct chat_parser *p, char c);
/* The call ends without CHAT_CALL_END: its arguments are not valid. */
void call_break(struct chat_parser *p);

void body_reset(struct chat_parser *p);
enum body_rc body_object_byte(struct chat_parser *p, char c);
enum body_rc body_named_byte(struct chat_parser *p, char c);
enum body_rc body_tagged_byte(struct chat_parser *p, char c);
enum body_rc body_literal_byte(struct chat_parser *p, char c);
void harmony_byte(struct chat_parser *p, char c);
void harmony_end(struct chat_parser *p);
bool harmony_reasoning(const struct chat_parser *p);

#endif
