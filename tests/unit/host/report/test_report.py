"""`leeway report`: a page for every run, also for one that failed early."""

import json
import re

import pytest

from leeway_host.report import ReportError, write_report
from leeway_host.report.plots import panels, running_mean
from leeway_host.report.read import read_run

pytestmark = pytest.mark.thorough


def row(step, **more):
    return {
        "step": step,
        "reward/mean": 0.2 + 0.1 * step,
        "reward/std": 0.4,
        "lag/ess_tok": 0.9,
        "lag/ess_seq": 0.7,
        "lag/var": 0.1,
        "lag/var_seq": 0.4,
        "lag/age": step,
        "lag/clip_fraction": 0.05,
        "disc/abs_mean": 0.008,
        "disc/kl": 1e-4,
        "response/length_mean": 12.5,
        "sampler/tokens_per_s": 320.0,
        "trainer/tokens_per_s": 400.0,
        "time/wait_s": 1.0,
        "time/train_s": 2.0,
        "verdict/action": "continue",
        **more,
    }


def write_run(directory, rows, summary=None, config="name: demo\nsync:\n  ess_threshold: 0.6\n"):
    directory.joinpath("metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    if summary is not None:
        directory.joinpath("summary.json").write_text(json.dumps(summary))
    directory.joinpath("config.yaml").write_text(config)
    return directory


def page(directory):
    return write_report(directory).read_text()


def without_script(text):
    return re.sub(r"<script>.*?</script>", "", text, count=1, flags=re.DOTALL)


def test_complete_run_shows_every_panel(tmp_path):
    rows = [row(i) for i in range(8)]
    resyncs = [{"step": 3, "version": 1, "reason": "ess", "ess": 0.48}]
    summary = {
        "status": "completed",
        "method": "dlc",
        "model": "tiny",
        "steps": 8,
        "resyncs": resyncs,
        "wall_s": 95,
    }
    text = page(write_run(tmp_path, rows, summary))
    for panel in panels():
        assert f'id="plot-{panel.key}"' in text, panel.key
    assert "<td>3</td><td>1</td><td>ess</td><td>0.480</td>" in text
    assert "resync below 0.6" in text
    assert "0.250 → 0.850" in text
    assert "1 min 35 s" in text


def test_a_metric_with_a_plot_and_an_undeclared_one_are_shown(tmp_path):
    text = page(write_run(tmp_path, [row(i, **{"theirs/number": 2.5}) for i in range(3)]))
    assert all(f'id="plot-{name}"' in text for name in ("lag-age", "lag-clip_fraction"))
    assert "<td>response/length_mean</td><td>12.5</td>" in text
    assert "<td>tokens</td><td>Mean response length, including the end-of-sequence token.</td>" in text
    assert "<td>theirs/number</td><td>2.5</td>" in text


def test_page_loads_nothing_from_the_network(tmp_path):
    text = without_script(page(write_run(tmp_path, [row(0), row(1)], {"status": "completed"})))
    assert not re.findall(r"""(?:src|href)\s*=""", text)
    assert "@import" not in text


def test_failed_run_without_steps_says_so(tmp_path):
    (tmp_path / "summary.json").write_text(
        json.dumps({"status": "failed", "error": "sampler-0 <died>", "steps": 0, "resyncs": []})
    )
    text = page(tmp_path)
    assert "No step was trained" in text
    assert "sampler-0 &lt;died&gt;" in text
    assert "metrics.jsonl is missing" in text
    assert len(text) < 20_000  # no plot library for no plot


def test_cut_off_and_odd_lines_are_named_and_left_out(tmp_path):
    write_run(tmp_path, [row(0), row(1)], {"status": "failed"})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('[1]\n\n{"step": 2, "reward/me')
    run = read_run(tmp_path)
    assert [r["step"] for r in run.rows] == [0, 1]
    assert [p.split(" is not")[0] for p in run.problems] == ["metrics.jsonl, line 3", "metrics.jsonl, line 5"]
    assert "line 5" in page(tmp_path)


def test_values_that_are_missing_or_not_finite(tmp_path):
    rows = [
        row(0),
        {"step": 1},
        row(2, **{"reward/mean": float("nan"), "lag/ess_tok": None, "disc/kl": -1e-9}),
    ]
    write_run(tmp_path, rows, {"status": "completed"})
    run = read_run(tmp_path)
    assert run.column("reward/mean") == [0.2, None, None]
    assert 'id="plot-ess"' in page(tmp_path)


def test_repeated_steps_of_a_resumed_run_count_once(tmp_path):
    write_run(tmp_path, [row(0), row(1), row(1, **{"lag/age": 9})], {"status": "completed"})
    assert [r["lag/age"] for r in read_run(tmp_path).rows] == [0, 9]


def test_resyncs_come_from_the_metrics_without_a_summary(tmp_path):
    write_run(tmp_path, [row(0), row(1, **{"verdict/action": "resync", "sync/reason": "age"})])
    assert [(r["step"], r["reason"]) for r in read_run(tmp_path).resyncs] == [(1, "age")]
    assert "summary.json is missing" in page(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "3"])
def test_broken_summary(tmp_path, content):
    write_run(tmp_path, [row(0)])
    (tmp_path / "summary.json").write_text(content)
    assert "summary.json is not" in page(tmp_path)


def test_broken_config(tmp_path):
    write_run(tmp_path, [row(0)], {"status": "completed"}, config="a: [1\n<b>")
    text = page(tmp_path)
    assert "config.yaml is not YAML" in text
    assert "<b>" not in without_script(text)


def test_threshold_switched_off(tmp_path):
    write_run(tmp_path, [row(0), row(1)], {"status": "completed"}, config="sync:\n  ess_threshold: null\n")
    assert "resync below" not in page(tmp_path)


def test_directory_that_is_missing_or_no_run(tmp_path):
    with pytest.raises(ReportError, match="nowhere is not a directory"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(ReportError, match="has no metrics.jsonl, summary.json or config.yaml"):
        write_report(tmp_path)


def test_running_mean_skips_missing_values():
    assert running_mean([1.0, None, 3.0, 5.0], 2) == [1.0, 1.0, 3.0, 4.0]
    assert running_mean([None], 3) == [None]


def test_checks_are_on_the_page_and_open_when_one_is_bad(tmp_path):
    result = {
        "name": "numerics/log_ratio",
        "status": "ok",
        "value": 1.5,
        "threshold": 20.0,
        "evidence": "calm",
    }
    record = {"latest": result, "worst": result, "at": 1.0}
    write_run(tmp_path, [row(0)])
    assert "None were recorded" in page(tmp_path)
    (tmp_path / "checks.json").write_text(json.dumps({"numerics/log_ratio": record}))
    assert "1 of 1 ok" in page(tmp_path)
    record["worst"] = {**result, "status": "fail", "value": 25.0, "evidence": "a <b> ratio"}
    (tmp_path / "checks.json").write_text(json.dumps({"numerics/log_ratio": record}))
    text = page(tmp_path)
    assert "<details open>" in text
    assert "a &lt;b&gt; ratio" in text
    (tmp_path / "checks.json").write_text("{")
    assert "cannot be read as check results" in page(tmp_path)
