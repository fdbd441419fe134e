"""Settings that nothing reads because of another setting are named, and no others."""

from pathlib import Path

import pytest

from leeway.config import RunConfig
from leeway.config.load import build_config, load_config
from leeway.config.unread import RULES, unread_settings

ROOT = Path(__file__).parents[3]
TASK = {"kind": "digits"}

TABLE = [
    (
        {"model": {"name": "tiny", "trust_remote_code": True}},
        "model.trust_remote_code=True",
        "tiny is built in",
    ),
    ({"task": {**TASK, "reward_env": ["A"]}}, "task.reward_env=['A']", "task.reward=exact reads no"),
    (
        {"correction": {"method": "none"}, "sampling": {"head_tokens": 0, "head_eps": 0.1}},
        "sampling.head_eps=0.1",
        "sampling.head_tokens=0",
    ),
    (
        {"correction": {"method": "tis"}, "sampling": {"head_tokens": 8}, "checks": {"enabled": False}},
        "sampling.head_tokens=8",
        "correction.method=tis as it is set reads no head",
    ),
    (
        {"correction": {"advantage": "rloo", "std_floor": 0.1}},
        "correction.std_floor=0.1",
        "correction.advantage=rloo",
    ),
    (
        {"correction": {"method": "tis", "head_tail": "sync"}},
        "correction.head_tail=sync",
        "method=tis as it is set subtracts no centre",
    ),
    ({"correction": {"clamp_high": 3.0}}, "correction.clamp_high=3.0", "lag_clip=clamp"),
    (
        {"correction": {"method": "m2po", "behave_weight_cap": 2.0}},
        "correction.behave_weight_cap=2.0",
        "correction.variant=paper has no proximal policy",
    ),
    ({"correction": {"method": "m2po", "dual_clip": 2.0}}, "correction.dual_clip=2.0", "variant=repo"),
    (
        {"sync": {"ess_threshold": None, "ess_level": "sequence"}},
        "sync.ess_level=sequence",
        "sync.ess_threshold is null",
    ),
    ({"sync": {"max_age": 1, "ess_threshold": 0.9}}, "sync.ess_threshold=0.9", "sync.max_age=1"),
    ({"sync": {"max_age": 1, "every_n": 4}}, "sync.every_n=4", "sync.max_age=1"),
    ({"sync": {"max_age": 8, "every_n": 1}}, "sync.max_age=8", "sync.every_n=1"),
    (
        {"sampler": {"max_num_seqs": 8, "engine_args": {"max_num_seqs": 4}}},
        "sampler.max_num_seqs=8",
        "sampler.engine_args sets max_num_seqs",
    ),
    ({"sampler": {"http_host": "0.0.0.0"}}, "sampler.http_host=0.0.0.0", "sampler.http_port=0"),
    ({"weights": {"nccl_port": 1234}}, "weights.nccl_port=1234", "weights.transport=redis"),
    (
        {"weights": {"transport": "nccl", "keyframe_every": 4}},
        "weights.keyframe_every=4",
        "weights.transport=nccl",
    ),
    (
        {"weights": {"transport": "nccl"}, "redis": {"read_urls": ["redis://a:1"]}},
        "redis.read_urls=***",
        "weights.transport=nccl",
    ),
    ({"redis": {"url": "redis://h:1", "appendonly": True}}, "redis.appendonly=True", "redis.url is given"),
    ({"checks": {"enabled": False, "sample_fraction": 0.5}}, "checks.sample_fraction=0.5", "checks.enabled"),
    (
        {"checks": {"self_prefix_responses": 0, "self_prefix_every": 2}},
        "checks.self_prefix_every=2",
        "checks.self_prefix_responses=0",
    ),
]


@pytest.mark.parametrize(("sections", "setting", "why"), TABLE, ids=[row[1] for row in TABLE])
def test_a_setting_without_effect_is_named_with_the_reason(sections, setting, why):
    (line,) = unread_settings(build_config({"task": TASK, **sections}))
    assert line.startswith(f"{setting} has no effect: ")
    assert why in line


@pytest.mark.parametrize(
    ("sections", "around", "setting"),
    [
        ({"sampler": {"cpu_kv_cache_gib": 2}}, {"gpu": True}, "sampler.cpu_kv_cache_gib=2"),
        ({"sampler": {"gpu_memory_utilization": 0.5}}, {"gpu": False}, "sampler.gpu_memory_utilization=0.5"),
        (
            {"sampler": {"cpu_threads": 2}},
            {"environ": {"OMP_NUM_THREADS": "4"}},
            "sampler.cpu_threads=2",
        ),
        (
            {"telemetry": {"otlp_endpoint": "http://a:1"}},
            {"environ": {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://b:1"}},
            "telemetry.otlp_endpoint=http://a:1",
        ),
    ],
)
def test_the_machine_and_the_environment_count(sections, around, setting):
    config = build_config({"task": TASK, **sections})
    assert unread_settings(config) == []
    (line,) = unread_settings(config, **around)
    assert line.startswith(setting)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"sync": {"max_age": 1, "max_lead": 0}},
        {"redis": {"url": "redis://h:1"}},
        {"weights": {"keyframe_every": 4}},
        {"correction": {"method": "none"}, "sampling": {"head_tokens": 8}},  # the checks read the head
        {"correction": {"method": "score_centering", "head_tail": "sync"}},
        {"correction": {"lag_clip": "clamp", "clamp_high": 3.0}},
        {"checks": {"enabled": False}},
    ],
)
def test_settings_with_an_effect_are_not_named(sections):
    assert unread_settings(build_config({"task": TASK, **sections}), gpu=False) == []


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.yaml")), ids=lambda path: path.stem)
def test_no_example_has_a_setting_without_effect(path):
    assert unread_settings(load_config(path, environ={}), gpu=path.stem.startswith("gpu")) == []


def test_every_rule_names_keys_that_exist():
    from leeway.corrections import METHODS

    sections = {name: [field.annotation] for name, field in RunConfig.model_fields.items()}
    sections["correction"] = [METHODS[name].settings for name in METHODS]
    sections["task"] = [type(build_config({"task": TASK}).task)]
    for rule in RULES:
        for path in rule.keys.split():
            section, key = path.split(".")
            assert any(key in model.model_fields for model in sections[section]), path
