"""vLLM weight-transfer engine `redis`: workers load from the sampler's verified host copy (store.py).

    update_weights(path, manifest)
      map the copy -> initialize_layerwise_reload -> load_weights(tensors)
      -> finalize_layerwise_reload (always) -> complete? -> kernels of tied heads

Every byte was verified before, so that what can fail here is the model. The model then holds neither the old
nor the new weights; the sampler puts the old ones back by the same way. vLLM hands an exception of a worker
to its caller as text; the marker at its start is where the reason begins.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from vllm.config import VllmConfig, WeightTransferConfig

log = logging.getLogger(__name__)

FAILED = "[leeway:weights-failed]"


@dataclass
class HostInitInfo(WeightTransferInitInfo):
    """Nothing: workers need no connection."""


@dataclass
class HostUpdateInfo(WeightTransferUpdateInfo):
    """Which weights to load. `path`: file to map; `manifest`: a WeightManifest as JSON text."""

    path: str
    manifest: str


class RedisWeightTransferEngine(WeightTransferEngine[HostInitInfo, HostUpdateInfo]):
    """Loads whole weight versions into this worker's model. The life cycle is in the module's docstring."""

    init_info_cls = HostInitInfo
    update_info_cls = HostUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)

    def init_transfer_engine(self, init_info: HostInitInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Nothing: the layerwise reload is opened and closed inside one update, whatever happens there."""

    def finish_weight_update(self) -> None:
        """Nothing: see start_weight_update."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one version. Raises RuntimeError that starts with FAILED."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # a CPU has no accelerator to wait for
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: HostUpdateInfo) -> None:
        manifest = WeightManifest.model_validate_json(update_info.manifest)
        try:
            self._load(manifest, mapped_tensors(update_info.path, manifest, self.device))
        except Exception as exc:  # whatever it was, the model holds a mixture now
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
                f"no weights for {len(missing)} layers of the model, among them {', '.join(missing[:5])}",
                version=manifest.version,
            )

    def shutdown(self) -> None:
        """Nothing to release."""


def mapped_tensors(
    path: str, manifest: WeightManifest, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor on `device`) of a host copy; on a CPU they are views of it, which loaders copy from."""
    data = torch.from_file(path, shared=True, size=max(manifest.nbytes, 1), dtype=torch.uint8)
    for spec in manifest.tensors:
        dtype = getattr(torch, spec.dtype)
        flat = data[spec.offset : spec.offset + spec.nbytes]
        if spec.offset % dtype.itemsize:  # behind a tensor of narrower words
            flat = flat.clone()
        yield spec.name, flat.view(dtype).reshape(spec.shape).to(device)


def missing_weights(model: torch.nn.Module) -> list[str]:
    """Layers that got no or not all weights, between load_weights and finalize_layerwise_reload.

    vLLM would keep their old weights with no more than a warning. A tied head has none of its own, and the
    rows that pad a vocabulary are never loaded.
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
    """On CPU a linear layer keeps only the packed copy of its weight."""
    return hasattr(layer, "cpu_linear")


def _tied(model: torch.nn.Module, head: torch.nn.Module, weight: torch.Tensor) -> bool:
    """Whether `weight` of the output head is also an embedding's, also while a reload is open."""
    for layer in model.modules():
        if layer is head or not isinstance(layer, VocabParallelEmbedding):
            continue
        kernel = get_layerwise_info(layer).kernel_tensors
        shared = kernel[0].get("weight") if kernel is not None else getattr(layer, "weight", None)
        if shared is weight:
            return True
    return False


def rebuild_tied_heads(model: torch.nn.Module) -> None:
    """Build the packed CPU kernels of output heads again that share an embedding's weight.

    Such a head loads nothing itself, so the reload leaves its kernel with the weight of the last version.
    """
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and _packed(layer) and _tied(model, layer, layer.weight):
            layer.quant_method.process_weights_after_loading(layer)
