"""Every measure by name: what it measures, and what to do when it fails."""

from __future__ import annotations

CATALOGUE: dict[str, tuple[str, str]] = {
    "sampling_distribution/engine": (
        "log-prob mode and token bans of every engine",
        "take the setting out of sampler.engine_args; Leeway needs processed_logprobs and no bans",
    ),
    "sampling_distribution/support": (
        "reported heads sum to 1 and hold the drawn token",
        "with top-p, top-k or min-p set top_k <= head_tokens; otherwise report the engine's version",
    ),
    "sampling_distribution/calibration": (
        "the most likely token is drawn as often as reported",
        "the reported log-probs are not those of the draw: check logprobs_mode and temperature",
    ),
    "sampling_distribution/ratio_mean": (
        "mean of pi_s/mu over drawn tokens is 1",
        "below 1: the sampler cuts or bans tokens without saying so; above 1: raw log-probs",
    ),
    "sampling_distribution/probe": (
        "draws from one fixed prefix against reported mu, chi-square",
        "as calibration; the probe needs no trainer, so the fault is in the engine",
    ),
    "retokenisation/drift": (
        "responses that decoding and encoding would change (for information)",
        "nothing: ids travel; never route responses through text",
    ),
    "retokenisation/ids_unchanged": (
        "digests made by samplers equal those of what was trained",
        "something between sampler and trainer changes rollouts; do not use the run's weights",
    ),
    "deferral/outstanding": (
        "tickets that were passed over when their batch was trained",
        "batches must wait for all of their tickets: no first-finished batching",
    ),
    "deferral/lengths": (
        "length histogram published against trained",
        "find what drops or replaces long responses",
    ),
    "deferral/selection": (
        "being trained against length, reward and finish order, correlation",
        "find the filter that looks at it",
    ),
    "deferral/age": (
        "age against length and reward within a version, correlation",
        "long responses are put off: see deferral/outstanding",
    ),
    "reward_filter/groups": (
        "requested responses of every group that were not trained, or twice",
        "remove the filter (zero-variance groups cost tokens, not bias)",
    ),
    "reward_filter/rewards": (
        "mean reward published against trained",
        "find what drops or replaces responses by reward",
    ),
    "reward_filter/denominators": (
        "loss denominators against requested counts",
        "divide by what was requested, not by what was kept",
    ),
    "version/spans": (
        "trained tokens against the version of theta_s",
        "rollouts of another version were trained on: void them",
    ),
    "version/age": (
        "age of the trained batch against sync.max_age",
        "verdicts or weights arrive too late: look at time/verdict_s and time/publish_s",
    ),
    "version/attested": (
        "sampler digests against the published ones",
        "restart that sampler; it says a version that it does not hold",
    ),
    "version/resync_took": (
        "first fresh batch after a resync: ESS 1, usual discrepancy, closer to the new weights",
        "the new weights did not reach the engine; do not resync again, restart the sampler",
    ),
    "numerics/non_finite": (
        "refused log-probs, weights, losses",
        "see the evidence; lower the learning rate, or restart the sampler",
    ),
    "numerics/log_ratio": (
        "largest |log-ratio|, lag or discrepancy",
        "resync more often (lag), or look at the engine (discrepancy)",
    ),
    "numerics/discrepancy": (
        "KL(mu || pi_s) against its own history",
        "follow the cause that the evidence names",
    ),
    "collapse/self_prefix_kl": (
        "KL on the new policy's own prefixes against the sampler's",
        "go back to an earlier checkpoint with a lower learning rate or more resyncs",
    ),
    "collapse/reward": (
        "reward below half of its running peak for ten steps",
        "as self_prefix_kl",
    ),
    "collapse/repetition": ("repeated 4-grams within responses", "as self_prefix_kl"),
    "collapse/length": ("responses all cut off, or nearly empty", "look at responses; as self_prefix_kl"),
    "collapse/entropy": ("entropy far above the first steps", "as self_prefix_kl"),
}
