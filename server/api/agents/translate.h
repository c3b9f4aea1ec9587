/* Bodies of other APIs (/v1/responses, /v1/messages) as chat requests.
 *
 * Such a body is read in two steps. Its own field table checks its fields and stores
 * the plain ones in the completion. Then its conversation, tools and formats become the
 * members of a chat request's tree, which is parsed as if a client had sent it; so an
 * agent's request renders to the tokens that the same chat would. Values are moved from
 * the body's tree, not copied.
 *
 * The order of messages and tools is the client's: what is not rendered where it was
 * sent changes the prompt's beginning from turn to turn, and with it every cached
 * prefix.
 */
#ifndef QUIRE_SERVER_API_TRANSLATE_H
#define QUIRE_SERVER_API_TRANSLATE_H

#include "server/api/api.h"

struct translation {
    struct completion *c; /* plain fields are stored here */
    const struct api_context *ctx;
    cJSON *chat;       /* the chat request's tree; the caller's */
    cJSON *messages;   /* its list of messages */
    const char *field; /* the body's field that is read, for errors */
    int entry;         /* the entry of its list that is read, from 1; 0: none. Messages and tools
                        * of the tree have it as their valueint, for errors, too */
    int n_messages;    /* that were added, and calls in them: once they are more than a */
    int n_calls;       /* chat may have, no further ones are read, and the chat is refused */
    bool counts;       /* the prompt's tokens are only counted */
    bool failed;       /* out of memory */
    struct err *e;
};

/* Reads the body's fields and fills in t->chat; values may be moved out of `body`. */
typedef int translate_fn(struct translation *t, cJSON *body);
translate_fn responses_translate, messages_translate;
/* The conversation of such a body: `instructions` and `input` (responses_input.c),
 * `system` and `messages` (messages_input.c). */
translate_fn responses_put_input, messages_put_input;

/* Read the chat tree's messages as chat_read does. If the template refuses system
 * messages where they are, they become marked user turns: first those behind the
 * beginning, then all. */
int translated_read(struct completion *c, cJSON *chat, const struct api_context *ctx,
                    struct err *e);

/* ---- making a tree ---- */

/* Add an item to an object, or with the name NULL to a list; it is owned by `to` then.
 * NULL for either counts as out of memory. Returns the item. */
cJSON *tree_add(struct translation *t, cJSON *to, const char *name, cJSON *item);
/* The same with a new string, object or list. */
cJSON *tree_add_text(struct translation *t, cJSON *to, const char *name, const char *text,
                     size_t len);
cJSON *tree_add_word(struct translation *t, cJSON *to, const char *name, const char *word);
cJSON *tree_add_object(struct translation *t, cJSON *to, const char *name);
cJSON *tree_add_list(struct translation *t, cJSON *to, const char *name);
/* The member of this name; NULL: there is none, or it is null. */
cJSON *tree_member(const cJSON *object, const char *name);
/* The same, taken out of the object: the caller must add it elsewhere. */
cJSON *tree_take(cJSON *object, const char *name);
/* Move the member `from` of `object`, if there is one, to `to` as `name`. */
void tree_move(struct translation *t, cJSON *object, const char *from, cJSON *to, const char *name);
/* A function at the end of a list of tools: the members of `tool`, whose schema is
 * called `schema`, are moved into it. */
void tree_add_function(struct translation *t, cJSON *list, cJSON *tool, const char *schema);
/* Whether there are more messages or calls than chat_read takes. */
bool tree_full(const struct translation *t);
/* A new last message of this role. */
cJSON *tree_add_message(struct translation *t, const char *role);
/* A system message at the end; those that begin the conversation are one. Its content
 * must be a list of parts. */
cJSON *tree_add_system(struct translation *t);
/* Add a string, which is moved, to the message's list of parts. */
void tree_add_part(struct translation *t, cJSON *message, cJSON *text);
/* Give a message without content null if it has calls or reasoning, else an empty
 * text. */
void tree_end_message(struct translation *t, cJSON *message);
/* Add a call of a function to an assistant's message. `name` and `id` are moved; the
 * arguments [len] are JSON text. */
void tree_add_call(struct translation *t, cJSON *message, cJSON *id, cJSON *name,
                   const char *arguments, size_t len);

/* `tool_choice` of the function that `choice` has as `name`, which is moved. */
void put_named_choice(struct translation *t, cJSON *choice);
/* Tell the template whether to reason, under the names that templates read, unless the
 * client's own chat_template_kwargs do. */
void put_thinking_switch(struct translation *t, bool on);
/* Move the fields of CONSTRAINT_ROWS (field_rows.h) to the chat. */
void put_constraints(struct translation *t, cJSON *body);
/* Name the type of a tool that is left out in X-Quire-Ignored. */
void ignore_tool(struct translation *t, const char *type);

/* ---- errors ---- */

/* The error of entry i of t->field: "FIELD[i]what". */
int refuse_entry(struct translation *t, int i, const char *what);
/* The error of the object at `where`, whose type this server does not take. */
int refuse_type(struct translation *t, int i, const char *where, const cJSON *type);
/* Put the words of the body in the place of the chat request's in an error: in one of
 * reading t->messages, before these are changed, and in any. */
void translated_message_error(const struct translation *t, struct err *e);
void translated_error(const struct translation *t, struct err *e);
/* Whether `v` is a string without the character NUL. */
bool is_plain_string(const cJSON *v);

#endif
