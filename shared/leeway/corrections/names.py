"""Names of the methods, importable without torch (`leeway.corrections.METHODS` holds the methods)."""

METHOD_NAMES = ("dlc", "none", "is")
