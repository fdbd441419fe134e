"""The command `leeway`."""
