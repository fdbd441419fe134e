"""A correction, a resync policy, a task, a reward, a weight transport and a metric for Leeway."""
