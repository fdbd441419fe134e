"""A weight transport as an installed package would add it: versions as files of a shared directory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file

from leeway.config import RunConfig
from leeway.errors import UsageError
from leeway.weights import WeightManifest
from leeway.weights.tensors import tensor_specs
from leeway_trainer.ranks import Ranks
from leeway_trainer.transports.base import Link, NewVersion, Transport

DIRECTORY = "FILE_TRANSPORT_DIRECTORY"


class FileTransport(Transport):
    """Writes every version as a safetensors file that samplers read."""

    def check(self, config: RunConfig, ranks: Ranks) -> None:
        if DIRECTORY not in os.environ:
            raise UsageError(f"weights.transport=file needs the environment variable {DIRECTORY}")

    def publish(self, new: NewVersion, link: Link) -> WeightManifest | None:
        tensors = {name: tensor.cpu().clone() for name, tensor in new.tensors()}
        if not link.ranks.first:
            return None
        path = Path(os.environ[DIRECTORY]) / f"{link.epoch}-{new.number}.safetensors"
        save_file(tensors, path)
        return link.announce(new, {"path": str(path)}, tensor_specs(tensors.items()))

    def free(self, versions: Sequence[WeightManifest], link: Link) -> None:
        for manifest in versions:
            Path(manifest.offer["path"]).unlink(missing_ok=True)


TRANSPORT = FileTransport()
