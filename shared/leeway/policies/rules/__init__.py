"""The built-in rules of the resync policy. A module's name is the name of its rule."""
