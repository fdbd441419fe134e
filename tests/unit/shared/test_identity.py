"""The identity of a configuration: which settings count, and what their digest depends on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from leeway.config import RunConfig, Section
from leeway.config.choice import choice_of
from leeway.config.identity import COUNTED, FREE, FREE_SECTIONS, NOTHING, Identity, identify
from leeway.config.load import build_config
from leeway.errors import UsageError

Sections = dict[str, dict[str, Any]]


def identity(**sections: Any) -> Identity:
    return identify(build_config({"task": {"kind": "digits"}, **sections}))


def test_every_key_of_the_configuration_is_classified() -> None:
    classified = {f"{s}.{k}" for table in (COUNTED, FREE) for s, keys in table.items() for k in keys}
    listed = [f"{s}.{k}" for table in (COUNTED, FREE) for s, keys in table.items() for k in keys]
    assert len(listed) == len(classified), "a key is in both tables, or twice in one"
    found = set()
    for name, field in RunConfig.model_fields.items():
        if choice_of(field.metadata):
            assert name in ("task", *FREE_SECTIONS)
        elif isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            found |= {f"{name}.{key}" for key in field.annotation.model_fields}
        else:
            found.add(f".{name}")
    assert found == classified


COUNTS: dict[str, Sections] = {
    "temperature": {"sampling": {"temperature": 0.5}},
    "another head": {"sampling": {"head_tokens": 8}},
    "model": {"model": {"name": "tiny"}},
    "parameters of the task": {"task": {"kind": "digits", "params": {"length": 3}}},
    "reward": {"task": {"kind": "digits", "reward": "last_number"}},
    "time limit of the reward": {"task": {"kind": "digits", "reward_timeout_s": 1.0}},
    "size of a batch": {"batch": {"prompts": 4}},
    "type of the weights": {"sampler": {"dtype": "float32"}},
    "quantisation": {"sampler": {"engine_args": {"quantization": "fp8"}}},
}
DOES_NOT: dict[str, Sections] = {
    "an explicit default": {"sampling": {"temperature": 1.0}},
    "ports": {"telemetry": {"metrics_port": 9000}, "sampler": {"http_port": 8000}},
    "time limits": {"sync": {"commit_timeout_s": 5.0}, "sampler": {"drain_s": 1.0}},
    "replicas": {"sampler": {"replicas": 3}},
    "the trainer's settings": {"trainer": {"learning_rate": 1.0}, "correction": {"method": "tis"}},
    "scoring processes": {"task": {"kind": "digits", "reward_workers": 4}},
    "output": {"output": {"dir": "elsewhere"}},
}


@pytest.mark.parametrize("what", COUNTS)
def test_what_changes_a_draw_a_reward_or_a_batch_counts(what: str) -> None:
    assert identity(**COUNTS[what]).digest != identity().digest


def test_the_seed_counts() -> None:
    assert identity(seed=1).differences(identity()) == ["seed"]


@pytest.mark.parametrize("what", DOES_NOT)
def test_what_does_not_change_them_does_not_count(what: str) -> None:
    assert identity(**DOES_NOT[what]) == identity()


def test_of_a_file_the_content_counts_and_not_the_path(tmp_path: Path) -> None:
    def with_file(name: str, text: str) -> Identity:
        (tmp_path / name).write_text(text)
        return identity(task={"kind": "jsonl", "path": f"{tmp_path}/./{name}"})

    first = with_file("a", '{"prompt": "1", "answer": "1"}\n')
    assert with_file("b", '{"prompt": "1", "answer": "1"}\n') == first
    other = with_file("c", '{"prompt": "1", "answer": "2"}\n')
    assert other.digest != first.digest
    assert other.differences(first) == ["task.files"]
    with pytest.raises(UsageError, match="nowhere cannot be read: No such file"):
        identity(task={"kind": "jsonl", "path": str(tmp_path / "nowhere")})


def test_differences_name_the_keys() -> None:
    one, other = identity(), identity(sampling={"temperature": 0.5, "top_k": 3, "head_tokens": 8})
    keys = ["sampling.head_tokens", "sampling.temperature", "sampling.top_k"]
    assert one.differences(other) == other.differences(one) == keys
    assert one.differences(one) == []
    for unreadable in (NOTHING, Identity("no JSON"), Identity("[1]")):
        assert one.differences(unreadable) == []
    assert NOTHING.digest == ""
