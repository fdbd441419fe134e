"""Models: from `model.name` to a directory in Hugging Face format that vLLM and the trainer can load."""

from leeway.models.base import ModelError
from leeway_host.models.base import default_cache_dir
from leeway_host.models.prepare import prepare_model

__all__ = ["ModelError", "default_cache_dir", "prepare_model"]
