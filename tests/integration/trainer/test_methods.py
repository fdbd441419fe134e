"""Every correction through the trainer's own step: it does not matter how the batch is divided, and whether
prompts are shared.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from correction_steps import CASES, NAMES, Steps, assert_same, two_steps
from trainer_support import make_batch, run_config

from leeway.config import build_correction
from leeway_trainer.compare import SavedStep
from leeway_trainer.model import load_policy_model
from leeway_trainer.ranks import Ranks

ONE, TWO, FOUR = 4096, 48, 22
"""micro_batch_tokens that cut the batch into so many micro-batches."""


@pytest.mark.parametrize(("method", "settings"), CASES, ids=NAMES)
def test_division_does_not_change_the_update(
    tiny_dir: Path, ranks: Ranks, method: str, settings: dict[str, object]
) -> None:
    results: dict[int, Steps] = {
        budget: two_steps(tiny_dir, ranks, budget, method, settings) for budget in (ONE, TWO, FOUR)
    }
    assert [count for *_, count in results.values()] == [1, 2, 4]
    whole = results[ONE][:2]
    assert_same(whole, results[TWO][:2])
    assert_same(whole, results[FOUR][:2])
    assert_same(whole, two_steps(tiny_dir, ranks, ONE, method, settings, packed=False)[:2])
    before = dict(load_policy_model(tiny_dir, dtype=torch.float32, chunk_tokens=5).lm.named_parameters())
    assert any(not torch.equal(before[name], tensor) for name, tensor in whole[0].items())


@pytest.fixture(scope="module")
def saved_steps(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, SavedStep]:
    """A batch under theta and theta_s, which differ: packed and padded."""
    out = tmp_path_factory.mktemp("saved")
    model = load_policy_model(tiny_dir, dtype=torch.float32, chunk_tokens=5).lm
    model.save_pretrained(out / "theta_s")
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    model.save_pretrained(out / "theta")
    steps = {}
    for packed in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not packed:
                patch.setattr("leeway_trainer.model.share_prompts", lambda lm: False)
            steps[packed] = SavedStep(out, make_batch(), run_config(tiny_dir), 1)
        assert steps[packed].theta.shares_prompts is packed
    return steps


@pytest.mark.parametrize(("method", "settings"), CASES, ids=NAMES)
def test_sharing_prompts_does_not_change_the_gradient(
    saved_steps: dict[bool, SavedStep], method: str, settings: dict[str, object]
) -> None:
    correction = build_correction({"method": method, **settings})
    (got, metrics), (want, padded) = (saved_steps[packed].gradient(correction) for packed in (True, False))
    # Products of a whole sequence's ratios are tiny here, and so are their gradients.
    largest = max(float(g.abs().max()) for g in want)
    assert largest > 0
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, atol=min(1e-5, 1e-2 * largest), rtol=1e-5)
    assert metrics == pytest.approx(padded, rel=1e-4, abs=5e-6)


def test_vcpo_changes_the_learning_rate_of_its_step(tiny_dir: Path, ranks: Ranks) -> None:
    _, plain, _ = two_steps(tiny_dir, ranks, ONE, "none", {})
    _, scaled, _ = two_steps(tiny_dir, ranks, ONE, "vcpo", {})
    assert plain[0]["lr"] == pytest.approx(1e-3)
    assert 0 < scaled[0]["lr"] < 1e-3
