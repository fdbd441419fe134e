"""Strict configuration: what is refused, and what the message says."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from leeway.config import RunConfig
from leeway.config.load import (
    build_config,
    dump_config,
    load_config,
    redact_url,
)
from leeway.config.read_yaml import parse_yaml
from leeway.corrections import METHODS
from leeway.errors import ConfigError
from leeway.streams import replica_url
from leeway_host.cli.run import as_sets

BASE = {"task": {"kind": "digits"}}


def problem(**sections: object) -> str:
    with pytest.raises(ConfigError) as caught:
        build_config({**BASE, **sections})
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("task: {kind: digits}\nsync: {max_age: 8}\ntrainer: {learning_rate: 1e-5}\n")
    return path


def test_unknown_key_names_the_path_and_a_guess() -> None:
    assert "sync.max_aeg: unknown key (value 3); did you mean 'max_age'?" in problem(sync={"max_aeg": 3})
    assert "allowed: name, seed, model" in problem(sink={})


def test_wrong_type_names_path_and_value() -> None:
    assert "trainer.steps: got '20' (str)" in problem(trainer={"steps": "20"})
    assert "sync.max_lead: got -1" in problem(sync={"max_lead": -1})
    assert "trainer.zero_stage: got 4" in problem(trainer={"zero_stage": 4})


def test_an_unknown_key_of_a_correction_names_those_of_its_method() -> None:
    text = problem(correction={"method": "tis", "tis_clp": 3.0})
    assert (
        "correction.tis_clp: unknown key (value 3.0); did you mean 'clip'? method tis allows: clip, " in text
    )
    assert "aggregation" in text and "lag_clip" not in text
    assert "method dlc allows: " in problem(correction={"x": 1})


def test_keys_of_another_method_name_it_and_the_way_out() -> None:
    text = problem(correction={"method": "tis", "centering": "none", "base_ess": 0.5})
    assert "correction.centering: unknown key (value 'none'); it is a key of method dlc: " in text
    assert "it is a key of method vcpo: set the method with it, --set 'correction={method: vcpo, " in text
    assert "or remove it: --set 'correction={method: tis}' replaces the whole section" in text


def test_a_file_of_one_method_takes_the_section_of_another(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("task: {kind: digits}\ncorrection: {method: dlc, lag_clip: none}\n")
    with pytest.raises(ConfigError, match="lag_clip: unknown key .* key of method dlc: .*method tis allows"):
        load_config(path, ["correction.method=tis"], environ={})
    config = load_config(path, ["correction={method: tis, clip: 3.0}"], environ={})
    assert config.correction.model_dump(exclude_defaults=True) == {"clip": 3.0}
    assert load_config(path, environ={"LEEWAY_CORRECTION__CLIP_LOW": "0.1"}).correction.ppo_clip[0] == 0.1


def test_the_schema_of_a_correction_is_that_of_its_method() -> None:
    schema = RunConfig.model_json_schema()
    section = schema["properties"]["correction"]
    assert section["discriminator"]["propertyName"] == "method"
    assert sorted(section["discriminator"]["mapping"]) == list(METHODS)
    without_method = [
        name
        for name, reference in section["discriminator"]["mapping"].items()
        if "method" not in schema["$defs"][reference.split("/")[-1]].get("required", [])
    ]
    assert without_method == ["dlc"]


def test_reading_a_configuration_imports_neither_torch_nor_other_methods() -> None:
    code = """
import sys
from leeway.config import RunConfig
RunConfig.model_validate({"task": {"kind": "digits"}, "correction": {"method": "tis"}})
methods = [name for name in sys.modules if name.startswith("leeway.corrections.methods.")]
RunConfig.model_json_schema()
print("torch" in sys.modules, methods)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False ['leeway.corrections.methods.tis']"


def test_missing_section() -> None:
    with pytest.raises(ConfigError, match="task: required"):
        build_config({})


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"sampling": {"top_p": 0.9}}, "top_k between 1 and head_tokens"),
        ({"sampling": {"top_k": 100}}, "whole support"),
        ({"sampling": {"max_new_tokens": 512}}, "must be below model.max_length=512"),
        ({"sampling": {"head_tokens": 0}}, "needs the head"),
        ({"correction": {"advantage": "rloo"}, "batch": {"group_size": 1}}, "group_size >= 2"),
        ({"correction": {"clamp_low": 2.0, "clamp_high": 1.0}}, "must be below clamp_high"),
        ({"correction": {"method": "dcl"}}, "unknown correction 'dcl'; did you mean 'dlc'? available: "),
        ({"correction": {"method": ["dlc"]}}, "unknown correction"),
        ({"correction": 5}, "correction: got 5 (int)"),
        ({"sync": {"ticket_idle_s": 1.0}}, "three heartbeats"),
        ({"batch": {"prompts": 1, "group_size": 2}, "trainer": {"ranks": 3}}, "trainer.ranks=3"),
        ({"task": {"kind": "jsonl"}}, "task.path: required"),
        ({"task": {"kind": "reasoning_gym"}}, "task.name: required"),
        ({"correction": {"advantage": "grpo"}, "batch": {"group_size": 1}}, "group_size >= 2"),
        ({"trainer": {"learning_rate": math.inf}}, "trainer.learning_rate"),
        ({"trainer": {"betas": [0.9, 1.5]}}, "trainer.betas"),
        ({"redis": {"url": "http://h"}}, "expected redis://"),
        ({"redis": {"url": "redis://h:99999"}}, "expected redis://"),
        ({"model": {"name": ""}}, "model.name"),
        ({"name": "Bad Name"}, "name: got 'Bad Name'"),
    ],
)
def test_impossible_combinations(sections: dict[str, object], words: str) -> None:
    assert words in problem(**sections)


def test_several_problems_are_all_named() -> None:
    text = problem(sync={"x": 1}, trainer={"steps": 0})
    assert "sync.x" in text
    assert "trainer.steps" in text


def test_order_file_environment_set(file: Path) -> None:
    assert load_config(file, environ={}).sync.max_age == 8
    env = {"LEEWAY_SYNC__MAX_AGE": "5", "LEEWAY_SEED": "3", "OTHER": "x"}
    config = load_config(file, environ=env)
    assert (config.sync.max_age, config.seed) == (5, 3)
    assert load_config(file, ["sync.max_age=2"], environ=env).sync.max_age == 2
    assert load_config(file, ["sync.max_age=null"], environ={}).sync.max_age is None


def test_exponent_without_a_dot_is_a_number(file: Path) -> None:
    assert load_config(file, environ={}).trainer.learning_rate == 1e-5
    assert parse_yaml("1e-5", "x") == 1e-5
    assert parse_yaml("e5", "x") == "e5"


def test_bad_sources(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="LEEWAY_SINK__X"):
        load_config(file, environ={"LEEWAY_SINK__X": "1"})
    with pytest.raises(ConfigError, match=r"--set sync: expected section\.key=value"):
        load_config(file, ["sync"], environ={})
    with pytest.raises(ConfigError, match="is a value, not a section"):
        load_config(file, ["seed.x=1"], environ={}) if file.write_text("seed: 1\n") else None
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.yaml", environ={})
    file.write_text("a: [1\n")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(file, environ={})
    file.write_text("task: {kind: digits}\ntask: {kind: digits}\n")
    with pytest.raises(ConfigError, match="duplicate key"):
        load_config(file, environ={})
    file.write_text("- 1\n")
    with pytest.raises(ConfigError, match="expected sections"):
        load_config(file, environ={})
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(file, environ={})


def test_dump_is_loadable_and_hides_passwords(tmp_path: Path) -> None:
    config = build_config({**BASE, "redis": {"url": "redis://:s3cret@h:1/0"}})
    text = dump_config(config)
    assert "s3cret" not in text
    assert "redis://:***@h:1/0" in text
    path = tmp_path / "again.yaml"
    path.write_text(dump_config(config, redact=False))
    assert load_config(path, environ={}) == config


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:1/0?password=s3cret",
        "redis://:a/s3cret@h:1/0",
        "redis://:a#s3cret@h:1/0",
        "redis://:s3cret@[::1/0",
    ],
)
def test_passwords_show_in_no_message(url: str) -> None:
    assert "s3cret" not in redact_url(url)
    assert "s3cret" not in problem(redis={"url": url})
    assert "s3cret" not in problem(redis={"urll": url})
    assert "s3cret" not in problem(redis=url)


def test_merge_keys_work_and_odd_keys_are_refused() -> None:
    assert parse_yaml("a: &a {x: 1}\nb: {<<: *a, y: 2}", "f")["b"] == {"x": 1, "y": 2}
    for text in ("? [a, b]\n: 1", "a: !!int x", "[" * 5000):
        with pytest.raises(ConfigError, match="not valid YAML"):
            parse_yaml(text, "f")


@pytest.mark.parametrize(
    ("value", "read"),
    [("010", "8"), ("-017", "-15"), ("1:30", "90"), ("0", None), ("0x1F", None), ("1_000", None)],
)
def test_integers_that_people_read_otherwise_are_refused(value: str, read: str | None) -> None:
    if read is None:
        assert isinstance(parse_yaml(value, "x"), int)
        return
    with pytest.raises(ConfigError, match=f"{value} is {read} in YAML: write {read}, or quotes"):
        parse_yaml(value, "x")


def test_home_in_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    task = {"kind": "jsonl", "path": "~/a b.jsonl"}
    config = build_config({"task": task, "output": {"dir": "~/runs/ü"}})
    assert (config.output.dir, config.task.files) == ("/home/u/runs/ü", (Path("/home/u/a b.jsonl"),))
    with pytest.raises(ConfigError, match=r"output\.dir: ~no-such-user/x: .* without ~"):
        build_config({"task": task, "output": {"dir": "~no-such-user/x"}})


@pytest.mark.parametrize("name", ["/models/𠮷 😀", 'a "quoted" one', "x: y # z", "null", "1.10", "é\\n"])
def test_options_arrive_as_they_are_given(file: Path, name: str) -> None:
    assert load_config(file, as_sets({"model.name": name, "trainer.steps": None}), {}).model.name == name


def test_a_config_cannot_change() -> None:
    config = build_config(BASE)
    with pytest.raises(ValidationError):
        config.seed = 1  # type: ignore[misc]


def test_schema_is_closed_everywhere() -> None:
    schema = RunConfig.model_json_schema()
    objects = [schema, *schema["$defs"].values()]
    assert all(part["additionalProperties"] is False for part in objects)


@pytest.mark.parametrize("url", ["http://h:1", "redis://:s3cret@h:1", "redis://h:1/2"])
def test_replicas_are_places_without_credentials(url: str) -> None:
    text = problem(redis={"read_urls": [url]})
    assert "expected redis://host:port" in text and "s3cret" not in text
    assert build_config({**BASE, "redis": {"read_urls": ["redis://h:1"]}}).redis.read_urls


def test_a_replica_has_the_credentials_of_the_server() -> None:
    assert replica_url("redis://r:2", "redis://u:p%40@h:1/3") == "redis://u:p%40@r:2/3"
    assert replica_url("rediss://[::1]:2", "redis://h:1") == "rediss://[::1]:2"
