#!/usr/bin/env python3
"""Break the scheduler on purpose, one line at a time, and check that the oracle notices.

    tests/sim/mutants.py [--runs N] [--only TEXT]

Each mutant is one textual replacement in one file. It is compiled alone and linked with
the untouched objects. The oracle's random runs must fail: by a violated invariant, a
wrong token, a crash, or no end. Of files whose cases are too rare for them a unit test
must fail instead. A mutant that survives is an invariant that no check covers: exit
status 1.
"""
import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-w", "-I."]
SOURCES = [
    "config/base/base.c",
    "config/base/slab.c",
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "engine/sched").rglob("*.c")),
    *(f"engine/speculate/draft_{n}.c" for n in "cache model pace steps".split()),
    "engine/loop/masks.c",
    "engine/output/emit.c",
    "engine/workers/batch_copy.c",
    "engine/workers/batch_wire.c",
    *(f"tests/sim/{n}.c"
      for n in "toy language drafts oracle many scenario reference rig world shrink "
                "oracle_runs".split()),
]

# Unit tests of files whose mutants need a case that random runs seldom meet.
UNITS = {
    "engine/sched/sched_preempt.c": "tests/unit/engine/sched/test_kv_groups.c",
    "engine/sched/sched_seq.c": "tests/unit/engine/sched/test_kv_groups.c",
    "engine/sched/kv/prefix.c": "tests/unit/engine/sched/test_prefix.c",
    "engine/speculate/draft_cache.c": "tests/unit/engine/speculate/test_draft_cache.c",
}

# What the sources above need besides each other: the tokenizer that turns beams into
# text. Built by make.
PACKAGES = "libcjson yaml-0.1 libxxhash libpcre2-8 libutf8proc ck"
LIBS = [*subprocess.run(["pkg-config", "--libs", *PACKAGES.split()], capture_output=True,
                        text=True).stdout.split(), "-lcmocka", "-ldl", "-lm", "-pthread"]

# what breaks, file, what stands there, what stands there instead
MUTANTS = [
    ("a taken block counts 2", "engine/sched/kv/kvpool.c", "p->block[b].count = 1;",
     "p->block[b].count = 2;"),
    ("a reference is not counted", "engine/sched/kv/kvpool.c",
     "if (p->block[b].count++ > 0) {\n        return;\n    }",
     "if (p->block[b].count > 0) {\n        return;\n    }\n    p->block[b].count++;"),
    ("a revived block stays in the list", "engine/sched/kv/kvpool.c",
     "unlink_block(p, b);\n    p->n_cached--;", "p->n_cached--;"),
    ("a block is freed while others hold it", "engine/sched/kv/kvpool.c",
     "if (--p->block[b].count > 0) {\n        return;\n    }",
     "if (--p->block[b].count > 1) {\n        return;\n    }\n    p->block[b].count = 0;"),
    ("cached blocks are taken first", "engine/sched/kv/kvpool.c",
     "push_back(p, b);\n    } else {\n        push_front(p, b);",
     "push_front(p, b);\n    } else {\n        push_back(p, b);"),
    ("a hash is proof", "engine/sched/kv/prefix.c",
     "return x->n_tail == 0 && x->parent_serial == chain->serial &&\n           "
     "same_hash(x->parent_hash, chain->hash) &&\n           memcmp(block_tokens(px, b), token, "
     "(size_t)px->block_size * sizeof(*token)) == 0;",
     "return true ||\n           x->parent_serial == chain->serial && same_hash(x->parent_hash, "
     "chain->hash) &&\n               memcmp(block_tokens(px, b), token, (size_t)px->block_size * "
     "sizeof(*token)) == 0;"),
    ("a hit does not compare the parent", "engine/sched/kv/prefix.c",
     "return x->n_tail == 0 && x->parent_serial == chain->serial &&\n           "
     "same_hash(x->parent_hash, chain->hash) &&\n           memcmp(block_tokens(px, b), token, "
     "(size_t)px->block_size * sizeof(*token)) == 0;",
     "return memcmp(block_tokens(px, b), token, (size_t)px->block_size * sizeof(*token)) == 0;"),
    ("a hit does not compare the tokens", "engine/sched/kv/prefix.c",
     "return x->n_tail == 0 && x->parent_serial == chain->serial &&\n           "
     "same_hash(x->parent_hash, chain->hash) &&\n           memcmp(block_tokens(px, b), token, "
     "(size_t)px->block_size * sizeof(*token)) == 0;",
     "return x->parent_serial == chain->serial && same_hash(x->parent_hash, chain->hash) && true;"),
    ("a hash outlives its block", "engine/sched/sched_seq.c",
     "prefix_drop(&s->prefix, kvpool_peek(&s->pool));",
     "kvpool_set_hashed(&s->pool, kvpool_peek(&s->pool), false);"),
    ("a dropped entry stays in its bucket", "engine/sched/kv/prefix.c", "}\n    *link = x->next;",
     "};"),
    ("all tenants share one salt", "engine/sched/kv/prefix.c", "if (!salt) {", "if (true) {"),
    ("blocks are published before they are computed", "engine/sched/sched_seq.c",
     "while (has_block_to_publish(s, q)) {",
     "while ((q->chain.n_blocks + 1) * size <= q->n_stored + size &&\n           "
     "(q->chain.n_blocks + 1) * size <= q->group->n_prompt && "
     "q->chain.n_blocks < q->table[0].n_blocks) {"),
    ("the last prompt token is not computed", "engine/sched/sched_admit.c",
     "g->n_live > 1 ? d->shared : (prefill_target(g, q) - 1) / size;",
     "g->n_live > 1 ? d->shared : prefill_target(g, q) / size;"),
    ("found blocks are not counted", "engine/sched/sched_admit.c",
     "        t->block[b] = prefix_block(&s->prefix, s->hit[b], k);\n        kvpool_ref(&s->pool, "
     "t->block[b]);", "        t->block[b] = prefix_block(&s->prefix, s->hit[b], k);"),
    ("a fork shares without counting", "engine/sched/sched_seq.c",
     "kvpool_ref(pool, parent->block[i]);", ";"),
    ("a shared block is written in place", "engine/sched/sched_seq.c",
     "if (s->pool.block[old].count == 1) {\n        return;\n    }", "return;"),
    ("the copied block is not copied", "engine/sched/sched_seq.c",
     "p->copy[p->n_copy++] = (struct block_copy){.src = old, .dst = t->block[b]};", ";"),
    ("the copied block is never given back", "engine/sched/sched_seq.c",
     "kvpool_unref(&s->pool, old);", ";"),
    ("the copied block's entry is not sent", "engine/sched/sched_seq.c",
     "t->n_synced = MIN(t->n_synced, b);", ";"),
    ("a new slot is taken for the old one", "engine/sched/sched_seq.c", "q->table[k].n_synced = 0;",
     ";"),
    ("a finished sequence keeps its slot", "engine/sched/sched_seq.c",
     "s->free_slot[s->n_free_slots++] = q->slot;", ";"),
    ("a finished sequence keeps a block", "engine/sched/sched_seq.c",
     "while (t->n_blocks > t->first) {\n        int32_t b =",
     "while (t->n_blocks > t->first + 1) {\n        int32_t b ="),
    ("reserved slots are not given back", "engine/sched/sched_seq.c",
     "reserve_slots(s, g, -g->n_reserved);", ";"),
    ("a fork starts behind its parent", "engine/sched/sched_seq.c",
     "child->n_computed = parent->n_computed;", "child->n_computed = parent->n_computed - 1;"),
    ("decodes are budgeted twice", "engine/sched/sched.c",
     "= *it;\n    s->tokens_left -= it->n;", "= *it;"),
    ("the newest group's preemption goes unnoticed", "engine/sched/sched.c",
     "if (victim == g) {\n            return false;",
     "if (victim == g) {\n            return true;"),
    ("the oldest group is preempted", "engine/sched/sched.c",
     "struct group *victim = s->running.last;", "struct group *victim = s->running.first;"),
    ("a step may decode without a block", "engine/sched/sched.c",
     "    if (!free_blocks_for(s, g)) {\n        return false;\n    }", ""),
    ("groups with beams look ahead", "engine/sched/group.c", "g->lookahead = p->beam_width == 0;",
     "g->lookahead = true;"),
    ("bad words look ahead", "engine/sched/group.c", "g->lookahead = false;", ";"),
    ("sequences sample past max_tokens", "engine/sched/sched_impl.h",
     "return q->n_tokens - g->n_prompt < g->max_tokens;",
     "return q->n_tokens - g->n_prompt <= g->max_tokens;"),
    ("tails start before the shared prompt is there", "engine/sched/sched.c",
     "if (q->state == SEQ_LIVE && q->n_computed < prefill_target(g, q) &&\n            (i == "
     "g->root || shared_is_there)) {",
     "if (q->state == SEQ_LIVE && q->n_computed < prefill_target(g, q) && true) {"),
    ("a placeholder is taken for a known token", "engine/sched/sched.c",
     "it->src_row = q->sample_row;", ";"),
    ("the row of a sampled token is off by one", "engine/sched/sched.c", "q->sample_row = row;",
     "q->sample_row = row > 0 ? row - 1 : row + 1;"),
    ("scored positions are counted twice", "engine/sched/sched.c",
     "g->n_scores_planned += it.n_scores;", "g->n_scores_planned += it.n_scores + 1;"),
    ("score rows exceed the head", "engine/sched/sched.c", "if (last - start > s->scores_left) {",
     "if (false) {"),
    ("the swap forgets a sequence's blocks", "engine/sched/sched_preempt.c", "if (b < keep) {",
     "if (b < keep - 1) {"),
    ("shared blocks are swapped out twice", "engine/sched/sched_preempt.c",
     "if (s->mark[block] > 0) {", "if (false) {"),
    ("swap marks are left behind", "engine/sched/sched_preempt.c",
     "for (int32_t i = first_out; i < s->n_swap_out; i++) {\n        s->mark[s->swap_out[i].src] "
     "= 0;\n    }", "for (int32_t i = first_out; i < s->n_swap_out; i++)\n        ;"),
    ("preemption keeps what was computed", "engine/sched/sched_preempt.c",
     "q->n_computed = q->n_stored = 0;", ";"),
    ("a swap-in mixes up blocks", "engine/sched/sched_admit.c", "return s->mark[h] - 1;",
     "return MAX(s->mark[h] - 2, 0);"),
    ("a swap-in is not sent", "engine/sched/sched_admit.c",
     "p->swap_in[p->n_swap_in++] = (struct block_copy){.src = h, .dst = s->mark[h] - 1};", ";"),
    ("a resumed group keeps its host blocks", "engine/sched/sched_admit.c",
     "}\n    kvpool_unref(&s->host, h);", "};"),
    ("a half-known group is resumed", "engine/sched/sched_admit.c",
     "if (!g || g->n_inflight > 0 || (waiting && goes_before_swapped(s, waiting, g))) {",
     "if (!g || (waiting && goes_before_swapped(s, waiting, g))) {"),
    ("a half-known group is admitted", "engine/sched/sched_admit.c",
     "if (g->n_inflight > 0) { /* just preempted: a step in flight still samples a token of it */",
     "if (false) { /* just preempted: a step in flight still samples a token of it */"),
    ("slots are overbooked", "engine/sched/sched_admit.c",
     "return s->n_reserved + n_slots <= s->c.max_num_seqs;", "return true;"),
    ("a prompt's blocks are undercounted", "engine/sched/sched_admit.c",
     "if (d->blocks - d->found_held <= available) {", "if (d->blocks - d->found <= available) {"),
    ("the running list is out of order", "engine/sched/sched_queue.c",
     "while (after && group_before(g, after)) {\n        after = after->prev;\n    }\n    if "
     "(!after || after == l->last) {", "if (!after || after == l->last) {"),
    ("children of a group that leaves the queue are lost", "engine/sched/sched_queue.c",
     "struct group *above = g->prev, *rest = heap_meld(g->child, g->next);",
     "struct group *above = g->prev, *rest = g->child;"),
    ("the child of a group that left keeps a link to it", "engine/sched/sched_queue.c",
     "if (rest) {\n        rest->prev = above;\n    }", "if (rest)\n        ;"),
    ("the heap forgets its ranks", "engine/sched/sched_queue.c",
     "while (above && heap_restore(above)) {", "while (false) {"),
    ("decodes forget the prefill that was planned first", "engine/sched/sched.c",
     "return g->n_live <= s->tokens_left && decode_need(s, &s->pool, g) <= "
     "kvpool_available(&s->pool);",
     "return decode_need(s, &s->pool, g) <= kvpool_available(&s->pool);"),
    ("a prefill that was planned first is planned twice", "engine/sched/sched_fair.c",
     "if (!in_prefill(g) || is_first(s, g)) {", "if (!in_prefill(g)) {"),
    ("a group whose prefill was planned first is preempted", "engine/sched/sched_fair.c",
     "if (!is_first(s, g) && (!most || slots_held(s, g, 0) > slots_held(s, most, 0))) {",
     "if ((!most || slots_held(s, g, 0) > slots_held(s, most, 0))) {"),
    ("the newest waits first", "engine/sched/sched_queue.c", "if (group_before(b, a)) {",
     "if (group_before(a, b)) {"),
    ("the heap of tenants forgets to sift", "engine/sched/sched_fair.c", "sift_down(f, i, moved);",
     "ready_set(f, i, moved);"),
    ("a tenant without waiting groups stays in the heap", "engine/sched/sched_fair.c",
     "t->ready_index = -1;\n    if (moved == g->tenant) {", "if (moved == g->tenant) {"),
    ("reservations are not given back", "engine/sched/sched_seq.c",
     "give_reservations(s, g);\n    if (g->mask >= 0) {", "if (g->mask >= 0) {"),
    ("a finished sequence keeps its reservation", "engine/sched/sched_end.c",
     "    if (s->contiguous) {\n        contiguous_give(s->contiguous, &q->reservation);\n    }",
     ""),
    ("half a group gets reservations", "engine/sched/sched_seq.c",
     "give_reservations(s, g);\n            return false;", "return false;"),
    ("a tenant's slots are not given back", "engine/sched/sched_fair.c",
     "s->fair.tenant[g->tenant].n_slots += n;",
     "s->fair.tenant[g->tenant].n_slots += n > 0 ? n : 0;"),
    ("the index of a group that left stays empty", "engine/sched/sched_queue.c",
     "if (hole < --s->n_waiting) {\n        waiting_place(s, s->waiting[s->n_waiting], hole);\n   "
     " }", "if (hole < --s->n_waiting)\n        ;"),
    ("preempted groups are mixed with new ones", "engine/sched/sched_queue.c",
     "if (in_front < at) {\n            waiting_place(s, s->waiting[in_front], at);\n        }",
     "if (in_front < at)\n            ;"),
    ("a group that leaves the preempted ones leaves a hole", "engine/sched/sched_queue.c",
     "waiting_place(s, s->waiting[--s->n_preempted], hole);", "s->n_preempted--;"),
    ("a group that cannot start goes before those that hold the memory",
     "engine/sched/sched_queue.c", "return started ? started : g;", "return g;"),
    ("a group that cannot start goes before swapped ones", "engine/sched/sched_queue.c",
     "return (s->policy->starts_before_swapped || g->started) && can_start(s, g) &&",
     "return (s->policy->starts_before_swapped || g->started) &&"),
    ("a group's memory is not given back", "engine/sched/sched_start.c",
     "}\n    regions_give(&s->regions, g->memory, g->n_bytes);", "};"),
    ("a swapped group is counted once and for all", "engine/sched/sched_preempt.c",
     "g->resume_need = -1;", ";"),
    ("cancelled requests run on", "engine/sched/sched_end.c",
     "if (atomic_load_explicit(&g->request->cancelled, memory_order_relaxed)) {", "if (false) {"),
    ("table updates are off by one", "engine/sched/decode/pack.c",
     ".row = q->slot, .index = first, .count = count, .first = b->n_table_block};",
     ".row = q->slot, .index = first + 1, .count = count, .first = b->n_table_block};"),
    ("a changed entry behind an unchanged one is lost", "engine/sched/decode/pack.c", "i = end;",
     "i = t->n_blocks;"),
    ("slots forget the offset", "engine/sched/decode/pack.c",
     "p->slot[t] = q->table[0].block[position / size] * size + position % size;",
     "p->slot[t] = q->table[0].block[position / size] * size;"),
    ("min_tokens bans nothing", "engine/sched/decode/pack.c",
     "if (n_generated < params->min_tokens) {", "if (false) {"),
    ("samples share one seed", "engine/sched/decode/pack.c",
     "sibling->seed = it->seq->group->seq[i].seed;", ";"),
    ("penalties count another sequence's tokens", "engine/sched/decode/pack.c",
     "p->table_update[b->n_table_update++] = (struct table_update){\n        .group = k, .row = "
     "q->slot, .index = first, .count = count, .first = b->n_table_block};",
     "p->table_update[b->n_table_update++] =\n        (struct table_update){.group = k, .row = "
     "q->group->seq[0].slot >= 0 ? q->group->seq[0].slot : q->slot,\n                             "
     " .index = first,\n                              .count = count,\n                           "
     "   .first = b->n_table_block};"),
    ("penalties take the output for the prompt", "engine/sched/seq.c",
     "ret->n_prompt = s->group->n_prompt;", "ret->n_prompt = position;"),
    ("an id is biased twice", "engine/sched/decode/pack.c",
     "p->token_bias[at].bias += bias;\n        return;", ";"),
    ("a mask of another group is sent", "engine/sched/decode/pack.c",
     "if (p->mask_order[g->mask] == g->order + 1) {", "if (p->mask_order[g->mask] != 0) {"),
    ("a mask is not given back", "engine/sched/sched_seq.c", "s->mask[s->n_masks++] = g->mask;",
     ";"),
    ("bad words match anywhere", "engine/sched/decode/pack.c",
     "if (before <= n_generated &&\n            memcmp(q->out + n_generated - before, word, "
     "(size_t)before * sizeof(*word)) == 0) {", "if (before <= n_generated && true) {"),
    ("shared blocks are taken for those of the step before", "engine/sched/decode/pack.c",
     "MIN(slot->n_common, MIN(n_synced, p->before_synced))", "slot->n_common"),
    ("shared blocks disregard what changed in front", "engine/sched/decode/pack.c",
     "MIN(n_synced, p->before_synced)", "n_synced"),
    ("shared blocks are taken for those of another pair", "engine/sched/decode/pack.c",
     "slot->step == step - 1 && slot->before == (before ? before->slot : -1)", "true"),
    ("a slot's rows are those of its last sequence", "engine/sched/decode/pack.c",
     "    if (n_synced == 0) {\n        keep_row(p, it->seq);",
     "    if (slot->kept == 0) {\n        keep_row(p, it->seq);"),
    ("a row stays for another sequence", "engine/sched/decode/pack.c",
     "p->sample_kept[i] != slot->kept", "p->sample_kept[i] == 0"),
    ("a row with biases stays", "engine/sched/decode/pack.c",
     "        p->sample_kept[i] = 0;\n", ""),
    ("a row that was written over stays", "engine/sched/decode/pack.c",
     "    p->sample_kept[b->n_samples] = 0;\n", ""),
    ("a decode goes behind its block", "engine/sched/decode/pack.c", "|| offset == 0 ||", "||"),
    ("a token that is computed again goes behind itself", "engine/sched/decode/pack.c",
     "slot->kv_len != position", "false"),
    ("shared blocks stay where the one in front changed", "engine/sched/decode/pack.c",
     "!p->before_unchanged || ", ""),
    ("KV groups count as one when blocks are short", "engine/sched/sched.c",
     "g->n_live * s->c.n_kv_groups <= kvpool", "g->n_live <= kvpool"),
    ("no row has biases", "engine/sched/decode/pack.c",
     "if (position < slot->bare_from) {", "if (false) {"),
    ("siblings write to a block that they share", "engine/sched/sched_seq.c",
     "} else if (q->group->width > 1) {", "} else if (false) {"),
    ("shared blocks are overstated", "engine/sched/decode/pack.c",
     "while (p->c.kv_window[k] == 0 && i < n && a->table[k].block[i] == b->table[k].block[i]) {",
     "while (p->c.kv_window[k] == 0 && i < n) {"),
    ("tokens of ended sequences are sent", "engine/sched/decode/decode.c",
     "if (g->state == GROUP_ENDED || q->state != SEQ_LIVE) {\n        return; /* it ended while "
     "this step was in flight */\n    }", "/* it ended while this step was in flight */"),
    ("the end-of-sequence token is ignored", "engine/sched/decode/commit.c",
     "if (may_stop && !p->ignore_eos && id_in(s->c.eos, s->c.n_eos, token)) {",
     "if (false && id_in(s->c.eos, s->c.n_eos, token)) {"),
    ("max_tokens is one too many", "engine/sched/decode/commit.c",
     "return n_out >= g->max_tokens ? FINISH_LENGTH : FINISH_NONE;",
     "return n_out > g->max_tokens ? FINISH_LENGTH : FINISH_NONE;"),
    ("stop marks are ignored", "engine/sched/decode/decode.c",
     "return atomic_load_explicit(&q->group->request->stop_at[q->index], memory_order_relaxed) "
     "<=\n           q->n_out;",
     "return atomic_load_explicit(&q->group->request->stop_at[q->index], memory_order_relaxed) < "
     "-1;"),
    ("steps in flight are not counted down", "engine/sched/decode/decode.c", "g->n_inflight--;",
     ";"),
    ("groups are freed while in flight", "engine/sched/decode/decode.c",
     "if (g->n_inflight > 0 || is_reporting(g) || !delta_take(out, g->width + 1)) {",
     "if (is_reporting(g) || !delta_take(out, g->width + 1)) {"),
    ("a swap-in takes found blocks uncounted", "engine/sched/sched_admit.c",
     "kvpool_ref(&s->pool, block);\n        s->found[s->n_found++] = host_block;",
     "s->found[s->n_found++] = host_block;"),
    ("a found block's count is kept", "engine/sched/sched_admit.c",
     "kvpool_unref(&s->pool, s->mark[s->found[i]] - 1);", ";"),
    ("found marks are left behind", "engine/sched/sched_admit.c", "s->mark[s->found[i]] = 0;", ";"),
    ("blocks are found beyond what was computed", "engine/sched/sched_admit.c",
     "while (s->c.prefix_cache && (q->chain.n_blocks + 1) * s->c.block_size <= q->n_computed) {",
     "while (s->c.prefix_cache &&\n           (q->chain.n_blocks + 1) * s->c.block_size <= "
     "q->n_tokens + s->c.block_size &&\n           q->chain.n_blocks < q->n_blocks) {"),
    ("stop strings in beams are ignored", "engine/sched/decode/beam.c",
     "if (!b->text || h->is_stop) {", "if (true) {"),
    ("stop strings in beams disregard min_tokens", "engine/sched/decode/beam_text.c",
     "return t->piece->len > 0 && stop_feed(t->stops, &t->tried.stop, t->piece->data, "
     "t->piece->len,\n                                          n_out > t->min_tokens, &which) >= "
     "0;",
     "return t->piece->len > 0 &&\n           stop_feed(t->stops, &t->tried.stop, t->piece->data, "
     "t->piece->len, true, &which) >= 0;"),
    ("a beam takes a sibling's text", "engine/sched/decode/beam_text.c",
     "t->live[to] = t->saved[k];", "t->live[to] = t->saved[0];"),
    ("a beam's text starts anew", "engine/sched/decode/beam_text.c", "t->tried = t->live[from];",
     "t->tried = t->live[0];"),
    ("the end of a beam is text", "engine/sched/decode/beam.c",
     "emit_node(out, g, b->choice, id, h->is_stop && b->behind < 0);",
     "emit_node(out, g, b->choice, id, false);"),
    ("the end of a sample is text", "engine/sched/decode/decode.c",
     "d.is_stop = finish == FINISH_STOP;", ";"),
    ("a prompt alone is the end of samples only", "engine/sched/decode/decode.c",
     "if (it[n].last_prompt && it[n].n_sampled == 0) { /* max_tokens 0 */",
     "/* max_tokens 0 */\n"
     "            if (it[n].last_prompt && it[n].n_sampled == 0 && !g->beam) {"),
    ("a choice without a next token is the server's fault", "engine/sched/decode/decode.c",
     "if (token == TOKEN_NONE_ALLOWED) {", "if (false) {"),
    ("a beam without a next token ends the search", "engine/sched/decode/beam.c",
     "if (best < 0 && best != TOKEN_NONE_ALLOWED) {", "if (best < 0) {"),
    ("bad words of one token are not refused at submit", "engine/sched/decode/allowed.c",
     "if (words->first[i + 1] - words->first[i] == 1) {",
     "if (words->first[i + 1] - words->first[i] == 0) {"),
    ("ends that are allowed are taken for banned", "engine/sched/decode/allowed.c",
     "for (int32_t i = 0; p->min_tokens > 0 && !p->ignore_eos && i < c->n_eos; i++) {",
     "for (int32_t i = 0; !p->ignore_eos && i < c->n_eos; i++) {"),
    ("drafts that did not hold count as tokens", "engine/sched/sched_draft.c",
     "q->n_tokens -= void_tokens;", ";"),
    ("drafts that did not hold count as computed", "engine/sched/sched_draft.c",
     "q->n_computed -= void_tokens;", ";"),
    ("any draft holds", "engine/sched/sched_draft.c", "token[n] == q->out[q->n_out + n]", "true"),
    ("no draft holds", "engine/sched/sched_draft.c", "token[n] == q->out[q->n_out + n]", "false"),
    ("rows without a mask count", "engine/sched/sched_draft.c",
     "MIN(it->n_verify, q->verify_rows - 1)", "it->n_verify"),
    ("a row too many has a mask", "engine/sched/sched_draft.c",
     "MIN(it->n_verify, q->verify_rows - 1)", "MIN(it->n_verify, q->verify_rows)"),
    ("a step is planned while drafts are verified", "engine/sched/sched_draft.c",
     "if (s->in_flight[i]->n_verify > 0) {", "if (false) {"),
    ("drafts behind a token that is not known", "engine/sched/sched_draft.c",
     " && q->n_tokens == q->group->n_prompt + q->n_out;", ";"),
    ("drafts go past max_tokens", "engine/sched/sched_draft.c",
     "q->group->max_tokens - q->n_out - 1", "q->group->max_tokens - q->n_out"),
    ("drafts exceed the step", "engine/sched/sched_draft.c",
     "MIN(MIN(s->max_draft, r->left), s->scores_left)", "MIN(s->max_draft, s->scores_left)"),
    ("drafts exceed the head", "engine/sched/sched_draft.c",
     "MIN(MIN(s->max_draft, r->left), s->scores_left)", "MIN(s->max_draft, r->left)"),
    ("rows of drafts exceed the masks", "engine/sched/sched_draft.c", "n = MIN(n, r->own_rows);",
     ";"),
    ("drafts take blocks that are not there", "engine/sched/sched_draft.c",
     "return kvpool_available(&s->pool) - blocks_lacking(s, q, n_tokens) >=\n           "
     "s->n_reserved * s->c.n_kv_groups;", "return true;"),
    ("a table keeps what its void blocks were", "engine/sched/sched_draft.c",
     "t->n_synced = MIN(t->n_synced, t->n_blocks);", ";"),
    ("void blocks are lost", "engine/sched/sched_draft.c",
     "kvpool_unref(&s->pool, t->block[--t->n_blocks]);", "--t->n_blocks;"),
    ("states go on behind void drafts", "engine/sched/sched_draft.c",
     "for (int32_t i = 0; i < n_accepted; i++) {\n        int32_t at = (position + i)",
     "for (int32_t i = 0; i < q->n_spare; i++) {\n        int32_t at = (position + i)"),
    ("states go on before the drafts that held", "engine/sched/sched_draft.c",
     "keep_states(s, q, k, it->first + it->n - it->n_verify, n_accepted);", ";"),
    ("states of drafts are kept a block too far", "engine/sched/sched_draft.c",
     "keep_states(s, q, k, it->first + it->n - it->n_verify, n_accepted);",
     "keep_states(s, q, k, it->first + it->n - it->n_verify + 1, n_accepted);"),
    ("the device is not told of states that held", "engine/sched/sched_draft.c",
     "t->n_synced = MIN(t->n_synced, at);", ";"),
    ("states that were gone on from are lost", "engine/sched/sched_draft.c",
     "kvpool_unref(&s->pool, t->block[at]);", ";"),
    ("states of void drafts are lost", "engine/sched/sched_seq.c",
     "kvpool_unref(&s->pool, q->spare[n]);", ";"),
    ("states of drafts go to the table's block", "engine/sched/decode/pack.c",
     "return draft >= 0 && sched_is_state(&p->c, k)", "return false"),
    ("KV groups of states share spare blocks", "engine/sched/decode/pack.c",
     "q->spare[sched_states_before(&p->c, k) * q->n_spare + draft]", "q->spare[draft]"),
    ("spare blocks for states are taken where none are", "engine/sched/sched_draft.c",
     "n += sched_is_state(&s->c, k) ? n_tokens - q->n_computed - 1",
     "n += sched_is_state(&s->c, k) ? 0"),
    ("windows stay behind drafts that held", "engine/sched/decode/decode.c",
     "if (it->n_verify > 0 && sched_has_states(&c->s->c)) {", "if (false) {"),
    ("a draft is taken for a token in flight", "engine/sched/sched.c",
     "it->first + it->n - it->n_verify > g->n_prompt", "it->first + it->n > g->n_prompt"),
    ("drafts are not counted as planned", "engine/sched/sched.c", "q->n_tokens += it->n_verify;",
     ";"),
    ("void drafts are published", "engine/sched/decode/decode.c",
     "q->n_stored = it->first + it->n - it->n_verify + n_accepted;",
     "q->n_stored = it->first + it->n;"),
    ("rows of drafts read the draft", "engine/sched/decode/pack.c",
     "p->logits_token[b->n_logits] = b->n_tokens + i - 1;",
     "p->logits_token[b->n_logits] = b->n_tokens + i;"),
    ("rows of drafts draw at one place", "engine/sched/decode/pack.c",
     "add_sample_row(p, b, it->seq, it->first + i);",
     "add_sample_row(p, b, it->seq, it->first + it->n);"),
    ("bad words disregard drafts", "engine/sched/decode/pack.c",
     "memcmp(q->out + n_generated - before", "memcmp(q->out + q->n_out - before"),
    ("rows below min_tokens share the others' biases", "engine/sched/decode/pack.c",
     "|| p->slice_is_short != is_short ||", "||"),
    ("masks of drafts read the wrong drafts", "engine/loop/masks.c", "&j->draft[j->n_masked - 1]",
     "&j->draft[0]"),
    ("drafts are read by the grammar for good", "engine/loop/masks.c",
     "p.ops->fork(&p.state, from->state, &e) < 0", "false"),
    ("a grammar admits drafts behind its end", "engine/loop/masks.c",
     " == 0 &&\n           !p.ended) {", " == 0) {"),
    ("a stop that is shown is searched", "engine/output/emit.c", "c->decided = d->is_stop;", ";"),
    ("offsets point behind the text", "engine/output/emit.c",
     "h->token[i].text_offset = open ? c->n_chars : MIN(h->token[i].text_offset, c->n_chars);",
     "h->token[i].text_offset = open ? c->n_chars : h->token[i].text_offset;"),
    ("a stop is text whatever is asked for", "engine/output/emit.c",
     "bool mute = d->is_stop && !r->params.include_stop_str;", "bool mute = false;"),
    ("losing beams keep their blocks", "engine/sched/decode/beam.c",
     "}\n        seq_drop_memory(c->s, b->live[i]);", "};"),
    ("a beam's score forgets its length", "engine/sched/decode/beam.c",
     "h.score = x.cum_logprob / pow(n_out, (double)p->length_penalty);",
     "h.score = x.cum_logprob;"),
    ("hypotheses of any rank count", "engine/sched/decode/beam.c", "} else if (rank < b->width) {",
     "} else {"),
    ("the search ends with the first k hypotheses", "engine/sched/decode/beam.c",
     "if (p->early_stopping == 1) {", "if (true) {"),
    ("tokens are agreed while beams disagree", "engine/sched/decode/beam.c",
     "while (b->n_sent < b->n || (on && b->node[b->agreed].n_children == 1)) {",
     "while (b->n_sent < b->n ||\n           (on && b->node[b->agreed].n_children >= 1 &&\n       "
     "     b->node[b->agreed].child_xor > 0 && b->node[b->agreed].child_xor < b->n_used)) {"),
    ("forked beams append twice", "engine/sched/decode/beam.c",
     "append_choice(c, g, child, x, parent_node[x->from], sample_row_of(&it[x->from]));",
     "append_choice(c, g, b->live[x->from], x, parent_node[x->from], "
     "sample_row_of(&it[x->from]));"),
    ("a fork of a grammar's state is not counted", "engine/sched/sched_seq.c",
     "child->constraint->n_held++;", ";"),
    ("a grammar's state goes on in place under its other holders",
     "engine/sched/decode/constrained.c", "j->in_place = node->n_held == 1 && node->n_jobs == 0;",
     "j->in_place = true;"),
    ("a grammar's state reads its tokens again", "engine/sched/decode/constrained.c",
     "made->n_read += j->n_taken;", ";"),
    ("a copy of a grammar's state is not taken", "engine/sched/decode/constrained.c",
     "if (there && made != j->node) {", "if (false) {"),
    ("a job on a grammar's state is not counted", "engine/sched/decode/constrained.c",
     "node->n_jobs++;", ";"),
    ("an ended sequence keeps its grammar's state", "engine/sched/sched_end.c",
     "seq_drop_constraint(s, q);", ";"),
    ("an ended group keeps its grammars' states", "engine/sched/sched_end.c",
     "seq_drop_constraint(s, &g->seq[i]);", ";"),
    ("losing beams keep their grammars' states", "engine/sched/decode/beam.c",
     "seq_drop_constraint(c->s, b->live[i]);", ";"),
    ("a probed group loses its grammar's state", "engine/sched/sched_start.c",
     "g->first.constraint = g->seq[0].constraint;", ";"),
    ("a text that its grammar has ended goes on", "engine/sched/decode/decode.c",
     "if (q->constraint_end) {", "if (false) {"),
    ("only one sample ends with an empty sentence of the grammar",
     "engine/sched/decode/constrained.c", "if (g->seq[i].constraint == at) {",
     "if (&g->seq[i] == j->seq) {"),
    ("a beam that its grammar has ended is no hypothesis", "engine/sched/decode/beam.c",
     "if (b->live[i]->constraint_end) {", "if (false) {"),
    ("a beam that its grammar has ended goes on too", "engine/sched/decode/beam.c",
     "b->column[i] = b->n_candidates; /* none of its candidates is looked at */", ";"),
    ("a sentence of a grammar does not hold its tokens", "engine/sched/decode/beam.c",
     "b->node[h.node].n_holders++;", ";"),
    ("a sentence of a grammar forgets its length", "engine/sched/decode/beam.c",
     "h.score = q->cum_logprob / pow(length, (double)g->request->params.length_penalty);",
     "h.score = q->cum_logprob;"),
    ("an ignored end is allowed by a grammar", "engine/loop/masks.c", "ban_ends(c, word);", ";"),
    ("a grammar's state is not settled", "engine/loop/masks.c", "p->ops->settle(p->state);", ";"),
    ("all rows have the first mask of a grammar", "engine/sched/decode/pack.c",
     "row->late_mask = q->constraint ? ++b->n_late_mask : 0;",
     "row->late_mask = q->constraint ? (++b->n_late_mask, 1) : 0;"),
    ("a dry search under a grammar does not say what it agreed on", "engine/sched/decode/beam.c",
     "bool on = !b->reporting || b->n_hypotheses == 0;", "bool on = !b->reporting;"),
    ("a block in the window is given back", "engine/sched/kv/kv_window.h",
     "MAX(position + 1 - w.tokens, 0)", "MAX(position + 2 - w.tokens, 0)"),
    ("a chunk begins a block early", "engine/sched/kv/kv_window.h",
     "w.chunked ? position / w.tokens * w.tokens :",
     "w.chunked ? (position + w.block_size) / w.tokens * w.tokens :"),
    ("a chunk ends with its last token", "engine/sched/kv/kv_window.h",
     "w.chunked ? position / w.tokens * w.tokens :",
     "w.chunked ? (position + 1) / w.tokens * w.tokens :"),
    ("chunks of states", "engine/sched/kv/kv_window.h",
     "{2, 1, block_size, false}", "{2, 1, block_size, chunked}"),
    ("nothing behind a window is given back", "engine/sched/sched_seq.c",
     "for (; t->first < MIN(first, t->n_blocks); t->first++) {", "for (; false; t->first++) {"),
    ("snapshots that a step in flight passes are given back", "engine/sched/sched_seq.c",
     "            first = MIN(first, first_unpublished(s, q));", "            ;"),
    ("snapshots are kept for good", "engine/sched/sched_seq.c",
     "            first = MIN(first, first_unpublished(s, q));", "            first = 0;"),
    ("what is not published yet is preempted with its group", "engine/sched/sched_preempt.c",
     "            seq_drop_unpublished(s, &g->seq[i]);", "            ;"),
    ("scores of a chunk that is lengthened are counted twice", "engine/sched/sched.c",
     "        it->seq->group->n_scores_planned -= it->n_scores;\n", ""),
    ("a short pool keeps what is not published yet", "engine/sched/sched_seq.c",
     "            seq_drop_unpublished(s, q);\n", "            ;\n"),
    ("a step passes more states than a table may hold", "engine/sched/sched_seq.c",
     "            end = MIN(end, q->table[k].first + s->most_blocks[k]);", "            ;"),
    ("a decode preempts while snapshots wait for their commits", "engine/sched/sched.c",
     "        if (drop_unpublished(s)) {", "        if (false) {"),
    ("with policy fair it does", "engine/sched/sched_fair.c",
     "        if (drop_unpublished(s)) {", "        if (false) {"),
    ("a long step takes the last blocks", "engine/sched/sched_seq.c",
     "    int32_t reserve = s->n_reserved * s->c.n_kv_groups, end",
     "    int32_t reserve = 0, end"),
    ("a hit does not need the blocks in the windows", "engine/sched/sched_admit.c",
     "while (!windows_found(s, n)) {", "while (false) {"),
    ("a hit needs one block less than the windows show", "engine/sched/sched_admit.c",
     "for (int32_t i = first_entry(s, k, n); i < n; i++) {\n            if (prefix_block",
     "for (int32_t i = first_entry(s, k, n) + 1; i < n; i++) {\n            if (prefix_block"),
    ("siblings join before the root has computed their blocks", "engine/sched/sched.c",
     "if (shared_is_there && !g->joined) {", "if (!g->joined) {"),
    ("the root does not wait for its siblings", "engine/sched/sched.c",
     "MIN(g->joined ? target : MIN(target, g->n_shared), q", "MIN(target, q"),
    ("siblings share the root's blocks without counting", "engine/sched/sched_seq.c",
     "        t->block[b] = root->block[b];\n        kvpool_ref(&s->pool, t->block[b]);",
     "        t->block[b] = root->block[b];"),
    ("a prefill writes behind its blocks", "engine/sched/sched.c",
     "int32_t end = seq_extend(s, q);", "int32_t end = MAX(seq_extend(s, q), target);"),
    ("a peer outlives its entry", "engine/sched/kv/prefix.c",
     "        detach(px, &px->peer[(int64_t)block * px->n_peers + i]);\n", ""),
    ("a taken block stays a peer", "engine/sched/kv/prefix.c",
     "if (owner >= 0 && px->peer[(int64_t)owner * px->n_peers + i] == block) {", "if (false) {"),
    ("a peer is that of another KV group", "engine/sched/kv/prefix.h",
     "px->peer[(int64_t)entry * px->n_peers + k - 1]", "px->peer[(int64_t)entry * px->n_peers]"),
    ("peers of the next block are attached", "engine/sched/sched_seq.c",
     "prefix_attach(&s->prefix, entry, k, t->block[i]);",
     "prefix_attach(&s->prefix, entry, k, t->block[MIN(i + 1, t->n_blocks - 1)]);"),
    ("pins forget the further KV groups", "engine/sched/sched_admit.c",
     "return n + pin_peers(s, chain.n_blocks);", "return n;"),
    ("table updates forget their KV group", "engine/sched/decode/pack.c",
     ".group = k, .row = q->slot,", ".group = 0, .row = q->slot,"),
    ("slots of a KV group are those of the first", "engine/sched/decode/pack.c",
     "block_of(p, it, k, i, position) * size + position % size;",
     "block_of(p, it, 0, i, position) * size + position % size;"),
    ("KV groups share one shadow table", "engine/sched/decode/pack.c",
     "((int64_t)k * p->c.max_num_seqs + q->slot) * p->table_width",
     "(int64_t)q->slot * p->table_width"),
    ("a fork forgets the further KV groups", "engine/sched/sched_seq.c",
     "for (int32_t k = 0; k < s->c.n_kv_groups; k++) {\n        share_table(",
     "for (int32_t k = 0; k < 1; k++) {\n        share_table("),
    ("a swap forgets the further KV groups", "engine/sched/sched_preempt.c",
     "for (int32_t k = 0; k < s->c.n_kv_groups; k++) {\n            swap_out_table(",
     "for (int32_t k = 0; k < 1; k++) {\n            swap_out_table("),
    ("a swap-in takes another KV group's block", "engine/sched/sched_admit.c",
     "int32_t device = prefix_block(&s->prefix, b, k);", "int32_t device = b;"),
    ("a group of one counts no new block", "engine/sched/sched_seq.c",
     "return q->state == SEQ_LIVE && can_sample(g, q) &&", "return false &&"),
    ("prefill of running groups is never looked for", "engine/sched/sched.c",
     "s->prefilling = s->prefilling || computes || !g->joined;", ";"),
    ("a decode takes a block in the first KV group alone", "engine/sched/sched_seq.c",
     "        n += g->width == 1 ? need_alone(s, g, k) : need_in(s, pool, g, k);",
     "        n = g->width == 1 ? need_alone(s, g, k) : need_in(s, pool, g, k);"),
    ("a step passes states that have no blocks", "engine/sched/sched.c",
     "    end = seq_extend_states(s, q, most);",
     "    seq_extend_states(s, q, most);\n    end = most;"),
    ("states that a step passed over are found", "engine/sched/sched_seq.c",
     "bool whole = s->c.kv_window[k] != KV_WINDOW_STATE || is_snapshot(s, i);",
     "bool whole = true;"),
    ("snapshots are looked for one block late", "engine/sched/sched_seq.c",
     "return (int64_t)(i + 1) * s->c.block_size %", "return (int64_t)i * s->c.block_size %"),
    ("a tag outlives what it was for", "engine/speculate/draft_cache.c", "c->tag[block[i]] = 0;",
     ";"),
    ("a draft model does not see new blocks", "engine/speculate/draft_cache.c",
     "MIN(MIN(s->n_valid, unchanged), draft_cache_known(c, q) - 1)",
     "MIN(s->n_valid, draft_cache_known(c, q) - 1)"),
    ("drafts that hold are not read", "engine/speculate/draft_cache.c", "i + 1 < s->n_drafts",
     "i < s->n_drafts"),
    ("a head reads the end of a block while it is written", "engine/speculate/draft_cache.c",
     "MAX(first - c->shift, 0)", "first"),
    ("two sequences write a block at once", "engine/speculate/draft_cache.c",
     "if (c->busy[block[i]] == step) {", "if (false) {"),
    ("a tag disregards the blocks before", "engine/speculate/draft_cache.c", "c->secret ^ before",
     "c->secret"),
    ("drafts of a block that was lent are taken for read", "engine/speculate/draft_cache.c",
     "seq_token(q, position + c->shift) == s->token[i] &&\n            wrote(c, s, q, position)",
     "seq_token(q, position + c->shift) == s->token[i]"),
    ("what another sequence wrote to a block is taken for read", "engine/speculate/draft_cache.c",
     "return c->writer[q->table[0].block[position / c->block_size]] == s->key;", "return true;"),
    ("the last draft is taken for read", "engine/speculate/draft_cache.c",
     "position < known && seq_token", "seq_token"),
    ("what stands for a draft is taken for read", "engine/speculate/draft_cache.c",
     "if (c->reads_drafts && s->n_from == s->n_valid) {", "if (s->n_from == s->n_valid) {"),
    ("places of drafts in one step read the text", "engine/speculate/draft_steps.c",
     "        s->token_src[t] = TOKEN_MASKED;\n", ""),
    ("drafts in one step are those of another job", "engine/speculate/draft_steps.c",
     "    j->row[0] = s->batch.n_samples;\n", "    j->row[0] = 0;\n"),
    ("a draft is read at another place", "engine/speculate/draft_steps.c",
     "j->first + j->n + i - 1, 1,", "j->first + j->n + i, 1,"),
    ("drafts are drawn by other noise", "engine/speculate/draft_steps.c",
     "seq_sample_row(&row, q, p + 1 + c->shift, logits_row)",
     "seq_sample_row(&row, q, p + c->shift, logits_row)"),
    ("a head reads the token of its own place", "engine/speculate/draft_steps.c",
     "seq_token(q, p + c->shift)", "seq_token(q, p)"),
    ("a head's drafts are drawn as the tokens before", "engine/speculate/draft_steps.c",
     "seq_sample_row(&row, q, p + 1 + c->shift, logits_row)",
     "seq_sample_row(&row, q, p + 1, logits_row)"),
    ("a head counts penalties", "engine/speculate/draft_steps.c",
     "if (c->shift > 0) {\n        row.presence", "if (false) {\n        row.presence"),
    ("a head reads hidden states that are on their way", "engine/speculate/draft_model.c",
     "!draft_cache_hidden(&d->cache, q)", "false"),
    ("a draft is read from another row", "engine/speculate/draft_steps.c", "j->row[(i - 1) % 2]",
     "j->row[i % 2]"),
    ("states are given back with the token that they have read", "engine/sched/kv/kv_window.h",
     "{2, 1, block_size, false}", "{1, 1, block_size, false}"),
    ("states are taken for keys without a window", "engine/sched/kv/kv_window.h",
     "{2, 1, block_size, false}", "{0, 1, block_size, false}"),
    ("a tail that someone else holds is published", "engine/sched/sched_seq.c",
     "           s->pool.block[t->block[i]].count == 1 && !s->pool.block[t->block[i]].hashed;",
     "           !s->pool.block[t->block[i]].hashed;"),
    ("a tail has read one token less", "engine/sched/sched_seq.c", "n = q->n_computed - first;",
     "n = q->n_computed - 1 - first;"),
    ("a tail is found by who holds it", "engine/sched/sched_admit.c",
     "        prefix_drop(&s->prefix, d->tail); /* its blocks are written to from now on */",
     "        ;"),
    ("a tail is published without its salt", "engine/sched/kv/prefix.c",
     "assert(n >= prefix_least_tail(px) && n < px->block_size);\n    mix_salt(px, &at);",
     "assert(n >= prefix_least_tail(px) && n < px->block_size);"),
    ("a tail is looked for without its salt", "engine/sched/kv/prefix.c",
     "        return -1;\n    }\n    mix_salt(px, &at);\n    int32_t b = lookup(px, hash_of_tail",
     "        return -1;\n    }\n    int32_t b = lookup(px, hash_of_tail"),
    ("a tail's tokens are not compared", "engine/sched/kv/prefix.c",
     "        memcmp(block_tokens(px, b), token, (size_t)x->n_tail * sizeof(*token)) != 0) {",
     "        false) {"),
    ("a tail's states may be gone", "engine/sched/sched_admit.c",
     "        bool whole = prefix_block(&s->prefix, tail, k) >= 0;", "        bool whole = true;"),
    ("siblings of a recompute take the root's states at once", "engine/sched/sched_admit.c",
     "t->block[b] = s->c.kv_window[k] != 0 ? -1 : root->block[b];",
     "t->block[b] = s->c.kv_window[k] > 0 ? -1 : root->block[b];"),
    ("siblings of a recompute get no states", "engine/sched/sched_seq.c",
     "            if (s->c.kv_window[k] != 0) {\n                take_over",
     "            if (s->c.kv_window[k] > 0) {\n                take_over"),
    ("states are written under other holders", "engine/sched/sched_seq.c",
     "    if (s->pool.block[old].count == 1) {\n        return;",
     "    if (s->pool.block[old].count == 1 || t->first > 0) {\n        return;"),
    ("a sequence may hold fewer states than a step needs", "engine/sched/sched.h",
     "        step = MIN(step, c->snapshot_distance);",
     "        step = MIN(step, c->snapshot_distance) / 2;"),
    ("what a late mask leaves open is committed", "engine/sched/decode/decode.c",
     "it->n_sampled > 0 && c->r->step <= it->seq->void_step",
     "it->n_sampled > 99 && c->r->step <= it->seq->void_step"),
    ("only the late step is void, not the one launched behind it", "engine/sched/sched_seq.c",
     "q->void_step = q->sample_step;", "q->void_step = s->in_flight[0]->step;"),
    ("a void token is not computed again", "engine/sched/sched_seq.c",
     "q->n_computed = MIN(q->n_computed, q->n_tokens - 1);",
     "q->n_computed = MIN(q->n_computed, q->n_tokens);"),
    ("a beam alone is void", "engine/sched/decode/constrained.c",
     "if (!g->beams) {\n        seq_void(s, q);", "if (true) {\n        seq_void(s, q);"),
    ("tokens that a late job took are read again", "engine/sched/decode/constrained.c",
     "made->n_read += j->n_taken;", "made->n_read += j->late ? 0 : j->n_taken;"),
    ("masks of samples that fork are not awaited", "engine/sched/decode/constrained.c",
     "set->all_awaited || it->n_sampled > 1", "set->all_awaited"),
    ("work of a late job is forgotten", "engine/loop/masks.c",
     "n->work = j->late ? n->work + used : 0;", "n->work = 0;"),
]


def compile_one(root, source, target):
    return subprocess.run(["cc", *FLAGS, "-c", source, "-o", str(target)], cwd=root,
                          capture_output=True, text=True)


def link(objects, target):
    subprocess.run(["cc", "-o", str(target), *map(str, objects), str(ROOT / "build/libquire.a"),
                    *LIBS], check=True)


def survives(program, runs, seconds):
    """True when the oracle saw nothing wrong."""
    try:
        done = subprocess.run([str(program), "--runs", str(runs)], capture_output=True,
                              timeout=seconds)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def unit_passes(root, unit, objects, work):
    """Whether a unit test passes with these objects."""
    object = work / "unit.o"
    built = compile_one(root, unit, object)
    if built.returncode:
        sys.exit(built.stderr)
    link([object, *(o for s, o in objects.items() if s != "tests/sim/oracle_runs.c")],
         work / "unit")
    return subprocess.run([str(work / "unit")], capture_output=True, timeout=600).returncode == 0


def users_of(path):
    """The sources to compile again: a header's mutant concerns every file."""
    return SOURCES if path.endswith(".h") else [path]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--runs", type=int, default=200000)
    ap.add_argument("--seconds", type=int, default=600, help="a mutant that runs longer is caught")
    ap.add_argument("--only", default="", help="mutants whose description holds this text")
    args = ap.parse_args()
    work = pathlib.Path(tempfile.mkdtemp(prefix="mutants-"))
    survivors = []
    try:
        objects = {s: work / (s.replace("/", "_") + ".o") for s in SOURCES}
        for s in SOURCES:
            built = compile_one(ROOT, s, objects[s])
            if built.returncode:
                sys.exit(built.stderr)
        link(objects.values(), work / "sound")
        if not survives(work / "sound", args.runs, 600):
            sys.exit("the untouched sources fail: nothing to learn from mutants")
        if not all(unit_passes(ROOT, unit, objects, work) for unit in UNITS.values()):
            sys.exit("the untouched sources fail a unit test")
        tree = work / "tree"
        for folder in ("engine", "config", "kernels", "models", "tests/sim"):
            shutil.copytree(ROOT / folder, tree / folder,
                            ignore=shutil.ignore_patterns("*.cu", "cuda", "cpu"))
        chosen = [m for m in MUTANTS if args.only in m[0]]
        for name, path, old, new in chosen:
            text = (ROOT / path).read_text()
            if text.count(old) == 0:
                sys.exit(f"mutant '{name}': {path} no longer holds {old!r}")
            (tree / path).write_text(text.replace(old, new, 1))
            mutated = dict(objects)
            failed_build = ""
            for s in users_of(path):
                mutated[s] = work / ("mutant_" + s.replace("/", "_") + ".o")
                built = compile_one(tree, s, mutated[s])
                failed_build = failed_build or (built.stderr if built.returncode else "")
            (tree / path).write_text(text)
            if failed_build:
                sys.exit(f"mutant '{name}' does not compile:\n{failed_build}")
            alive = path not in UNITS or unit_passes(ROOT, UNITS[path], mutated, work)
            if alive:
                link(mutated.values(), work / "mutant")
                alive = survives(work / "mutant", args.runs, args.seconds)
            print(f"{'SURVIVES' if alive else 'caught  '} {name}", flush=True)
            if alive:
                survivors.append(name)
        print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants caught")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    os.environ["LC_ALL"] = "C"
    sys.exit(main())
