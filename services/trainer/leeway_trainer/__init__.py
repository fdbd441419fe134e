"""The trainer of Leeway: the policy, the copy of the samplers' weights, the correction and the optimiser."""
