"""Names of the methods and of their settings, importable without torch (`leeway.corrections.METHODS` holds
the methods)."""

_CLIP = ("clip_low", "clip_high", "dual_clip")
_BAND = ("mis_low", "mis_high", "mis_inside", "mis_outside", "is_level", "score_centering", "head_tail")

METHOD_SETTINGS: dict[str, tuple[str, ...]] = {
    "dlc": ("centering", "lag_clip", *_CLIP, "clamp_low", "clamp_high", "head_tail"),
    "none": ("score_centering", "head_tail"),
    "is": ("is_level", "score_centering", "head_tail"),
    "tis": ("tis_clip", "tis_clip_low", "is_level", "score_centering", "head_tail"),
    "mis": _BAND,
    "icepop": _BAND,
    "score_centering": ("head_tail",),
    "ppo": ("reference", *_CLIP, "score_centering", "head_tail"),
    "decoupled_ppo": ("prox_logp_method", "behave_weight_cap", "clip_low", "clip_high"),
    "gspo": ("reference", "gspo_clip_low", "gspo_clip_high"),
    "m2po": ("m2_variant", "m2_threshold", "prox_logp_method", "behave_weight_cap", *_CLIP),
    "vcpo": ("vcpo_clip", "vcpo_scaling", "vcpo_base_ess"),
}
"""Method -> keys of CorrectionConfig that it reads."""
METHOD_NAMES = tuple(METHOD_SETTINGS)
COMMON_SETTINGS = ("method", "advantage", "std_floor", "aggregation")
"""Keys of CorrectionConfig that every method reads."""
