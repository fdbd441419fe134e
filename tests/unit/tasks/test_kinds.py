"""Kinds of tasks: each has its own keys, and an error for a wrong key names those of its kind."""

from __future__ import annotations

import json

import pytest

from leeway.config import RunConfig
from leeway.config.load import build_config, dump_config
from leeway.config.read_yaml import parse_yaml
from leeway.errors import ConfigError, UsageError
from leeway.tasks import KINDS, Task, TaskItem, TaskKind, load_task, task_config
from leeway.tasks.kinds.digits import DigitsConfig

GIVEN = {"digits": {}, "jsonl": {"path": "{tmp}/items.jsonl"}, "reasoning_gym": {"name": "chain_sum"}}


def test_every_built_in_kind_loads(tmp_path) -> None:
    (tmp_path / "items.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    assert list(KINDS) == sorted(GIVEN)
    for kind, keys in GIVEN.items():
        config = task_config(kind, **json.loads(json.dumps(keys).replace("{tmp}", str(tmp_path))))
        assert isinstance(config, KINDS[kind].settings) and config.kind == kind
        task = load_task(config)
        assert isinstance(task, Task) and task.item(0).index == 0


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (
            {"kind": "digits", "name": "x"},
            r"task.name: unknown key \(value 'x'\); it is a key of kind reasoning_gym: .* --set "
            r"'task=\{kind: reasoning_gym, name: \.\.\.\}', .*digits allows: ",
        ),
        ({"kind": "digits", "siz": 3}, "task.siz: .*did you mean 'size'"),
        (
            {"kind": "jsonl", "path": "x", "size": 3},
            "task.size: .*key of kind digits, reasoning_gym: .*jsonl allows: path",
        ),
        (
            {"name": "gcd", "path": "x"},
            "task.path: .*key of kind jsonl: .*gym allows: name, params",
        ),
        ({"kind": "digit"}, "task.kind: unknown task kind 'digit'; did you mean 'digits'"),
        ({"kind": 3}, "task.kind: unknown task kind '3'; available: digits, jsonl, reasoning_gym"),
        ({}, "task.name: required"),
        ({"kind": "jsonl"}, "task.path: required"),
        ("digits", "task: got 'digits'"),
        ({"kind": "digits", "size": "many", "seed": -1}, r"task.size: got 'many'(.|\n)*task.seed: got -1"),
    ],
)
def test_a_wrong_key_is_answered_with_the_keys_of_its_kind(task: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_config({"task": task})


def test_settings_survive_dump_and_reading() -> None:
    config = build_config({"task": {"kind": "digits", "params": {"length": 3}, "size": 9}})
    assert isinstance(config.task, DigitsConfig)
    assert config.task.size == 9
    assert build_config(parse_yaml(dump_config(config), "dump")) == config
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_the_schema_has_one_part_for_each_kind() -> None:
    schema = RunConfig.model_json_schema()
    mapping = schema["properties"]["task"]["discriminator"]["mapping"]
    parts = {kind: schema["$defs"][reference.split("/")[-1]] for kind, reference in mapping.items()}
    assert parts.keys() == GIVEN.keys()
    assert {kind: part["required"] for kind, part in parts.items()} == {
        "digits": ["kind"],
        "jsonl": ["kind", "path"],
        "reasoning_gym": ["name"],  # the default
    }
    assert all(part["additionalProperties"] is False for part in parts.values())


def test_an_unknown_kind_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="unknown task kind 'no'"):
        task_config("no")


class Built:
    """What a kind of an installed package may build."""

    name = "built"

    def __init__(self, item: object = None, size: int = 1) -> None:
        self._item, self._size = item, size

    def __len__(self) -> int:
        return self._size

    def item(self, index: int) -> object:
        return self._item

    def verify(self, item: object, response: str) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (object(), "digits built object, which is not a leeway.tasks.Task"),
        (Built(size=0), "digits has no items"),
        (Built({"prompt": "p"}), "item 0 of digits is dict; expected leeway.tasks.TaskItem"),
        (Built(TaskItem(0, "p", 5)), "has the answer 5 and a prompt of type str"),  # type: ignore[arg-type]
        (Built(TaskItem(0, [{"role": "user"}], "5")), "a prompt of type list"),  # type: ignore[arg-type]
    ],
)
def test_what_a_kind_builds_is_checked(task: object, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS._loaded, "digits", TaskKind(DigitsConfig, lambda config: task))  # type: ignore[arg-type,return-value]
    with pytest.raises(UsageError, match=words):
        load_task(DigitsConfig())
