"""Models: from `model.name` to a directory in Hugging Face format that vLLM and the trainer can load."""

from leeway_host.models.prepare import ModelError, default_cache_dir, prepare_model

__all__ = ["ModelError", "default_cache_dir", "prepare_model"]
