/* Beam search of one group: turns a step's candidates into forks, appends and frees of
 * sequences.
 *
 * As in transformers' generate(num_beams=k): candidates (live beam, token) are ranked
 * by cumulative log-probability. Those among the first k that end (end of sequence,
 * stop id, stop string, last token) become hypotheses, with the score cumulative /
 * generated_length^length_penalty; the first k that do not end are the next live beams.
 * The best k hypotheses are kept. The search is over when no beam is live; or when
 * there are k hypotheses and early_stopping is true, or no live beam can beat the worst
 * of them, taking for its length the present one, or max_tokens with "never" and a
 * positive length_penalty.
 *
 * Generated tokens form a tree. Its nodes are held by live beams and by the n
 * hypotheses that may be returned; a node is freed with its last holder or child. So
 * the tokens on which all live beams agree are those on the path from the root up to
 * the first fork; they are emitted as soon as they are agreed.
 *
 * When the search is over, beam_report emits the rest in portions: choice by choice the
 * tokens behind the agreed ones, then how each choice ends.
 */
#ifndef QUIRE_ENGINE_SCHED_DECODE_BEAM_H
#define QUIRE_ENGINE_SCHED_DECODE_BEAM_H

#include "engine/sched/sched.h"

struct beam_node {
    int32_t parent;     /* -1: the root, which is the prompt */
    int32_t token;      /* its token id */
    float logprob;      /* of the token */
    int32_t n_holders;  /* live beams and returnable hypotheses that end here */
    int32_t n_children; /* nodes with this parent */
    int32_t child_xor;  /* XOR of the children's ids: the child's id if there is one */
    int32_t next_free;  /* in the list of free nodes; -1: last */
};

struct beam_hypothesis {
    double score;       /* cumulative log-probability / n_tokens^length_penalty */
    int32_t node;       /* of its last token; -1: not held, because n better ones exist */
    int32_t n_tokens;   /* generated */
    int32_t finish;     /* enum finish_reason */
    int32_t stop_token; /* the stop id that ended it; -1: none */
    bool is_stop;       /* its last token is an end of sequence or a stop id */
};

/* A candidate: a live beam and its next token. */
struct beam_choice {
    double cum_logprob;   /* of the beam with this token */
    int32_t from, column; /* index among live beams; column of its candidates */
    int32_t token;        /* its token id */
    float logprob;        /* of the token */
};

struct beam {
    int32_t width, n;       /* beams, choices returned */
    int32_t n_candidates;   /* per live beam and step */
    int32_t n_top;          /* top log-probabilities kept per node */
    struct beam_node *node; /* [n_nodes] */
    int32_t n_nodes;        /* capacity */
    int32_t n_used;         /* nodes used so far, free ones included */
    int32_t first_free;     /* list of free nodes below n_used; -1: empty */
    int32_t *top_token;     /* [n_nodes, n_top] */
    float *top_logprob;     /* [n_nodes, n_top] */
    int32_t *tip;           /* [width] by sequence, the node of its last token; -1: not live */
    int32_t agreed;         /* the last node on which all agree that is being emitted */
    int32_t n_sent;         /* choices that `agreed` was emitted for */
    struct beam_hypothesis *hypothesis; /* [width] best first */
    int32_t n_hypotheses;               /* of these */
    struct beam_choice *next;           /* [width] scratch: the next live beams */
    int32_t *column;                    /* [width] scratch: first candidate left, by live beam */
    struct seq **live;                  /* [width] scratch: sequences of the live beams */
    struct beam_text *text;             /* for stop strings; NULL: none */
    /* The report. A choice's path is reversed in place, so that it can be walked from
     * its start, and reversed back on the way. */
    bool reporting;     /* the search is over, and not everything was reported */
    int32_t choice;     /* whose tokens are emitted next */
    int32_t at, behind; /* its node emitted last, and the next one; -1: none */
    bool reversed;      /* its path is */
    int32_t n_finished; /* choices whose ends were emitted */
};

struct commit;
struct delta_out;
/* Report a portion of a search that is over (b->reporting); BEAM_DONE clears
 * b->reporting, BEAM_NO_ROOM: `out` took no more. */
enum beam_progress { BEAM_DONE, BEAM_MORE, BEAM_NO_ROOM };
enum beam_progress beam_report(struct delta_out *out, struct group *g);
/* Drop the rest of the report: the open choices end with `finish`. */
void beam_give_up(struct group *g, int finish, const char *error);
/* Commit one step of the search: it[0 .. n) are the plan's items of its live beams. */
void beam_commit(struct commit *c, struct group *g, const struct plan_item *it, int32_t n);

#endif
