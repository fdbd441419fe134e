"""A transport from an installed package, and what EngineWeights does with any transport. vLLM is doubled."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from leeway.config import RunConfig
from leeway.errors import UsageError
from leeway.weights import WeightManifest, weights_digest
from leeway_sampler.transports import TRANSPORTS
from leeway_sampler.transports.base import Endpoint
from leeway_sampler.weight_update import NOTHING, EngineWeights, WeightsRefused, WeightsTorn, loaded_from

TOY = '''
"""Weights as files: the offer has the path, the engine loads the text."""

from pathlib import Path

from leeway_sampler.transports.base import Transport, WeightReceiver


class FileReceiver(WeightReceiver):
    def __init__(self, endpoint):
        self.endpoint, self.held, self.staged = endpoint, None, None

    def stage(self, manifest, patience):
        self.staged = manifest, Path(manifest.offer["path"]).read_text()

    async def load(self, llm, manifest):
        known = [pair for pair in (self.staged, self.held) if pair]
        await llm.load(next(text for found, text in known if found == manifest))

    def commit(self):
        self.held, self.staged = self.staged, None

    def rollback(self):
        self.staged = None
        return self.held and self.held[0]


TRANSPORT = Transport(backend="toy_files", open=FileReceiver)
'''


class Llm:
    """Stands in for vLLM: its weights are a text, and it must be paused while they change."""

    def __init__(self) -> None:
        self.weights, self.paused, self.calls, self.broken = "", False, [], set()

    async def load(self, weights: str) -> None:
        assert self.paused
        self.weights = "a mixture"
        if weights in self.broken:
            raise RuntimeError(f"cannot load {weights}")
        self.weights = weights

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.paused = True
        self.calls.append(mode)

    async def resume_generation(self) -> None:
        self.paused = False

    async def reset_prefix_cache(self) -> bool:
        self.calls.append("reset_prefix_cache")
        return True

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The toy transport, declared by the entry point of a package."""
    (tmp_path / "toy_transport.py").write_text(TOY)
    info = tmp_path / "toy_transport-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-transport\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[leeway.transports.sampler]\ntoy = toy_transport:TRANSPORT\n")
    monkeypatch.syspath_prepend(tmp_path)
    TRANSPORTS.__dict__.pop("_installed", None)
    yield TRANSPORTS["toy"]
    TRANSPORTS.__dict__.pop("_installed", None)
    TRANSPORTS._loaded.pop("toy")
    sys.modules.pop("toy_transport")


def offered(path: Path, version: int, transport: str = "toy") -> WeightManifest:
    file = path / f"{version}.txt"
    file.write_text(f"weights {version}")
    return WeightManifest(
        run="r", epoch=0, version=version, step=0, transport=transport, offer={"path": str(file)},
        chunk_bytes=1, chunks=0, wire_nbytes=0, nbytes=0, tensors=(), digest=weights_digest([]),
    )  # fmt: skip


def engine_weights(toy: Any) -> tuple[Llm, EngineWeights]:
    config = RunConfig.model_validate({"task": {"kind": "digits"}})
    llm = Llm()
    receiver = toy.open(Endpoint(config, "redis://localhost", "r", "s0"))
    return llm, EngineWeights(llm, "toy", receiver)  # type: ignore[arg-type]


def test_built_in_and_installed_transports_are_found(toy):
    assert list(TRANSPORTS) == ["nccl", "redis", "toy"]
    with pytest.raises(UsageError, match="unknown weight transport 'tor'; did you mean 'toy'"):
        TRANSPORTS["tor"]


def test_an_installed_transport_loads_versions(toy, tmp_path):
    llm, weights = engine_weights(toy)
    assert weights.loaded == NOTHING
    for version in (1, 2):
        manifest = offered(tmp_path, version)
        assert asyncio.run(weights.apply(manifest)) == manifest.digest
        assert (llm.weights, llm.paused) == (f"weights {version}", False)
        assert weights.loaded == loaded_from(manifest)
    assert llm.calls == ["abort", "reset_prefix_cache"] * 2


def test_a_version_of_another_transport_is_rejected_with_both_names(toy, tmp_path):
    llm, weights = engine_weights(toy)
    asyncio.run(weights.apply(offered(tmp_path, 1)))
    before = list(llm.calls)
    with pytest.raises(WeightsRefused, match="version 2 was published by transport 'nccl', .* by 'toy'"):
        asyncio.run(weights.apply(offered(tmp_path, 2, "nccl")))
    assert (weights.loaded.version, llm.calls) == (1, before)


def test_a_version_that_cannot_be_staged_leaves_the_engine_alone(toy, tmp_path):
    llm, weights = engine_weights(toy)
    asyncio.run(weights.apply(offered(tmp_path, 1)))
    manifest, before = offered(tmp_path, 2), list(llm.calls)
    (tmp_path / "2.txt").unlink()
    with pytest.raises(WeightsRefused, match=r"2\.txt.*the weights in the engine are unchanged"):
        asyncio.run(weights.apply(manifest))
    assert (weights.loaded.version, llm.weights, llm.calls) == (1, "weights 1", before)


def test_a_version_that_cannot_be_loaded_is_replaced_by_the_previous_one(toy, tmp_path):
    llm, weights = engine_weights(toy)
    asyncio.run(weights.apply(offered(tmp_path, 1)))
    llm.broken = {"weights 2"}
    with pytest.raises(WeightsRefused, match="cannot load weights 2; version 1 was put back"):
        asyncio.run(weights.apply(offered(tmp_path, 2)))
    assert (weights.loaded.version, llm.weights, llm.paused) == (1, "weights 1", False)


def test_when_nothing_can_be_put_back_there_is_no_version_until_the_next_update(toy, tmp_path):
    llm, weights = engine_weights(toy)
    llm.broken = {"weights 1"}
    with pytest.raises(WeightsTorn, match="cannot load weights 1; there are no weights to put back"):
        asyncio.run(weights.apply(offered(tmp_path, 1)))
    llm.broken = set()
    asyncio.run(weights.apply(offered(tmp_path, 2)))
    llm.broken = {"weights 2", "weights 3"}
    with pytest.raises(WeightsTorn, match="weights 3; putting version 2 back: cannot load weights 2"):
        asyncio.run(weights.apply(offered(tmp_path, 3)))
    assert (weights.loaded, llm.paused) == (NOTHING, False)
    asyncio.run(weights.apply(offered(tmp_path, 4)))
    assert weights.loaded.version == 4
