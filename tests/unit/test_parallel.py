"""The division of the tests among workers names what exists, and keeps together what shares an engine."""

from __future__ import annotations

from pathlib import Path

from parallel import ALONE, FIRST, SLICES, VARIANTS, start_order, unit_of

ROOT = Path(__file__).parents[2]


def test_what_is_named_exists() -> None:
    for name in (*ALONE, *SLICES, *VARIANTS, *FIRST):
        assert (ROOT / name.partition("::")[0]).exists(), name


def test_units() -> None:
    engine = "tests/integration/sampler/test_engine.py"
    assert unit_of(f"{engine}::test_a[tied]") == unit_of(f"{engine}::test_b[tied-model.norm]")
    assert unit_of(f"{engine}::test_a[untied]") == unit_of(f"{engine}::test_b[untied-tied_k_proj]")
    assert unit_of(f"{engine}::test_a[tied]") == unit_of(f"{engine}::test_a")
    assert unit_of(f"{engine}::test_a[tied]") != unit_of(f"{engine}::test_a[untied]")
    fuzz = "tests/unit/shared/test_fuzz.py"
    assert unit_of(f"{fuzz}::test_a[quick]") == unit_of(f"{fuzz}::test_b") == fuzz
    assert unit_of(f"{fuzz}::test_a[minute]") != unit_of(f"{fuzz}::test_b[minute]")
    crash = "tests/integration/trainer/test_crash_points.py"
    assert len({unit_of(f"{crash}::test_a[{i}]") for i in range(100)}) == SLICES[crash]


def test_the_longest_starts_first() -> None:
    ids = [
        f"{name}::test_a" for name in ("tests/unit/shared/test_kube.py", *SLICES, "tests/e2e/test_chaos.py")
    ]
    assert min(ids, key=start_order) == "tests/e2e/test_chaos.py::test_a"
    assert max(ids, key=start_order) == "tests/unit/shared/test_kube.py::test_a"
