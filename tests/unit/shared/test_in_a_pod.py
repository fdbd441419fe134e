"""What pods need: the password's way into the URL, health pages, the model's link."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from typer.testing import CliRunner

from leeway.config.load import load_config
from leeway.errors import UsageError
from leeway.health import Health, serve_health
from leeway.process import secret
from leeway_host.cli.app import app
from leeway_host.launch.address import RunAddress, find_address, published


@pytest.mark.parametrize("user", ["", "leeway-trainer@"])
def test_any_password_gets_into_the_url(monkeypatch: pytest.MonkeyPatch, user: str) -> None:
    password = "a/b#c?d@e:f%20"
    monkeypatch.setenv("LEEWAY_REDIS_URL", f"rediss://{user}redis:6380/3")
    monkeypatch.setenv("LEEWAY_REDIS_PASSWORD", password)
    url = urlsplit(secret("env:LEEWAY_REDIS_URL"))
    assert unquote(url.password or "") == password
    assert (url.username or "") == user.rstrip("@") and (url.hostname, url.port) == ("redis", 6380)


def test_a_url_with_a_password_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEEWAY_REDIS_URL", "redis://:own@redis:6379/0")
    monkeypatch.setenv("LEEWAY_REDIS_PASSWORD", "other")
    assert secret("env:LEEWAY_REDIS_URL") == "redis://:own@redis:6379/0"
    assert secret("redis://given:6379/0") == "redis://given:6379/0"


def test_variables_of_a_pod_are_no_settings(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("task: {kind: digits}\n")
    names = ("LEEWAY_RUN", "LEEWAY_RELEASE", "LEEWAY_REDIS_URL", "LEEWAY_REDIS_PASSWORD", "LEEWAY_CACHE_DIR")
    load_config(path, environ=dict.fromkeys(names, "x"))


def get(port: int, page: str) -> int:
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}{page}", timeout=5).status
    except urllib.error.HTTPError as error:
        return error.code


def test_health_pages() -> None:
    health = Health()
    with serve_health(health, 0, "127.0.0.1") as port:
        assert [get(port, page) for page in ("/healthz", "/readyz", "/else")] == [200, 503, 404]
        health.ready = {"ready": True, "role": "leader"}
        health.alive = lambda: False
        assert [get(port, page) for page in ("/healthz", "/readyz")] == [503, 200]
        with pytest.raises(UsageError, match=f"--port {port}"), serve_health(health, port, "127.0.0.1"):
            pass


def test_model_prepare_links_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEEWAY_CACHE_DIR", str(tmp_path / "cache"))
    config, link = tmp_path / "run.yaml", tmp_path / "current"
    config.write_text(
        "task: {kind: digits}\nmodel: {name: tiny, max_length: 64, params: {warmup_steps: 0}}\n"
        "sampling: {max_new_tokens: 8}\n"
    )
    for _ in range(2):  # a pod that is started again finds its own link
        done = CliRunner().invoke(app, ["model", "prepare", str(config), "--link", str(link)])
        assert done.exit_code == 0, done.output
    assert (link / "config.json").exists() and link.is_symlink()


def test_a_runs_place_is_for_its_owner_and_its_lifetime(tmp_path: Path) -> None:
    with published(tmp_path, RunAddress("run", "redis://:secret@127.0.0.1:1/0")):
        assert (tmp_path / ".address").stat().st_mode & 0o777 == 0o600
        assert find_address(tmp_path).run == "run"
    with pytest.raises(UsageError, match="no run is active"):
        find_address(tmp_path)
