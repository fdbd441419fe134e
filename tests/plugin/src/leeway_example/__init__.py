"""A correction, a resync policy, a task and a reward for Leeway."""
