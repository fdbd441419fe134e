"""vLLM weight-transfer engine `redis`: workers load from the sampler's verified host copy (kinds/redis.py).

    update_weights(path, manifest)
      map the copy -> initialize_layerwise_reload -> load_weights(tensors)
      -> finalize_layerwise_reload (always) -> complete? -> rebuild the kernels of tied heads

Every byte was verified before, so only the model can fail here. After a failure it holds neither the old nor
the new weights; the sampler puts the old ones back in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from leeway.weights import WeightManifest, WeightsCorrupt
from leeway_sampler.transports.base import FAILED


@dataclass
class HostInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is Any to mypy
    """Empty: workers need no connection."""


@dataclass
class HostUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM is Any to mypy
    """Which weights to load. `path`: file to map; `manifest`: a WeightManifest as JSON text."""

    path: str
    manifest: str


class RedisWeightTransferEngine(
    WeightTransferEngine[HostInitInfo, HostUpdateInfo]  # type: ignore[misc]  # vLLM is Any to mypy
):
    """Loads whole weight versions into this worker's model, as drawn in the module's docstring."""

    init_info_cls = HostInitInfo
    update_info_cls = HostUpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: HostInitInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Nothing to do: one update opens and closes the layerwise reload, even when it fails."""

    def finish_weight_update(self) -> None:
        """Nothing to do: see start_weight_update."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one version. Raises RuntimeError with a message that starts with FAILED."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # a CPU has no accelerator to wait for
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: HostUpdateInfo) -> None:
        manifest = WeightManifest.model_validate_json(update_info.manifest)
        try:
            self._load(manifest, mapped_tensors(update_info.path, manifest, self.device))
        except Exception as exc:  # whatever it was, the model now holds a mixture
            raise RuntimeError(
                f"{FAILED} loading version {manifest.version}: {type(exc).__name__}: {exc}"
            ) from exc

    def _load(self, manifest: WeightManifest, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(weights=weights)
            missing = missing_weights(self.model)
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
        rebuild_tied_heads(self.model)
        if missing:
            raise WeightsCorrupt(
                f"no weights for {len(missing)} layers of the model, including {', '.join(missing[:5])}",
                version=manifest.version,
            )

    def shutdown(self) -> None:
        """Nothing to release."""


def mapped_tensors(
    path: str, manifest: WeightManifest, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor on `device`) of each tensor in a host copy; on a CPU, views that loaders copy from."""
    data = torch.from_file(path, shared=True, size=max(manifest.nbytes, 1), dtype=torch.uint8)
    for spec in manifest.tensors:
        dtype = getattr(torch, spec.dtype)
        flat = data[spec.offset : spec.offset + spec.nbytes]
        if spec.offset % dtype.itemsize:  # it follows a tensor of narrower words
            flat = flat.clone()
        yield spec.name, flat.view(dtype).reshape(spec.shape).to(device)


def missing_weights(model: torch.nn.Module) -> list[str]:
    """Layers that received no weights or only some. To be called before finalize_layerwise_reload.

    vLLM would keep their old weights and only warn. Tied heads have no weights to load, and the rows that pad
    a vocabulary are never loaded.
    """
    missing = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        parameters = info.kernel_tensors[0] if info.kernel_tensors is not None else {}
        if not info.can_load() or not any(p.numel() or _packed(layer) for p in parameters.values()):
            continue
        if isinstance(layer, ParallelLMHead) and _tied(model, layer, parameters["weight"]):
            continue
        wanted = 1 if isinstance(layer, VocabParallelEmbedding) else info.load_numel_total or 0
        if info.load_numel < wanted:
            missing.append(name)
    return missing


def _packed(layer: torch.nn.Module) -> bool:
    """Whether a layer keeps only a packed copy of its weight, as linear layers do on CPU."""
    return hasattr(layer, "cpu_linear")


def _tied(model: torch.nn.Module, head: torch.nn.Module, weight: torch.Tensor) -> bool:
    """Whether an embedding shares the output head's `weight`; works while a reload is open, too."""
    for layer in model.modules():
        if layer is head or not isinstance(layer, VocabParallelEmbedding):
            continue
        kernel = get_layerwise_info(layer).kernel_tensors
        shared = kernel[0].get("weight") if kernel is not None else getattr(layer, "weight", None)
        if shared is weight:
            return True
    return False


def rebuild_tied_heads(model: torch.nn.Module) -> None:
    """Rebuild the packed CPU kernels of output heads that share an embedding's weight.

    Such a head loads nothing itself, so the reload leaves the previous version in its kernel.
    """
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and _packed(layer) and _tied(model, layer, layer.weight):
            layer.quant_method.process_weights_after_loading(layer)
