"""vLLM weight-transfer engine `redis`: every worker reads the chunks of a version from Redis itself.

    update_weights(manifest)
      pass 1  read and check every chunk; the model is not touched       -> REFUSED: old weights still there
      pass 2  initialize_layerwise_reload -> load_weights(tensors as they arrive, checked again)
              -> finalize_layerwise_reload (always) -> complete? -> kernels of tied heads
                                                                          -> TORN: neither old nor new

vLLM hands an exception of a worker to its caller as text; the marker at its start says which one it was.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import redis
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from leeway.errors import LeewayError
from leeway.streams import Keys, connect
from leeway.weights import WeightManifest, WeightsCorrupt, read_weights, verify_weights

if TYPE_CHECKING:
    from vllm.config import VllmConfig, WeightTransferConfig

log = logging.getLogger(__name__)

REFUSED = "[leeway:weights-refused]"
TORN = "[leeway:weights-torn]"


@dataclass
class RedisInitInfo(WeightTransferInitInfo):
    """Where the run's weights are. `url`: redis://..., `run`: name of the run."""

    url: str
    run: str
    connect_s: float = 30.0


@dataclass
class RedisUpdateInfo(WeightTransferUpdateInfo):
    """Which weights to load: a WeightManifest as JSON text."""

    manifest: str


class RedisWeightTransferEngine(WeightTransferEngine[RedisInitInfo, RedisUpdateInfo]):
    """Loads whole weight versions into this worker's model. The life cycle is in the module's docstring."""

    init_info_cls = RedisInitInfo
    update_info_cls = RedisUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._client: redis.Redis | None = None
        self._keys = Keys("")

    def init_transfer_engine(self, init_info: RedisInitInfo) -> None:
        """Connect. Raises RedisRefused or RedisUnavailable."""
        self.shutdown()
        self._client = connect(init_info.url, wait_s=init_info.connect_s)
        self._keys = Keys(init_info.run)

    def start_weight_update(self) -> None:
        """Nothing: the layerwise reload is opened and closed inside one update, whatever happens there."""

    def finish_weight_update(self) -> None:
        """Nothing: see start_weight_update."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Check and load one version. Raises RuntimeError that starts with REFUSED or TORN."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # a CPU has no accelerator to wait for
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: RedisUpdateInfo) -> None:
        if self._client is None:
            raise RuntimeError(f"{REFUSED} init_transfer_engine was not called")
        try:
            manifest = WeightManifest.model_validate_json(update_info.manifest)
            verify_weights(self._client, self._keys, manifest)
        except (LeewayError, redis.RedisError, ValueError) as exc:
            raise RuntimeError(f"{REFUSED} {exc}; the previous weights are untouched") from exc
        try:
            self._load(manifest, read_weights(self._client, self._keys, manifest))
        except Exception as exc:  # whatever it was, the model holds a mixture now
            raise RuntimeError(
                f"{TORN} loading version {manifest.version}: {type(exc).__name__}: {exc}; the model holds "
                "neither the previous nor the new weights"
            ) from exc

    def _load(self, manifest: WeightManifest, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(weights=_on_device(weights, self.device))
            missing = missing_weights(self.model)
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
        rebuild_tied_heads(self.model)
        for _ in weights:  # a loader may stop early; the check of the stream's end is behind the last tensor
            pass
        if missing:
            raise WeightsCorrupt(
                f"no weights for {len(missing)} layers of the model, among them {', '.join(missing[:5])}",
                version=manifest.version,
            )

    def shutdown(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


def _on_device(
    weights: Iterator[tuple[str, torch.Tensor]], device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        yield name, tensor.to(device)


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
