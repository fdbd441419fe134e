"""Names of the methods, importable without torch (`leeway.corrections.METHODS` holds the methods)."""

METHOD_NAMES = (
    "dlc",
    "none",
    "is",
    "tis",
    "mis",
    "icepop",
    "score_centering",
    "ppo",
    "decoupled_ppo",
    "gspo",
    "m2po",
    "vcpo",
)
