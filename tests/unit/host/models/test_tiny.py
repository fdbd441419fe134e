"""The tiny model: tokenizer, cache key, warm-up."""

import pytest

from leeway.config import ModelConfig
from leeway.tasks import task_config
from leeway_host.models import ModelError, prepare_model
from leeway_host.models.base import read_provenance
from leeway_host.models.tiny import TinyParams, build_cache_key, build_tokenizer

pytestmark = pytest.mark.thorough

DIGITS = task_config(kind="digits", params={"length": 1}, size=600)
SMALL = {"hidden": 64, "layers": 1, "heads": 2, "warmup_batch": 32, "warmup_steps": 200, "warmup_lr": 5e-3}


def make(cache, seed=0, progress=lambda _: None, **params):
    config = ModelConfig(name="tiny", params={**SMALL, **params}, max_length=32)
    return prepare_model(config, cache, task=DIGITS, seed=seed, progress=progress)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    lines = []
    return make(tmp_path_factory.mktemp("cache"), progress=lines.append), lines


def test_tokenizer_round_trips_every_character():
    tokenizer = build_tokenizer(128)
    text = "s:3142=  a B~\n" + "".join(map(chr, range(32, 127)))
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer.encode("é") == [tokenizer.unk_token_id]
    assert len(tokenizer) == 128
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3


def test_loads_as_a_tied_qwen3_with_its_tokenizer(made):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory, _ = made
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    assert model.config.model_type == "qwen3"
    assert model.dtype == torch.bfloat16
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<eos>", "<pad>")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    ids = torch.tensor([tokenizer.encode("s:7=")])
    out = model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(out, skip_special_tokens=True) == "7"


def test_other_users_may_read_the_cache(made):
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in made[0].iterdir()}
    assert modes["model.safetensors"] == "0o644", modes


def test_warm_up_stops_at_the_target(made):
    directory, lines = made
    record = read_provenance(directory)
    assert 0.5 <= record["accuracy"] < 1
    assert 0 < record["warmup_steps"] < 200
    assert lines[-1].startswith("tiny: ready after")


def test_second_call_comes_from_the_cache(made):
    directory, _ = made
    lines = []
    assert make(directory.parent, progress=lines.append) == directory
    assert lines == []


def test_same_seed_gives_the_same_weights(made, tmp_path):
    directory, _ = made
    again = make(tmp_path)
    assert again.name == directory.name
    assert (again / "model.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()


def test_no_warm_up_leaves_a_random_model(tmp_path):
    directory = make(tmp_path, warmup_steps=0)
    assert read_provenance(directory)["warmup_steps"] == 0
    assert make(tmp_path, seed=1, warmup_steps=0) != directory


def test_cache_key_holds_what_the_weights_depend_on(tmp_path):
    file = tmp_path / "items.jsonl"
    file.write_text('{"prompt": "x", "answer": "1"}\n')
    task = task_config(kind="jsonl", path=str(file))
    base = build_cache_key(TinyParams(), task, 0, 64)
    assert base == build_cache_key(TinyParams(), task.model_copy(update={"reward": "verifier"}), 0, 64)
    assert base != build_cache_key(TinyParams(layers=2), task, 0, 64)
    assert base != build_cache_key(TinyParams(), task.model_copy(update={"prompt_suffix": "?"}), 0, 64)
    assert base != build_cache_key(TinyParams(), task, 1, 64)
    assert base != build_cache_key(TinyParams(), task, 0, 128)
    file.write_text('{"prompt": "x", "answer": "2"}\n')
    assert base != build_cache_key(TinyParams(), task, 0, 64)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"hiden": 64}, "hiden=64.*known: hidden, layers"),
        ({"hidden": 33}, "hidden=33"),
        ({"vocab": 10}, "vocab=10"),
    ],
)
def test_wrong_params(tmp_path, params, message):
    with pytest.raises(ModelError, match=message):
        prepare_model(ModelConfig(name="tiny", params=params), tmp_path, task=DIGITS)


def test_task_is_required(tmp_path):
    with pytest.raises(ModelError, match="needs a task"):
        prepare_model(ModelConfig(name="tiny"), tmp_path)


def test_items_longer_than_the_model(tmp_path):
    config = ModelConfig(name="tiny", params=SMALL, max_length=16)
    long = task_config(kind="digits", params={"length": 20}, size=10)
    with pytest.raises(ModelError, match="needs 44 tokens, more than model.max_length"):
        prepare_model(config, tmp_path, task=long)
