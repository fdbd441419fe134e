"""A transport from an installed package is found by its entry point and carries a whole run."""

from __future__ import annotations

import pytest
import torch
from file_transport import DIRECTORY
from other_side import OtherSide
from safetensors.torch import load_file
from trainer_support import run_config

import leeway_trainer.transports as transports
from leeway.config.identity import identify
from leeway.errors import UsageError
from leeway.messages import SamplerStatus
from leeway.registry import Registry
from leeway.statuses import write_status
from leeway.streams import now
from leeway.weights import published_manifests
from leeway.weights.tensors import tensor_specs
from leeway_trainer.epochs import TrainerSetup
from leeway_trainer.train import Trainer


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """`file` as a package on sys.path declares it; returns the directory of its files."""
    info = tmp_path / "site" / "file_transport-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: file-transport\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[leeway.transports.trainer]\nfile = file_transport:TRANSPORT\n")
    monkeypatch.syspath_prepend(str(info.parent))
    shelf = transports.TRANSPORTS
    fresh = Registry(shelf.group, shelf.package, shelf.attribute, shelf.kind, shelf.what)
    monkeypatch.setattr(transports, "TRANSPORTS", fresh)
    files = tmp_path / "files"
    files.mkdir()
    monkeypatch.setenv(DIRECTORY, str(files))
    return files


def config_of(tiny_dir, name="file"):
    return run_config(
        tiny_dir,
        trainer={"dtype": "bfloat16", "learning_rate": 1e-3, "steps": 3},
        sync={"max_age": 1, "stall_timeout_s": 20.0},
        weights={"transport": name},
        output={"save_model": False},
    )


def test_a_run_over_an_installed_transport(tiny_dir, ranks, client, keys, tmp_path, installed):
    config = config_of(tiny_dir)
    digest = identify(config).digest
    status = SamplerStatus(sampler="s0", heartbeat=now() + 3600, config=digest, epoch=1, version=1)
    write_status(client, keys, status, budget_s=5)  # version 0 is needed no more
    with OtherSide(client, keys, config) as other:
        run = Trainer(config, ranks, TrainerSetup(str(tiny_dir), tmp_path / "run", keys, client))
        run.run()
        other.wait_for(lambda: other.reports[-1].event == "finished")
    assert [(m.version, m.transport, m.codec, m.chunks) for m in other.manifests] == [
        (version, "file", "full", 0) for version in range(3)
    ]
    assert not client.smembers(keys.weight_streams), "no bytes went through Redis"
    last = other.manifests[-1]
    sent = load_file(last.offer["path"])
    for name, param in run.learner.theta_s.runner.lm.named_parameters():
        assert torch.equal(sent[name], param), "what is sent is theta_s"
    ordered = [(spec.name, sent[spec.name]) for spec in last.tensors]
    assert tuple(tensor_specs(ordered)) == last.tensors
    kept = [m.version for m in published_manifests(client, keys)]
    assert kept == [1, 2]
    assert sorted(p.name for p in installed.iterdir()) == [f"{last.epoch}-{v}.safetensors" for v in kept]


def test_an_unknown_name_lists_what_is_registered(tiny_dir, ranks, installed):
    with pytest.raises(
        UsageError,
        match="unknown weight transport 'fil'; did you mean 'file'\\? available: file, nccl, redis",
    ):
        transports.find_transport(config_of(tiny_dir, "fil"), ranks)


def test_a_transport_that_cannot_work_here_says_so_before_the_model_is_loaded(
    tmp_path, ranks, client, keys, installed, monkeypatch
):
    monkeypatch.delenv(DIRECTORY)
    with pytest.raises(
        UsageError, match=f"weights.transport=file needs the environment variable {DIRECTORY}"
    ):
        Trainer(config_of("nowhere"), ranks, TrainerSetup("nowhere", tmp_path, keys, client))
