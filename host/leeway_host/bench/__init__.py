"""Measurements on this machine, with real parts in real processes."""
