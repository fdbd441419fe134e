"""The sampler: one vLLM engine at one committed weight version, which answers tickets from Redis."""
