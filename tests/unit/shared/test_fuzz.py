"""Everything that is read from outside, under attack: a typed error or a sound value, in bounded time and
memory. Each attack runs for a moment on the same examples, and for a minute of processor time on new ones
(marker `fuzz`). `make test` does both, `make test-fast` the moment.
"""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leeway.config import RunConfig
from leeway.config.load import (
    apply_env,
    apply_sets,
    build_config,
    dump_config,
)
from leeway.config.read_yaml import parse_yaml, read_file
from leeway.errors import ConfigError
from leeway.messages import (
    Event,
    EventHeader,
    MessageError,
    Report,
    ReportHeader,
    Rollout,
    RolloutHeader,
    SamplerStatus,
    Ticket,
    TicketHeader,
    Verdict,
    VerdictHeader,
    decode,
    decode_status,
    encode,
    pack,
    unpack,
)
from leeway.tasks import TaskError
from leeway.tasks.kinds.digits import DigitsConfig
from leeway.tasks.kinds.jsonl import JsonlConfig, JsonlTask
from leeway.weights import (
    TensorSpec,
    WeightManifest,
    WeightsCorrupt,
    parse_manifest,
    weights_digest,
)

pytestmark = pytest.mark.thorough

EXAMPLES, LONG_S = 150, 60.0
"""Examples of a round, and the processor time for rounds of new ones: a busy machine does not try fewer."""
MAX_S = 3.0
"""Most processor time that one input may take; one that waits for something ends at the test's timeout."""
MAX_BYTES = 64 << 20
"""Most memory that an input of some kilobytes may take."""


@pytest.fixture(
    params=[False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
    ids=["quick", "minute"],
)
def long(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def attack(strategy: st.SearchStrategy[Any], check: Callable[[Any], object], long: bool) -> None:
    """`check` on examples: no exception, no example that takes seconds or a lot of memory."""

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=not long,  # a round of the minute must not repeat the one before
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(strategy)
    def once(value: Any) -> None:
        began = time.process_time()
        tracemalloc.start()
        try:
            check(value)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert time.process_time() - began < MAX_S
        assert peak < MAX_BYTES, peak

    end = time.process_time() + LONG_S
    once()
    while long and time.process_time() < end:
        once()


# -- what is sound, to be damaged --------------------------------------------------------------------------

SLOT = {"ticket_id": "0.1.2.3.0", "epoch": 0, "version": 1, "batch": 2, "group": 3, "index": 0, "item": 9}
ROLLOUT = Rollout(
    RolloutHeader(**SLOT, sampler="s", finish_reason="stop", reward=0.5, spans=[(0, 3, 1)]),
    np.arange(1, 5, dtype=np.int32),
    np.arange(3, dtype=np.int32),
    np.full(3, -0.5, np.float32),
    np.arange(4, dtype=np.int32) * 2,
    np.arange(6, dtype=np.int32),
    np.full(6, -1.5, np.float32),
)
SOUND = [
    ROLLOUT,
    Ticket(TicketHeader(**SLOT, seed=1, max_new_tokens=4), np.array([5, 6], np.int32)),
    Report(ReportHeader(event="step", epoch=0, step=1, version=1, metrics={"a": 1.0, "b": "x", "c": None})),
    Verdict(VerdictHeader(epoch=0, step=1, action="resync", reason="ess")),
    Event(EventHeader(source="x", name="n", text="t", data={"a": [1, {"b": 2}]})),
]
SPEC = TensorSpec(name="w", dtype="float32", shape=(2, 3), offset=0, nbytes=24, digest="d")
MANIFEST = WeightManifest(
    run="r", epoch=0, version=1, step=2, chunk_bytes=16, chunks=2, wire_nbytes=24, nbytes=24, tensors=(SPEC,),
    digest=weights_digest([SPEC]),
)  # fmt: skip
NUMBERS = st.integers() | st.floats() | st.sampled_from([2**31 - 1, -(2**31), 2**63, 10**30, -1, 0])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands in nested values."""
    found = [at] if at else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += paths(inner, (*at, key))
    return found


def replaced(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    copy = json.loads(json.dumps(value))
    place = copy
    for key in at[:-1]:
        place = place[key]
    place[at[-1]] = new
    return copy


@st.composite
def damaged_values(draw: st.DrawFn, sound: Any) -> Any:
    """Sound nested values with one to three places replaced by anything."""
    for _ in range(draw(st.integers(1, 3))):
        sound = replaced(sound, draw(st.sampled_from(paths(sound))), draw(VALUES))
    return sound


@st.composite
def damaged_bytes(draw: st.DrawFn, sound: bytes) -> bytes:
    """Sound bytes with some changed, cut, repeated, or put in."""
    data = bytearray(sound)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["flip", "cut", "put", "repeat"])):
            case "flip" if data:
                data[at] ^= draw(st.integers(1, 255))
            case "cut":
                del data[at : at + draw(st.integers(1, 9))]
            case "put":
                data[at:at] = draw(st.binary(max_size=9))
            case _:
                data[at:at] = data[at : at + draw(st.integers(1, 40))]
    return bytes(data)


INT32 = st.integers(-(2**31), 2**31 - 1)


@st.composite
def damaged_entries(draw: st.DrawFn) -> tuple[type, dict[bytes, bytes]]:
    """(message class, stream fields): a sound entry with damage in its header, an array, or its fields."""
    message = draw(st.sampled_from(SOUND))
    fields = dict(encode(message))
    arrays = sorted(set(fields) - {b"h"})
    match draw(st.sampled_from(["header", "json", "array", "ints", "fields", "class"])):
        case "header":
            fields[b"h"] = json.dumps(draw(damaged_values(json.loads(fields[b"h"])))).encode()
        case "json":
            fields[b"h"] = draw(damaged_bytes(fields[b"h"]))
        case "array" if arrays:
            name = draw(st.sampled_from(arrays))
            fields[name] = draw(damaged_bytes(fields[name]))
        case "ints" if arrays:
            name = draw(st.sampled_from(arrays))
            fields[name] = np.array(draw(st.lists(INT32, max_size=8)), np.int32).tobytes()
        case "fields":
            fields = draw(st.dictionaries(st.sampled_from([*fields, b"x"]), st.binary(max_size=60)))
        case _:
            message = draw(st.sampled_from(SOUND))
    return type(message), fields


# -- the attacks -------------------------------------------------------------------------------------------


def test_entries(long: bool) -> None:
    def check(entry: tuple[type, dict[bytes, bytes]]) -> None:
        try:
            message: Any = decode(entry[0], entry[1])  # type: ignore[type-var]
        except MessageError:
            return
        message.check()
        if isinstance(message, Rollout):
            sizes = np.diff(message.head_offsets.astype(np.int64))
            assert 0 <= sizes.sum() == message.head_ids.size and (sizes >= 0).all()
            assert np.isfinite(message.logp).all() and np.isfinite(message.header.reward)
        encode(message)

    attack(damaged_entries(), check, long)


def test_packed_batches(long: bool) -> None:
    sound = pack([ROLLOUT, ROLLOUT])

    def check(data: bytes) -> None:
        try:
            assert all(isinstance(rollout, Rollout) for rollout in unpack(data))
        except MessageError:
            pass  # refused, as it should be

    attack(damaged_bytes(sound) | st.binary(max_size=300), check, long)


def test_sampler_statuses(long: bool) -> None:
    sound = json.loads(SamplerStatus(sampler="s", heartbeat=1.0).model_dump_json())

    def check(raw: bytes) -> None:
        try:
            assert isinstance(decode_status(raw).version, int)
        except MessageError:
            pass  # refused, as it should be

    damaged = damaged_values(sound).map(lambda value: json.dumps(value).encode())
    attack(damaged | st.binary(max_size=100), check, long)


def test_weight_manifests(long: bool) -> None:
    sound = MANIFEST.model_dump_json().encode()

    def check(raw: bytes) -> None:
        try:
            manifest = parse_manifest({b"manifest": raw})
        except WeightsCorrupt:
            return
        assert manifest.nbytes == sum(spec.nbytes for spec in manifest.tensors)

    damaged = damaged_values(json.loads(sound)).map(lambda value: json.dumps(value).encode())
    attack(damaged | damaged_bytes(sound), check, long)


CONFIG_TEXT = dump_config(RunConfig(task=DigitsConfig()))
YAML_WORDS = st.sampled_from(
    [
        *("!!timestamp x", "!!int ''", "!!float x", "!!bool x", "!!binary 'é'", "!!set {a}", "&a [*a]", "*b"),
        *("<<: *c", "!!python/object:os.system", "? [a]", "- ", "{", "[[[[", "'", '"', "\t", "...", "---"),
        *("%YAML 9.9", "1e999", "0x" + "f" * 5000, "9" * 5000, "190:20:30", ".nan", "\x00", "~", "!<x> y"),
    ]
)


@st.composite
def damaged_texts(draw: st.DrawFn) -> str:
    """Lines of a sound configuration with others put between, in place of, or into them."""
    lines = CONFIG_TEXT.splitlines()
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, len(lines) - 1))
        key = lines[at].split(":")[0]
        word = draw(YAML_WORDS | st.text(max_size=20))
        lines[at : at + draw(st.integers(0, 1))] = [draw(st.sampled_from([word, f"{key}: {word}"]))]
    return "\n".join(lines)


def test_configuration_texts(long: bool, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"

    def check(text: str) -> None:
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            assert isinstance(build_config(read_file(path)), RunConfig)
        except ConfigError:
            pass  # refused, as it should be

    attack(damaged_texts() | st.text(max_size=60), check, long)


def test_configuration_values_and_settings(long: bool) -> None:
    sound = yaml.safe_load(CONFIG_TEXT)

    def check(given: tuple[Any, str, str]) -> None:
        data, key, value = given
        for change in (
            lambda: build_config(data),
            lambda: apply_sets(dict(data), [f"{key}={value}"]),
            lambda: apply_env(dict(data), {f"LEEWAY_{key.upper().replace('.', '__')}": value}),
        ):
            try:
                change()
            except ConfigError:
                pass  # refused, as it should be

    keys = st.sampled_from([".".join(map(str, path)) for path in paths(sound)]) | st.text(max_size=20)
    attack(st.tuples(damaged_values(sound), keys, YAML_WORDS | st.text(max_size=20)), check, long)


def test_jsonl_files(long: bool, tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    sound = [
        {"prompt": "1+1", "answer": "2", "more": [1]},
        {"prompt": [{"role": "user", "content": "x"}], "answer": 3},
    ]
    nested = b'{"prompt": "x", "answer": "y", "z": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    line = st.sampled_from(sound).flatmap(damaged_values).map(lambda value: json.dumps(value).encode())
    raw = st.sampled_from([json.dumps(value).encode() for value in sound]).flatmap(damaged_bytes)
    odd = st.sampled_from(
        [b"", b"\xff", b"null", b"[]", nested, b'{"prompt": "x", "answer": 1e999}', b"9" * 5000]
    )

    def check(lines: list[bytes]) -> None:
        path.write_bytes(b"\n".join(lines))
        try:
            task = JsonlTask(JsonlConfig(path=str(path)))
        except TaskError:
            return
        for index in range(len(task)):
            item = task.item(index)
            assert item.prompt and isinstance(item.answer, str)

    attack(st.lists(line | raw | odd, max_size=4), check, long)


# -- what fuzzing does not find by itself ------------------------------------------------------------------


def test_aliases_that_explode_are_refused() -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
    )
    merges = "b0: &b0 {x: 1}\n" + "".join(
        f"b{n}: &b{n} {{<<: [*b{n - 1}, *b{n - 1}]}}\n" for n in range(1, 60)
    )
    for text, words in ((bomb, "more than"), (merges, "more than"), ("a: &a [*a]", "contains itself")):
        began = time.monotonic()
        with pytest.raises(ConfigError, match=words):
            parse_yaml(text, "f")
        assert time.monotonic() - began < 2


def test_values_that_cannot_be_shown_are_refused_all_the_same() -> None:
    for text in ("name: 0x" + "f" * 5000, "0x" + "f" * 5000 + ": 1", "sync: {x: [" + "1, " * 5000 + "]}"):
        with pytest.raises(ConfigError) as caught:
            build_config(parse_yaml(text, "f"))
        assert len(str(caught.value)) < 2000


def test_sources_without_an_end_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        read_file("/dev/zero")
    path = tmp_path / "long.jsonl"
    path.write_bytes(b'{"prompt": "' + b"a" * (17 << 20))  # one line without an end
    with pytest.raises(TaskError, match="line 1: longer than"):
        JsonlTask(JsonlConfig(path=str(path)))
    with path.open("wb") as file:
        file.truncate(20 << 20)
    with pytest.raises(TaskError, match="zero bytes"):
        JsonlTask(JsonlConfig(path=str(path)))


def test_head_offsets_that_wrap_around_are_refused() -> None:
    offsets = np.array([0, 2**31 - 1, -2, 6], np.int32)
    with np.errstate(over="ignore"):
        assert (np.diff(offsets) >= 0).all(), "in int32 they look sound"
    fields = {**encode(ROLLOUT), b"a:head_offsets": offsets.tobytes()}
    with pytest.raises(MessageError, match="head offsets"):
        decode(Rollout, fields)


def test_bytes_after_a_packed_batch_are_refused() -> None:
    with pytest.raises(MessageError, match="packed rollouts end at byte"):
        unpack(pack([ROLLOUT]) + b"x")
