"""The lab's parts: specifications, rounding, intervals, verdicts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from leeway.errors import UsageError
from leeway_lab.analyses import ANALYSES
from leeway_lab.batch_faults import RESPELLED, first_finished, respelled, take
from leeway_lab.collapse import collapse_steps, logistic_fit
from leeway_lab.measure import Ratio, ratio_to_floor
from leeway_lab.model import Drawn, nucleus, rounded
from leeway_lab.report import write_report, write_verdict
from leeway_lab.results import Figure, Series, Verdict, first_departure
from leeway_lab.spec import RunSpec, choose, experiments, merged

pytestmark = pytest.mark.thorough


def test_every_experiment_is_valid_and_can_be_analysed() -> None:
    for name, experiment in experiments().items():
        assert experiment.analysis in ANALYSES, name
        assert experiment.criterion["text"].strip(), name
        runs = experiment.runs()
        assert all(len(found) >= 3 for found in runs.values()), name
        keys = [spec.key() for found in runs.values() for spec in found]
        assert len(set(keys)) == len(keys), name  # no two arms are the same run
        for key in ("arm", "nearer", "within", "beyond"):
            for arm in np.ravel(experiment.criterion.get(key, [])).tolist():
                assert arm in runs, (name, arm)


def test_quick_is_a_part_and_names_are_checked() -> None:
    quick = {e.name for e in choose([], quick=True)}
    assert quick < {e.name for e in choose([], quick=False)}
    assert [e.name for e in choose(["departure"], quick=True)] == ["departure"]
    with pytest.raises(UsageError, match="no experiment nonsense; there are: decomposition"):
        choose(["nonsense"], quick=True)


def test_a_key_names_everything_that_a_result_depends_on() -> None:
    base = RunSpec()
    assert base.key() == RunSpec().key()
    for over in (
        {"seed": 1},
        {"steps": 41},
        {"condition": {"weights": "int8"}},
        {"correction": {"clip_high": 0.3}},
    ):
        assert RunSpec.model_validate(merged(base.model_dump(), over)).key() != base.key()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "least", "most"), [("int8", 1e-4, 1e-2), ("fp8", 1e-3, 5e-2), ("int4", 1e-2, 2e-1)]
)
def test_rounding_errors_are_those_of_the_format(kind: str, least: float, most: float) -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    got = rounded(weight, kind)
    error = float((got - weight).norm() / weight.norm())
    assert least < error < most
    torch.testing.assert_close(rounded(got, kind), got, atol=1e-5, rtol=1e-4)  # nothing more is lost
    if kind != "fp8":
        levels = 16 if kind == "int4" else 256
        block = got[0, :32] if kind == "int4" else got[0]
        assert len(block.unique()) <= levels
    assert rounded(weight, "exact") is weight


def test_ratio_and_its_interval() -> None:
    rng = np.random.default_rng(0)

    def pairs(mean: float, seeds: int = 3) -> dict[tuple[int, int], np.ndarray]:
        return {(i, j): rng.gamma(2, mean / 2, 300) for i in range(seeds) for j in range(seeds) if i != j}

    twice = ratio_to_floor(pairs(0.2), pairs(0.1))
    assert twice.value == pytest.approx(2, rel=0.1)
    assert twice.low < twice.value < twice.high
    assert twice.high - twice.low < 0.6
    # With `reverse` the keys are the other way round: KL(on-policy || method).
    turned = {(j, i): values for (i, j), values in pairs(0.2).items()}
    assert ratio_to_floor(turned, pairs(0.1), reverse=True).value == pytest.approx(2, rel=0.1)


def test_the_interval_covers_the_ratio_of_runs_that_differ() -> None:
    rng, covered = np.random.default_rng(1), 0
    for _ in range(60):
        # A run is off by its own factor; KL between two is the product of theirs, over noisy sequences.
        on, method = rng.gamma(4, 0.25, 8), rng.gamma(4, 0.25, 5)

        def values(mean: float) -> np.ndarray:
            return rng.gamma(2, mean / 2, 300)

        floor = {(i, j): values(0.1 * a * b) for i, a in enumerate(on) for j, b in enumerate(on) if i != j}
        dev = {(i, j): values(0.3 * a * b) for i, a in enumerate(method) for j, b in enumerate(on) if i != j}
        ratio = ratio_to_floor(dev, floor)
        covered += ratio.low <= 3 <= ratio.high
    assert covered >= 48


def test_departure_is_above_the_limit_and_surely_above_one_floor() -> None:
    def ratio(value: float, low: float) -> Ratio:
        return Ratio(value, low, value + 1, 1.0, 1.0)

    found = {2: ratio(2.5, 0.9), 4: ratio(1.9, 1.2), 6: ratio(2.1, 1.1), 8: ratio(1.0, 0.5)}
    assert first_departure(found, 2.0) == 6
    assert first_departure({2: ratio(1.5, 1.2)}, 2.0) is None


def test_logistic_fit_finds_a_boundary() -> None:
    rng = np.random.default_rng(0)
    x = np.column_stack([np.ones(4000), rng.uniform(0, 6, (4000, 2))])
    y = (rng.uniform(size=4000) < 1 / (1 + np.exp(-(x @ [-6.0, 0.5, 1.5])))).astype(float)
    np.testing.assert_allclose(logistic_fit(x, y), [-6.0, 0.5, 1.5], rtol=0.15)
    split = logistic_fit(x, (x[:, 1] + x[:, 2] > 6).astype(float))  # a line separates them: finite, and equal
    assert np.isfinite(split).all()
    assert split[1] == pytest.approx(split[2], rel=0.1)


def test_collapse_is_half_the_peak_for_ten_steps() -> None:
    want = {"share_of_peak": 0.5, "steps": 10}
    reward = np.array([[0.8] * 3 + [0.3] * 5 + [0.9] * 4, [0.8] * 3 + [0.3] * 4 + [0.9] * 5, [0.2] * 12])
    assert collapse_steps(reward, 2, want) == [8, None, None]


def test_faults_change_what_they_say() -> None:
    ids = torch.tensor([[9, 9, 1, 2, 3, 0], [9, 9, 1, 0, 0, 0], [9, 9, 4, 5, 0, 0], [9, 9, 6, 7, 8, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.bool)
    drawn = Drawn(ids, mask, torch.zeros(4, 4, 12), prompt=2)
    rows = first_finished(drawn, group_size=2)
    assert rows.tolist() == [1, 2]  # the shortest of a group of four
    assert take(drawn, rows).ids.tolist() == [ids[1].tolist(), ids[2].tolist()]
    many = Drawn(ids.repeat(500, 1), mask.repeat(500, 1), torch.zeros(2000, 4, 12), prompt=2)
    new = respelled(many, torch.arange(10), torch.full((10,), 11), torch.Generator().manual_seed(0))
    assert (new.ids[:, :2] == many.ids[:, :2]).all()
    assert (new.responses[~many.mask] == many.responses[~many.mask]).all()
    share = float((new.responses == 11).sum() / many.mask.sum())
    assert share == pytest.approx(RESPELLED, rel=0.2)


def test_nucleus_is_the_least_set_of_that_mass() -> None:
    logp = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.1, 0.7, 0.1]]).log()
    assert nucleus(logp, 0.75).tolist() == [[True, True, False, False], [True, False, True, False]]
    assert nucleus(logp, 0.4).sum(1).tolist() == [1, 1]


def test_report_shows_claim_criterion_verdict_and_figures(tmp_path: Path) -> None:
    experiment = experiments()["departure"]
    series = Series("a", [1.0, 2.0], [1.0, 3.0], [0.5, 2.0], [2.0, 4.0])
    figure = Figure("f<>", "x", "y", [series], log_y=True, lines={"two": 2.0})
    write_verdict(tmp_path, experiment, Verdict("inconclusive", "numbers & words", {"n": 1}, [figure]), 3)
    page = write_report(tmp_path).read_text()
    for words in (experiment.title, "inconclusive", "numbers &amp; words", "plotly", "lies within 2 steps"):
        assert words in page
    assert (tmp_path / "figures" / "departure-1.png").stat().st_size > 5000
