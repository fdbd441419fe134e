"""The built-in rewards, one module per reward; the name of a module is the name of its reward."""
