"""The example transport (tests/plugin): what the trainer's side writes, the sampler's side verifies."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
import torch

from leeway.config import RunConfig
from leeway.errors import UsageError
from leeway.streams import Keys
from leeway.weights import Patience, WeightManifest, WeightsCorrupt, WeightsNotFinite
from leeway_example import shared_directory_sampler, shared_directory_trainer
from leeway_sampler.transports.base import Endpoint
from leeway_trainer.ranks import Ranks
from leeway_trainer.transports.base import Link, NewVersion

CONFIG = RunConfig.model_validate({"task": {"kind": "digits"}, "weights": {"transport": "shared_directory"}})
TENSORS = {
    "embed": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "norm": torch.tensor([0.5, -2.0], dtype=torch.float32),
}


@pytest.fixture
def link(client: redis.Redis, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Link:
    monkeypatch.setenv(shared_directory_trainer.DIRECTORY_ENV, str(tmp_path))
    ranks = Ranks(rank=0, size=1, device=torch.device("cpu"), control=None)  # type: ignore[arg-type]  # one rank
    return Link(config=CONFIG, ranks=ranks, client=client, keys=keys, epoch=1)


@pytest.fixture
def receiver(keys: Keys) -> shared_directory_sampler.SharedDirectoryReceiver:
    endpoint = Endpoint(config=CONFIG, redis_url="", run=keys.run, sampler="s0")
    return shared_directory_sampler.SharedDirectoryReceiver(endpoint)


def publish(link: Link, number: int, tensors: dict[str, torch.Tensor] = TENSORS) -> WeightManifest:
    new = NewVersion(
        number=number,
        step=number,
        nbytes=20,
        tensors=lambda: iter(tensors.items()),
        changes=lambda: iter(()),
        base=None,
        published=(),
        resend=False,
    )
    manifest = shared_directory_trainer.TRANSPORT.publish(new, link)
    assert manifest is not None
    return manifest


def patience() -> Patience:
    return Patience(10.0)


def test_the_file_holds_the_tensors_at_the_manifests_offsets(
    link: Link, receiver: shared_directory_sampler.SharedDirectoryReceiver
) -> None:
    manifest = publish(link, 1)
    receiver.stage(manifest, patience())
    data = shared_directory_sampler.file_of(manifest).read_bytes()
    assert manifest.transport == "shared_directory" and len(data) == manifest.nbytes == 20
    for spec in manifest.tensors:
        words = bytearray(data[spec.offset : spec.offset + spec.nbytes])
        read = torch.frombuffer(words, dtype=getattr(torch, spec.dtype)).reshape(spec.shape)
        assert torch.equal(read, TENSORS[spec.name])


def test_a_damaged_file_is_rejected_before_the_engine_pauses(
    link: Link, receiver: shared_directory_sampler.SharedDirectoryReceiver
) -> None:
    manifest = publish(link, 1)
    path = shared_directory_sampler.file_of(manifest)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(WeightsCorrupt, match="tensor norm"):
        receiver.stage(manifest, patience())


def test_a_failed_version_leaves_the_previous_one(
    link: Link, receiver: shared_directory_sampler.SharedDirectoryReceiver
) -> None:
    first, second = publish(link, 1), publish(link, 2)
    receiver.stage(first, patience())
    receiver.commit()
    receiver.stage(second, patience())
    assert receiver.rollback() == first


def test_versions_that_nobody_needs_are_deleted(link: Link, tmp_path: Path) -> None:
    first, second = publish(link, 1), publish(link, 2)
    shared_directory_trainer.TRANSPORT.free([first], link)
    assert list(tmp_path.iterdir()) == [shared_directory_sampler.file_of(second)]


def test_values_that_are_not_finite_stay_in_the_trainer(link: Link) -> None:
    with pytest.raises(WeightsNotFinite, match="norm"):
        publish(link, 1, {"norm": torch.tensor([1.0, float("nan")])})


def test_a_missing_directory_is_reported_before_the_run_starts(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(shared_directory_trainer.DIRECTORY_ENV)
    with pytest.raises(UsageError, match="SHARED_WEIGHTS"):
        shared_directory_trainer.TRANSPORT.check(link.config, link.ranks)
