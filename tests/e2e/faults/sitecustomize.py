"""Plants faults (E2E_FAULTS, their names) into the processes of a run.

Python imports a module of this name from PYTHONPATH at its start, in vLLM's spawned processes as well; the
fault itself goes in when the module that it belongs to is imported.
"""

from __future__ import annotations

import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

FAULTS = os.environ.get("E2E_FAULTS", "").split()


def raw_logprobs(engine: Any) -> None:
    """The engine reports log-probs before the temperature, and says that it does not."""
    arguments = engine.engine_args
    engine.engine_args = lambda *a, **k: arguments(*a, **k) | {"logprobs_mode": "raw_logprobs"}

    start = engine._start_vllm

    async def start_and_lie(*args: Any) -> Any:
        llm = await start(*args)
        # The engine's own process keeps the raw mode; the numbers alone must tell.
        llm.model_config.logprobs_mode = "processed_logprobs"
        return llm

    engine._start_vllm = start_and_lie


def top_p_without_support(engine: Any) -> None:
    """The engine cuts the distribution, the configuration knows nothing of it."""
    arguments = engine.sampling_arguments
    engine.sampling_arguments = lambda *a, **k: arguments(*a, **k) | {"top_p": 0.7}


def stale_tied_head(weight_engine: Any) -> None:
    """The output layer keeps its packed kernel of the first weights."""
    weight_engine.rebuild_tied_heads = lambda model: None


def dies_while_loading(weight_engine: Any) -> None:
    """The sampler is killed, once in the run, with half of the second version in its engine."""
    load = weight_engine.RedisWeightTransferEngine._load
    mark = pathlib.Path(os.environ["E2E_FAULT_MARK"])

    def die_half_way(weights: Any) -> Any:
        for number, item in enumerate(weights):
            if number == 5:
                mark.write_text("killed")
                os.kill(int(os.environ["_LEEWAY_ENGINE_OWNER"]), signal.SIGKILL)
                time.sleep(60)  # the kernel ends this process with its parent
            yield item

    def load_or_die(self: Any, manifest: Any, weights: Any) -> None:
        dies = manifest.version == 1 and not mark.exists()
        load(self, manifest, die_half_way(weights) if dies else weights)

    weight_engine.RedisWeightTransferEngine._load = load_or_die


def label_moved(weight_engine: Any) -> None:
    """Later versions are checked, attested and counted, but not loaded."""
    load = weight_engine.RedisWeightTransferEngine._load

    def load_first(self: Any, manifest: Any, weights: Any) -> None:
        if manifest.version == 0:
            load(self, manifest, weights)
        for _ in weights:
            pass

    weight_engine.RedisWeightTransferEngine._load = load_first


def reencoded_text(feed: Any) -> None:
    """The trainer gets its tokens by way of text, which has no end of sequence."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(sys.argv[sys.argv.index("--model") + 1])
    decode = feed.decode

    def decode_by_text(cls: Any, fields: Any) -> Any:
        message = decode(cls, fields)
        if not hasattr(message, "response_ids"):
            return message
        ids = message.response_ids.copy()
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        again = tokenizer.encode(text, add_special_tokens=False)[: ids.size]
        ids[: len(again)], ids[len(again) :] = again, tokenizer.pad_token_id
        return dataclasses.replace(message, response_ids=ids)

    feed.decode = decode_by_text


def reward_filter(feed: Any) -> None:
    """Responses without reward are dropped, and the batch is filled up with the others."""
    take = feed.Feed.take

    def take_good(self: Any) -> Any:
        rollouts = take(self)
        good = [r for r in rollouts if r.header.reward > 0]
        return (good * len(rollouts))[: len(rollouts)] if good else rollouts

    feed.Feed.take = take_good


def first_finished(assemble: Any) -> None:
    """A batch is whatever came first."""
    assembler = assemble.BatchAssembler

    def add(self: Any, rollout: Any) -> Any:
        header, slot = rollout.header, rollout.header.slot
        if header.epoch != self.epoch or header.version != self.version:
            return assemble.Admission.VOID
        if slot in self._held:
            return assemble.Admission.DUPLICATE
        self._held[slot] = rollout
        return assemble.Admission.ACCEPTED

    def enough(self: Any) -> bool:
        # Half of the next batch may be there as well.
        return len(self._held) >= self.groups * self.group_size

    def take(self: Any) -> Any:
        taken = [self._held.pop(slot) for slot in list(self._held)[: self.groups * self.group_size]]
        self.batch += 1
        return taken

    assembler.add, assembler.complete, assembler.take = add, enough, take


def nan_logprob(serve: Any) -> None:
    """One log-probability of the fifth batch is NaN when it is sent."""
    encode = serve.encode

    def encode_with_nan(message: Any) -> Any:
        fields = encode(message)
        if message.header.batch == 4 and b"a:logp" in fields:
            fields[b"a:logp"] = b"\x00\x00\xc0\x7f" + fields[b"a:logp"][4:]
        return fields

    serve.encode = encode_with_nan


PLACES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "raw_logprobs": ("leeway_sampler.engine", raw_logprobs),
    "top_p_without_support": ("leeway_sampler.engine", top_p_without_support),
    "stale_tied_head": ("leeway_sampler.weight_engine", stale_tied_head),
    "dies_while_loading": ("leeway_sampler.weight_engine", dies_while_loading),
    "label_moved": ("leeway_sampler.weight_engine", label_moved),
    "reencoded_text": ("leeway_trainer.feed", reencoded_text),
    "reward_filter": ("leeway_trainer.feed", reward_filter),
    "first_finished": ("leeway_trainer.assemble", first_finished),
    "nan_logprob": ("leeway_sampler.serve", nan_logprob),
}


class _Planter(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, plant: Callable[[Any], None]) -> None:
        self.name, self.plant = name, plant

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None
        execute, plant = spec.loader.exec_module, self.plant

        def execute_and_plant(module: Any) -> None:
            execute(module)
            plant(module)

        spec.loader.exec_module = execute_and_plant  # type: ignore[method-assign]
        return spec


for fault in FAULTS:
    sys.meta_path.insert(0, _Planter(*PLACES[fault]))
