"""Runs on this machine: `leeway run` and `leeway chaos`."""
