"""Messages: round trip, and every way to be refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leeway.messages import (
    Event,
    MessageError,
    Report,
    ReportHeader,
    Rollout,
    RolloutHeader,
    Ticket,
    TicketHeader,
    Verdict,
    decode,
    encode,
    pack,
    unpack,
)


def rollout(tokens: int = 3, heads: int = 2, **change: object) -> Rollout:
    header = RolloutHeader(
        ticket_id="0.1.2.3.0", epoch=0, version=1, batch=2, group=3, index=0, item=9, sampler="s",
        finish_reason="stop", reward=0.5, spans=[(0, tokens, 1)],
    )  # fmt: skip
    arrays = {
        "prompt_ids": np.arange(1, 5, dtype=np.int32),
        "response_ids": np.arange(tokens, dtype=np.int32),
        "logp": np.full(tokens, -0.5, np.float32),
        "head_offsets": np.arange(tokens + 1, dtype=np.int32) * heads,
        "head_ids": np.arange(tokens * heads, dtype=np.int32),
        "head_logp": np.full(tokens * heads, -1.5, np.float32),
    }
    header = header.model_copy(update={k: v for k, v in change.items() if k not in arrays})
    return Rollout(header, **{k: change.get(k, v) for k, v in arrays.items()})  # type: ignore[arg-type]


def same(a: Rollout, b: Rollout) -> bool:
    return a.header == b.header and all(np.array_equal(getattr(a, n), getattr(b, n)) for n in Rollout.arrays)


@given(st.integers(1, 20), st.integers(0, 5))
def test_round_trip(tokens: int, heads: int) -> None:
    message = rollout(tokens, heads)
    assert same(decode(Rollout, encode(message)), message)
    both = unpack(pack([message, rollout()]))
    assert same(both[0], message)
    assert same(both[1], rollout())


def test_ticket_round_trip() -> None:
    header = TicketHeader(
        ticket_id="t", epoch=0, version=0, batch=0, group=0, index=0, item=0, seed=1, max_new_tokens=4
    )
    ticket = Ticket(header, np.array([5, 6], np.int32))
    again = decode(Ticket, encode(ticket))
    assert again.header == header
    assert again.prompt_ids.tolist() == [5, 6]
    with pytest.raises(MessageError, match="prompt is empty"):
        encode(Ticket(header, np.array([], np.int32)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"logp": np.array([-1, np.nan, -1], np.float32)}, "logp holds values"),
        ({"logp": np.array([-1, 0.5, -1], np.float32)}, "logp holds values"),
        ({"head_logp": np.full(6, np.inf, np.float32)}, "head_logp holds values"),
        ({"logp": np.zeros(2, np.float32)}, "3 response tokens, but 2 log-probs"),
        ({"head_offsets": np.array([0, 4, 2, 6], np.int32)}, "head offsets"),
        ({"head_offsets": np.array([0, 2, 4, 7], np.int32)}, "head offsets"),
        ({"head_ids": np.arange(5, dtype=np.int32)}, "head"),
        ({"response_ids": np.array([1, -1, 2], np.int32)}, "negative token id"),
        ({"prompt_ids": np.array([], np.int32)}, "is empty"),
        ({"reward": float("nan")}, "reward nan"),
        ({"spans": [(0, 2, 1), (2, 3, 2)]}, "one version throughout"),
        ({"spans": [(0, 3, 2)]}, "one version throughout"),
        ({"spans": []}, "one version throughout"),
    ],
)
def test_contradictions_are_refused_on_both_sides(change: dict[str, object], words: str) -> None:
    with pytest.raises(MessageError, match=words):
        encode(rollout(**change))


@given(st.dictionaries(st.sampled_from([b"h", b"a:logp", b"a:prompt_ids", b"x"]), st.binary(max_size=60)))
def test_garbage_gives_a_typed_error(fields: dict[bytes, bytes]) -> None:
    for cls in (Rollout, Ticket, Report, Verdict, Event):
        with pytest.raises(MessageError):
            decode(cls, fields)  # type: ignore[type-var]


@given(st.data())
def test_a_damaged_entry_is_refused_or_still_sound(data: st.DataObject) -> None:
    fields = dict(encode(rollout()))
    key = data.draw(st.sampled_from(sorted(fields)))
    value = bytearray(fields[key])
    at = data.draw(st.integers(0, len(value) - 1))
    value[at] ^= data.draw(st.integers(1, 255))
    fields[key] = bytes(value)
    try:
        decode(Rollout, fields).check()
    except MessageError:
        pass  # refused, as it should be


def test_unknown_fields_versions_and_kinds_are_refused() -> None:
    fields = dict(encode(rollout()))
    for change in ({"schema_version": 1}, {"extra": 1}, {"kind": "ticket"}, {"version": -1}):
        header = {**json.loads(fields[b"h"]), **change}
        with pytest.raises(MessageError, match="bad header"):
            decode(Rollout, {**fields, b"h": json.dumps(header).encode()})
    with pytest.raises(MessageError, match="at most"):
        decode(Rollout, {**fields, b"h": b" " * (2 << 20)})


def test_metrics_that_are_not_finite_survive_a_report() -> None:
    report = Report(
        ReportHeader(event="step", epoch=0, step=1, version=1, metrics={"a": float("inf"), "b": None})
    )
    again = decode(Report, encode(report)).header
    assert again.metrics == {"a": float("inf"), "b": None}


@given(st.binary(max_size=200))
def test_unpack_of_garbage(data: bytes) -> None:
    try:
        assert unpack(data) == []
    except MessageError:
        pass  # refused, as it should be
