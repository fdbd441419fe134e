"""What is mended in the environment of services, and what is only told."""

from __future__ import annotations

from pathlib import Path

import pytest

from leeway_host.launch.environment import check_environment, check_python_path, mended_environment


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


def test_this_environment_is_fit() -> None:
    assert [finding for finding in check_environment() if finding.fatal] == []
