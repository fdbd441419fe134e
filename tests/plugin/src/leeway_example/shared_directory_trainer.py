"""Weights through a directory that trainer and samplers share: the trainer's side.

    all ranks walk over the tensors -> rank 0 writes them to one file -> manifest with its path to Redis

The directory is the value of the environment variable SHARED_WEIGHTS.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from leeway.config import RunConfig
from leeway.errors import UsageError
from leeway.weights import WeightManifest, WeightsNotFinite
from leeway.weights.tensors import dtype_name, place_specs, tensor_spec, wire_words
from leeway_trainer.ranks import Ranks
from leeway_trainer.transports.base import Link, NewVersion, Transport

DIRECTORY_ENV = "SHARED_WEIGHTS"


class SharedDirectory(Transport):
    """One file per version, with the tensors at the manifest's offsets."""

    def check(self, config: RunConfig, ranks: Ranks) -> None:
        """Raise UsageError unless SHARED_WEIGHTS is a directory."""
        directory = os.environ.get(DIRECTORY_ENV, "")
        if not Path(directory).is_dir() or not directory:
            raise UsageError(
                f"weights.transport={config.weights.transport}: {DIRECTORY_ENV}={directory!r} is not a "
                "directory; set it to one that the trainer and all samplers can access"
            )

    def publish(self, new: NewVersion, link: Link) -> WeightManifest | None:
        """Raises WeightsNotFinite for values that must not leave the trainer."""
        if not link.ranks.first:
            for _ in new.tensors():  # every rank walks to the end, because ZeRO-3 gathers on the way
                pass
            return None
        path = Path(os.environ[DIRECTORY_ENV]) / f"{link.keys.run}-{link.epoch}-{new.number}.weights"
        specs = []
        with path.open("wb") as file:
            for name, tensor in new.tensors():
                wrong = int((~tensor.isfinite()).sum())
                if wrong:
                    raise WeightsNotFinite(new.number, name, wrong, tensor.numel())
                values = wire_words(tensor)
                file.write(values.data)
                specs.append(tensor_spec(name, tensor, values, dtype_name(tensor.dtype)))
        return link.announce(new, {"path": str(path)}, place_specs(specs))

    def free(self, versions: Sequence[WeightManifest], link: Link) -> None:
        for manifest in versions:
            if manifest.offer is not None:
                Path(manifest.offer["path"]).unlink(missing_ok=True)


TRANSPORT = SharedDirectory()
