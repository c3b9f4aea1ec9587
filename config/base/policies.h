/* Choices that the settings offer and the scheduler follows. */
#ifndef QUIRE_CONFIG_BASE_POLICIES_H
#define QUIRE_CONFIG_BASE_POLICIES_H

/* What happens to a preempted group's blocks; AUTO: the cheaper. */
enum preemption { PREEMPT_AUTO, PREEMPT_SWAP, PREEMPT_RECOMPUTE };
/* The order among requests: of arrival, by their priority, by their tenants' shares. */
enum policy { POLICY_FCFS, POLICY_PRIORITY, POLICY_FAIR };
/* How memory is reserved: by blocks, or contiguously as the paper's baselines do
 * (§6.1). */
enum kv_policy { KV_PAGED, KV_ORCA_MAX, KV_ORCA_POW2, KV_ORCA_ORACLE };

#endif
