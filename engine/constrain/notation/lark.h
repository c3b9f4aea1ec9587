/* Context-free grammars in a dialect of Lark's notation.
 *
 *     start: greeting (", " NAME)* "."     rules: lower case; `start` is the answer
 *     greeting: "hello" | "bye"i           strings; i: any case
 *     NAME: /[A-Z][a-z]+/                  terminals: upper case, regular languages
 *     list: "[" (item ("," item)*)? "]"    ? * + and {n}, {n,}, {n,m} behind a part
 *     item: %json {"type": "integer"}      an inline JSON Schema
 *     %ignore /[ \t]+/                     may stand between terminals
 *     // a comment
 *
 * Three parts are written as calls. They serve answers that mix free text with
 * structure, as tool calls do:
 *
 *     until("<tool_call>", "<|end|>")   text that holds none of these strings; it may be
 *                                       empty, and ends at any point
 *     marker("<tool_call>")             the special or added token of exactly this text
 *                                       if the vocabulary has one, else the text
 *     text()                            any text
 *
 * `until` excludes the tokens that marker would give for its strings. A part of a rule
 * without a terminal of its own (a string, an expression) is a terminal without a name.
 * The lexer is not greedy: where several terminals, or several lengths of one, are
 * possible, all are followed.
 */
#ifndef QUIRE_ENGINE_CONSTRAIN_NOTATION_LARK_H
#define QUIRE_ENGINE_CONSTRAIN_NOTATION_LARK_H
#endif
