"""The kinds of tasks, one module per kind; the name of a module is the name of its kind."""
