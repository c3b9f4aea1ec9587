/* Beam search of one group: what stands between the candidates of a step and fork,
 * append, free.
 *
 * As transformers' generate(num_beams=k): of all candidates (live beam, token) in order
 * of cumulative log-probability, those among the first k that end (end of sequence,
 * stop id, stop string, last token) become hypotheses, scored cumulative /
 * generated_length^length_penalty; the first k that do not end live on. The best k
 * hypotheses are kept. It is over when nothing lives on, when k hypotheses are there
 * and early_stopping is true, or when they are and no live beam can still beat the
 * worst: its length taken as it is, or with "never" and a positive length_penalty as
 * max_tokens.
 *
 * Generated tokens form a tree; live beams and the n hypotheses that may still be
 * returned hold its nodes. A node dies with its last holder or child, so the tokens on
 * which all agree are those of the path that has no fork below the root, and they go
 * out as they settle.
 */
#ifndef QUIRE_ENGINE_SCHED_DECODE_BEAM_H
#define QUIRE_ENGINE_SCHED_DECODE_BEAM_H

#include "engine/sched/sched.h"

struct beam_node {
    int32_t parent; /* -1: the root, which is the prompt */
    int32_t token;
    float logprob;
    int32_t n_holders; /* live beams and returnable hypotheses that end here */
    int32_t n_children;
    int32_t child_xor; /* of the children's ids: the child itself when there is one */
    int32_t next_free;
};

struct beam_hypothesis {
    double score;
    int32_t node; /* -1: not held, because n better ones are there */
    int32_t n_tokens;
    int32_t finish, stop_token;
    bool is_stop; /* its last token ended it by itself: an end of sequence or a stop id */
};

/* One way to go on: a live beam (by its place among them) and a token. */
struct beam_choice {
    double cum_logprob;
    int32_t from, column; /* live beam, column of its candidates */
    int32_t token;
    float logprob;
};

struct beam {
    int32_t width, n;       /* beams, choices returned */
    int32_t n_candidates;   /* asked for each live beam */
    int32_t n_top;          /* log-probabilities kept a node */
    struct beam_node *node; /* [n_nodes] */
    int32_t n_nodes, n_used, first_free;
    int32_t *top_token; /* [n_nodes, n_top] */
    float *top_logprob; /* [n_nodes, n_top] */
    int32_t *tip;       /* [width] node of the sequence; -1: not live */
    int32_t settled;    /* the last node that goes out to all, n_sent of them have it */
    int32_t n_sent;
    struct beam_hypothesis *hypothesis; /* [width] best first */
    int32_t n_hypotheses;
    struct beam_choice *next; /* [width] scratch */
    int32_t *column;          /* [width] scratch */
    struct seq **live;        /* [width] scratch */
    struct beam_text *text;   /* for stop strings; NULL: none */
    /* The report: what follows the settled nodes, a choice after the other, then how
     * each ends. */
    bool reporting; /* the search is over, and not everything was reported */
    int32_t choice; /* whose tokens go out */
    /* its node that went out last; the one to follow, -1: none; its path is turned
     * round */
    int32_t at, behind;
    bool turned;
    int32_t n_finished; /* choices whose ends went out */
};

struct commit;
struct delta_out;
/* Report a portion of the texts of a search that is over (b->reporting). BEAM_DONE
 * lowers b->reporting. */
enum beam_progress { BEAM_DONE, BEAM_MORE, BEAM_NO_ROOM };
enum beam_progress beam_report(struct delta_out *out, struct group *g);
/* Do not report the rest: its open choices end with `finish`. */
void beam_give_up(struct group *g, int finish, const char *error);
/* The candidates of all live beams have arrived: items it[0 .. n) of the plan, one a
 * beam. */
void beam_commit(struct commit *c, struct group *g, const struct plan_item *it, int32_t n);

#endif
