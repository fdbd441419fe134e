"""The sampler: one vLLM engine at one committed weight version, fed with tickets through Redis."""
