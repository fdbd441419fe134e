"""Benchmarks on this machine, with the real components in real processes."""
