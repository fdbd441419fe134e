"""The controller: what is in a batch, for which weights, and when to resync."""
