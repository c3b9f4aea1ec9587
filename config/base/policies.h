/* Enumerations shared by the settings and the scheduler. */
#ifndef QUIRE_CONFIG_BASE_POLICIES_H
#define QUIRE_CONFIG_BASE_POLICIES_H

/* What happens to a preempted group's blocks; AUTO: whichever is cheaper. */
enum preemption { PREEMPT_AUTO, PREEMPT_SWAP, PREEMPT_RECOMPUTE };
/* The order of requests: by arrival, by priority, or by fair shares of tenants. */
enum policy { POLICY_FCFS, POLICY_PRIORITY, POLICY_FAIR };
/* How KV memory is reserved: in blocks, or contiguously as in the baselines of the
 * PagedAttention paper (§6.1). */
enum kv_policy { KV_PAGED, KV_ORCA_MAX, KV_ORCA_POW2, KV_ORCA_ORACLE };

/* Where drafts come from (engine/sched/draft.h): GRAMMAR what grammars force; SUFFIX
 * that, and texts written before; AUTO: SUFFIX, where it pays. */
enum speculate {
    SPECULATE_OFF,
    SPECULATE_AUTO,
    SPECULATE_SUFFIX,
    SPECULATE_GRAMMAR,
    SPECULATE_DRAFT,
    SPECULATE_MTP,
};

#endif
