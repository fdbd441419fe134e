"""Every measure by name: what it compares, and what to do when it fails."""

from __future__ import annotations

CATALOGUE: dict[str, tuple[str, str]] = {
    "sampling_distribution/engine": (
        "log-prob mode and token bans of every engine",
        "remove the setting from sampler.engine_args; Leeway needs processed_logprobs and no bans",
    ),
    "sampling_distribution/support": (
        "reported heads sum to 1 and contain the drawn token",
        "with top-p, top-k or min-p, set top_k <= head_tokens; otherwise report the engine's version",
    ),
    "sampling_distribution/calibration": (
        "the most likely token is drawn as often as reported",
        "the reported log-probs are not those of the draw: check logprobs_mode and temperature",
    ),
    "sampling_distribution/ratio_mean": (
        "mean of pi_s/mu over drawn tokens is 1",
        "below 1: the sampler cuts or bans tokens without reporting it; above 1: raw log-probs",
    ),
    "sampling_distribution/probe": (
        "chi-square of draws from one fixed prefix against the reported mu",
        "see calibration; the probe does not involve the trainer, so the fault is in the engine",
    ),
    "retokenisation/drift": (
        "responses that decoding and re-encoding would change (informational)",
        "nothing: token ids are sent, not text; never route responses through text",
    ),
    "retokenisation/ids_unchanged": (
        "digests computed by samplers equal those of the trained responses",
        "something between sampler and trainer alters rollouts; discard the run's weights",
    ),
    "deferral/outstanding": (
        "tickets that were still outstanding when their batch was trained",
        "batches must wait for all of their tickets: no first-finished batching",
    ),
    "deferral/lengths": (
        "length histogram of published against trained responses",
        "find what drops or replaces long responses",
    ),
    "deferral/selection": (
        "correlation of being trained with length, reward and finish order",
        "find the filter that depends on it",
    ),
    "deferral/age": (
        "correlation of age with length and reward within a version",
        "long responses are deferred: see deferral/outstanding",
    ),
    "reward_filter/groups": (
        "requested responses of each group that were not trained, or were trained twice",
        "remove the filter (groups without variance cost tokens but cause no bias)",
    ),
    "reward_filter/rewards": (
        "mean reward of published against trained responses",
        "find what drops or replaces responses by reward",
    ),
    "reward_filter/denominators": (
        "denominators of the loss against requested counts",
        "divide by the requested counts, not by the kept ones",
    ),
    "version/spans": (
        "weight versions of trained tokens against that of theta_s",
        "rollouts of another version were trained: void them",
    ),
    "version/age": (
        "age of the trained batch against sync.max_age",
        "verdicts or weights arrive too late: look at time/verdict_s and time/publish_s",
    ),
    "version/attested": (
        "weight digests reported by samplers against the published ones",
        "restart that sampler; it reports a version it has not loaded",
    ),
    "version/resync_took": (
        "first fresh batch after a resync: ESS 1, usual discrepancy, closer to the new weights",
        "the new weights did not reach the engine; do not resync again, restart the sampler",
    ),
    "numerics/non_finite": (
        "rejected log-probs, weights, losses",
        "see the evidence; lower the learning rate, or restart the sampler",
    ),
    "numerics/log_ratio": (
        "largest |log-ratio| of lag and discrepancy",
        "resync more often (lag) or examine the engine (discrepancy)",
    ),
    "numerics/discrepancy": (
        "KL(mu || pi_s) against its own history",
        "fix the cause named in the evidence",
    ),
    "collapse/self_prefix_kl": (
        "KL on the new policy's own prefixes against the sampler's",
        "resume from an earlier checkpoint with a lower learning rate or more resyncs",
    ),
    "collapse/reward": (
        "reward below half of its running peak for ten steps",
        "see collapse/self_prefix_kl",
    ),
    "collapse/repetition": ("repeated 4-grams within responses", "see collapse/self_prefix_kl"),
    "collapse/length": (
        "responses all truncated, or nearly empty",
        "inspect responses; see collapse/self_prefix_kl",
    ),
    "collapse/entropy": ("entropy far above that of the first steps", "see collapse/self_prefix_kl"),
}
