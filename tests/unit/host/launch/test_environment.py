"""What is mended in the environment of services, and what is only told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from leeway_host.launch.environment import (
    check_counts,
    check_environment,
    check_python_path,
    find_cache,
    mended_environment,
    require_environment,
)


def home(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path), "USER": "u"}


def test_nothing_is_added_where_nothing_is_missing(tmp_path: Path) -> None:
    assert mended_environment(home(tmp_path), tmp_path / "cache") == {}


def test_a_home_that_cannot_be_written_is_replaced_for_the_services(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    added = mended_environment({"HOME": "/proc", "USER": "u"}, cache)
    assert added == {"HOME": str(cache / "home"), "XDG_CACHE_HOME": str(cache / "home" / ".cache")}
    assert (cache / "home" / ".cache").is_dir()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"http_proxy": "http://p:1"}, "localhost,127.0.0.1,::1"),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "a.b, 127.0.0.1"}, "a.b,127.0.0.1,localhost,::1"),
        ({"ALL_PROXY": "socks5://p:1", "no_proxy": "*"}, "*"),
    ],
)
def test_a_proxy_is_not_for_this_machine(tmp_path: Path, given: dict[str, str], expected: str) -> None:
    added = mended_environment({**home(tmp_path), **given}, tmp_path / "cache")
    assert added == {"no_proxy": expected, "NO_PROXY": expected}


@pytest.mark.parametrize("name", ["torch.py", "redis/__init__.py", "types.py"])
def test_python_path_that_hides_a_dependency_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("")
    found = list(check_python_path({"PYTHONPATH": str(tmp_path)}))
    assert [finding.fatal for finding in found] == [False]
    assert str(tmp_path / Path(name).parts[0].removesuffix(".py")) in found[0].text


def test_an_empty_entry_of_python_path_is_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "redis.py").write_text("")
    (tmp_path / "rewards.py").write_text("")  # hides nothing of ours
    (tmp_path / "torch").mkdir()  # no package
    (found,) = check_python_path({"PYTHONPATH": ":/nowhere"})
    assert "redis" in found.text and "empty entry" in found.text


@pytest.mark.parametrize(
    ("name", "value", "fit"),
    [
        ("OMP_NUM_THREADS", "4", True),
        ("OMP_NUM_THREADS", "4,2", True),
        ("OMP_NUM_THREADS", "", True),
        ("OMP_NUM_THREADS", "0", False),
        ("OMP_NUM_THREADS", "abc", False),
        ("MKL_NUM_THREADS", "-1", False),
        ("VLLM_CPU_KVCACHE_SPACE", "0", True),
        ("VLLM_CPU_KVCACHE_SPACE", "4GiB", False),
    ],
)
def test_numbers_for_libraries(name: str, value: str, fit: bool) -> None:
    found = list(check_counts({name: value}))
    assert [(finding.subject, finding.fatal) for finding in found] == ([] if fit else [(name, True)])


def test_the_ranks_of_another_job_are_told_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "host"}.items():
        monkeypatch.setenv(name, value)
    notes: list[str] = []
    require_environment(notes.append)
    assert any(note.startswith("RANK=3, WORLD_SIZE=8, MASTER_ADDR=host: ") for note in notes)
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & set(os.environ)


@pytest.mark.parametrize(("option", "fit"), [("-O", True), ("-OO", False)])
def test_without_docstrings(option: str, fit: bool) -> None:
    code = "from leeway_host.launch.environment import check_python_options as c; print(list(c({})))"
    said = subprocess.run([sys.executable, option, "-c", code], capture_output=True, text=True, check=True)
    assert ("PYTHONOPTIMIZE" not in said.stdout) == fit, said


def test_a_cache_below_home(tmp_path: Path) -> None:
    assert find_cache({**home(tmp_path), "LEEWAY_CACHE_DIR": "~/cache"}) == tmp_path / "cache"


def test_this_environment_is_fit() -> None:
    assert [finding for finding in check_environment() if finding.fatal] == []
