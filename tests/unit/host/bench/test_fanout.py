"""The simulated fan-out obeys what must hold for any rates."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway_host.bench.fanout import (
    Rates,
    Size,
    rates_from,
    replicas_needed,
    rows,
    samplers_from_which_replicas_help,
    simulate,
)

RATES = Rates(
    server_bytes_s=1e9,
    network_bytes_s=3e9,
    encode_weight_bytes_s=5e8,
    decode_weight_bytes_s=2e9,
    reader_wire_bytes_s=8e8,
    load_weight_bytes_s=4e9,
)
GB = 1e9


def read_s(samplers: int, replicas: int = 0, rates: Rates = RATES) -> float:
    return simulate(rates, Size(16 * GB, 16 * GB), samplers=samplers, replicas=replicas).read_s


def test_one_server_is_shared_evenly() -> None:
    assert read_s(1) == pytest.approx(20)  # the reader is slower than the server
    assert read_s(64) == pytest.approx(64 * 16)
    assert read_s(64, rates=replace(RATES, network_bytes_s=5e8)) == pytest.approx(2 * 64 * 16)


def test_replicas_divide_what_the_samplers_wait_for() -> None:
    assert read_s(64, 1) >= read_s(64)
    assert read_s(64, 4) == pytest.approx(read_s(64) / 4, rel=0.02)
    # With very many replicas filling them takes as long as serving the samplers did.
    assert read_s(64, 64) == pytest.approx(read_s(64), rel=0.02)
    assert read_s(64, 8) == pytest.approx(8 * 16, rel=0.02)


@given(st.integers(1, 600), st.integers(0, 40), st.floats(1e6, 1e11))
@settings(max_examples=100, deadline=None)
def test_no_server_sends_more_than_it_can(samplers, replicas, wire_bytes):
    seconds = simulate(RATES, Size(wire_bytes, wire_bytes), samplers=samplers, replicas=replicas).read_s
    servers = max(1, replicas)
    assert seconds * RATES.out_bytes_s * servers >= samplers * wire_bytes * 0.99
    assert seconds * RATES.reader_wire_bytes_s >= wire_bytes * 0.99


def test_replicas_are_asked_for_only_where_they_help() -> None:
    small, whole = Size(16 * GB, 16e6), Size(16 * GB, 16 * GB)
    assert replicas_needed(RATES, small, samplers=64) == 0  # reading hides behind decoding
    many = replicas_needed(RATES, whole, samplers=64)
    assert 6 <= many <= 10  # about the square root of the samplers
    assert samplers_from_which_replicas_help(RATES, whole) in (2, 4, 8)
    assert samplers_from_which_replicas_help(RATES, small) > 256


def test_rates_and_rows_from_a_measurement() -> None:
    result = {
        "full_bytes": 200.0,
        "baseline": {"read_s": 2.0, "server_bytes_s": 150.0},
        "pair": [{}, {"encode_s": 4.0, "decode_s": 1.0}],
        "samplers": [{"delta_pause_s": 0.5}],
    }
    rates = rates_from(result, network_bytes_s=1e3, load_bytes_s=None)
    assert rates == Rates(150.0, 1e3, 50.0, 200.0, 100.0, 400.0)
    made = rows(rates, parameters=[100.0], samplers=[1, 4], delta_ratio=50.0)
    assert [(r["kind"], r["samplers"]) for r in made] == [
        ("full", 1), ("full", 4), ("delta", 1), ("delta", 4)
    ]  # fmt: skip
    assert made[0]["alone"].wall_s == pytest.approx(200 / 50 + 2 + 0.5)
