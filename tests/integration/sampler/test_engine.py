"""A real vLLM engine: it draws from the weights it loaded last, whatever happened before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
import redis
import torch
from sampler_support import perturbed, reference_logp, save_tiny_model

from leeway.checks.stats import chi_square_z
from leeway.config import RunConfig
from leeway.errors import UsageError
from leeway.streams import Keys, connect
from leeway.weights import WeightManifest, publish_weights
from leeway_sampler.arguments import banning_settings
from leeway_sampler.engine import EngineError, GenerationAborted, SamplerEngine, _start_vllm
from leeway_sampler.generation import Generation, Head
from leeway_sampler.probe import Prober
from leeway_sampler.weight_update import WeightsRefused, WeightsTorn

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]
CONFIG = {"task": {"kind": "digits"}, "model": {"max_length": 160}, "sampling": {"head_tokens": 64}}
PROMPT = [4, 9, 17, 30, 5, 61, 23, 8]


@dataclass
class Rig:
    """An engine, the trainer's model and the run's Redis; `publish` creates the next version."""

    engine: SamplerEngine
    model: Any
    client: redis.Redis
    keys: Keys
    version: int = 0
    last: WeightManifest | None = None
    sent: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.base = self.weights()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}

    def publish(self, *, change: bool = True, leave_out: str = "", full: bool = False) -> WeightManifest:
        """The next version: a delta against the last one if possible."""
        self.version += 1
        if change:
            self.model.load_state_dict(perturbed(self.base, seed=self.version), strict=False)
        tensors = {n: t for n, t in self.weights().items() if not leave_out or leave_out not in n}
        delta = not full and not leave_out and self.last is not None
        manifest = publish_weights(
            self.client,
            self.keys,
            epoch=0,
            version=self.version,
            step=0,
            tensors=[(n, t, self.sent[n]) if delta else (n, t) for n, t in tensors.items()],  # type: ignore[misc]
            base=self.last if delta else None,
            chunk_bytes=1 << 14,
        )
        self.last, self.sent = (None if leave_out else manifest), tensors
        return manifest

    async def resync(self, *, full: bool = False) -> None:
        manifest = self.publish(full=full)
        assert await self.engine.weights.apply(manifest) == manifest.digest
        loaded = self.engine.weights.loaded
        assert (loaded.version, loaded.digest) == (self.version, manifest.digest)

    async def draw(
        self, count: int = 16, tokens: int = 24, prompt: list[int] | None = None
    ) -> list[Generation]:
        calls = [
            self.engine.generate(f"v{self.version}-{seed}", prompt or PROMPT, seed, tokens)
            for seed in range(count)
        ]
        return await asyncio.gather(*calls)

    def error(self, generations: list[Generation], prompt: list[int] | None = None) -> float:
        """Mean |log mu - log pi| over drawn tokens, nats; checks the heads along the way."""
        drawn, heads = [], []
        for generation in generations:
            tokens = generation.token_ids.tolist()
            logp = reference_logp(self.model, prompt or PROMPT, tokens).numpy()
            drawn.append(logp[np.arange(len(tokens)), tokens] - generation.logp)
            rows = np.repeat(np.arange(len(tokens)), np.diff(generation.head_offsets))
            heads.append(logp[rows, generation.head_ids] - generation.head_logp)
        assert np.abs(np.concatenate(heads)).mean() < 0.03
        return float(np.abs(np.concatenate(drawn)).mean())


UNTIED = pytest.param("untied", marks=pytest.mark.slow)
"""The same tests with a second engine, whose model has an output layer of its own."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["tied", UNTIED])
async def rig(request, tmp_path_factory, redis_server) -> AsyncIterator[Rig]:
    directory: Path = tmp_path_factory.mktemp(request.param)
    model = save_tiny_model(directory, tied=request.param == "tied")
    config = RunConfig.model_validate(CONFIG)
    run = f"engine-{request.param}"
    engine = await SamplerEngine.start(
        config, model=str(directory), redis_url=redis_server.url, run=run, name="s0"
    )
    client = connect(redis_server.url)
    try:
        yield Rig(engine, model, client, Keys(run))
    finally:
        engine.shutdown()
        client.close()


async def test_nccl_is_rejected_without_gpus():
    config = RunConfig.model_validate({**CONFIG, "weights": {"transport": "nccl"}})
    with pytest.raises(UsageError, match="needs NVIDIA GPUs, and vLLM runs on cpu"):
        await _start_vllm(config, "the model is never read")


async def test_no_token_is_drawn_before_the_first_weights(rig):
    with pytest.raises(EngineError, match="no complete weight version"):
        await rig.draw(1)


async def test_log_probs_are_those_of_the_trainers_weights_after_every_update(rig):
    for _ in range(3):
        await rig.resync()
        generations = await rig.draw()
        assert rig.error(generations) < 0.02
        for generation in generations:
            assert generation.spans == ((0, generation.token_ids.size, rig.version),)


async def test_tokens_are_counted_while_they_are_drawn_and_not_while_the_engine_hangs(rig):
    await rig.resync()
    before = rig.engine.drawn
    generations = await rig.draw(4)
    total = before + sum(generation.token_ids.size for generation in generations)
    assert rig.engine.drawn == total
    (core,) = [p for p in psutil.Process().children(recursive=True) if "EngineCore" in " ".join(p.cmdline())]
    drawing = asyncio.create_task(rig.draw(16, tokens=100))
    while rig.engine.drawn == total:  # noqa: ASYNC110 (vLLM has no event for it)
        await asyncio.sleep(0.001)
    core.suspend()
    try:
        await asyncio.sleep(0.5)  # what the engine sent before it was stopped
        seen = rig.engine.drawn
        assert total < seen, "some tokens of responses in flight"
        await asyncio.sleep(0.5)
        assert rig.engine.drawn == seen
        assert rig.engine.inflight > 0
    finally:
        core.resume()
    generations = await drawing
    assert rig.engine.drawn == total + sum(generation.token_ids.size for generation in generations)
    assert rig.engine.inflight == 0


async def test_heads_hold_the_mass_and_are_sorted(rig):
    await rig.resync()
    reasons = set()
    for generation in await rig.draw(48):
        reasons.add(generation.finish_reason)
        ended = generation.token_ids == 1
        assert ended.any() == (generation.finish_reason == "stop")
        assert not ended[:-1].any()
        for start, end in zip(generation.head_offsets[:-1], generation.head_offsets[1:], strict=True):
            logp = generation.head_logp[start:end]
            assert (np.diff(logp) <= 0).all()
            assert np.exp(logp, dtype=np.float64).sum() >= 1 - 1e-3 or end - start == 64
    assert reasons == {"stop", "length"}


async def test_same_seed_same_response(rig):
    await rig.resync()
    first = await rig.draw(4)
    second = await asyncio.gather(*[rig.engine.generate(f"again-{s}", PROMPT, s, 24) for s in range(4)])
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)


async def test_a_truncated_distribution_sums_to_one(rig):
    await rig.resync()
    config = RunConfig.model_validate(
        {**CONFIG, "sampling": {"head_tokens": 24, "top_k": 16, "top_p": 0.9, "temperature": 0.7}}
    )
    vocab = rig.model.config.vocab_size
    engine = SamplerEngine(rig.engine._llm, config, Head(24, 1e-3, True, vocab), rig.engine.weights)
    generation = await engine.generate("truncated", PROMPT, 3, 24)
    assert generation.support_complete
    for row, (start, end) in enumerate(
        zip(generation.head_offsets[:-1], generation.head_offsets[1:], strict=True)
    ):
        assert np.exp(generation.head_logp[start:end]).sum() == pytest.approx(1, abs=1e-3)
        at = np.flatnonzero(generation.head_ids[start:end] == generation.token_ids[row])
        assert generation.head_logp[start:end][at] == pytest.approx(generation.logp[row])
    logits = reference_logp(rig.model, PROMPT, generation.token_ids.tolist()) / 0.7
    start, end = generation.head_offsets[:2]
    kept = logits[0, generation.head_ids[start:end]]
    np.testing.assert_allclose(generation.head_logp[start:end], kept.log_softmax(0), atol=0.1)


async def test_a_probe_finds_the_reported_distribution_in_what_is_drawn(rig):
    await rig.resync()
    prober = Prober(rig.engine, 512)
    assert not prober.asked(1), "no prompt is known yet"
    assert prober.due(np.array(PROMPT * 2, dtype=np.int32))
    await prober.run()
    probe = prober.result
    assert (probe.version, probe.draws, probe.request) == (rig.version, 512, 0)
    assert probe.dof >= 2
    assert chi_square_z(probe.chi2, probe.dof) < 5
    assert not prober.due(np.array(PROMPT, dtype=np.int32)), "once per version"
    assert prober.asked(1) and not prober.asked(1)
    await prober.run()
    assert (prober.result.request, prober.result.chi2 != probe.chi2) == (1, True), "other draws"
    assert (rig.engine.bans, rig.engine.logprobs_mode) == ([], "processed_logprobs")


async def test_settings_that_ban_tokens_are_named():
    from vllm import SamplingParams

    assert (
        banning_settings(SamplingParams(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, max_tokens=3)) == []
    )
    params = SamplingParams(min_tokens=2, ignore_eos=True, repetition_penalty=1.1, logit_bias={3: -100.0})
    assert [name.split("=")[0] for name in banning_settings(params)] == [
        "min_tokens", "ignore_eos", "logit_bias", "repetition_penalty",
    ]  # fmt: skip


async def test_the_prefix_cache_does_not_survive_an_update(rig):
    prompt = (PROMPT * 16)[:120]  # several full blocks, so that the prefix cache is in use
    await rig.resync()
    assert rig.error(await rig.draw(4, 16, prompt), prompt) < 0.03
    await rig.resync()
    assert rig.error(await rig.draw(4, 16, prompt), prompt) < 0.03


async def test_more_prompt_tokens_than_fit_in_one_step(rig):
    await rig.resync()
    prompts = [[*PROMPT, 3 + seed, *PROMPT * 15] for seed in range(40)]  # 5,160 tokens, few of them cached
    calls = [rig.engine.generate(f"p{s}", prompt, s, 8) for s, prompt in enumerate(prompts)]
    assert len(await asyncio.gather(*calls)) == 40


async def test_a_damaged_broadcast_leaves_the_old_weights(rig):
    await rig.resync()
    held, version = rig.engine.weights.loaded, rig.version
    manifest = rig.publish(change=False)
    stream = rig.keys.weight_chunks(*manifest.key)
    entry_id, _ = rig.client.xrange(stream)[-1]
    rig.client.xdel(stream, entry_id)
    with pytest.raises(
        WeightsRefused, match=f"version {rig.version}: found {manifest.chunks - 1} chunks, expected"
    ):
        await rig.engine.weights.apply(manifest)
    assert rig.engine.weights.loaded == held
    generations = await rig.draw(4)
    assert generations[0].spans[0][2] == version
    assert rig.error(generations) < 0.02
    with pytest.raises(
        WeightsRefused, match=f"version {version + 1}: found 0 chunks"
    ):  # it needs the damaged one
        await rig.resync()
    await rig.resync(full=True)
    assert rig.error(await rig.draw(8)) < 0.02


@pytest.mark.parametrize("left_out", ["layers.1.self_attn.k_proj", "embed_tokens", "model.norm"])
async def test_when_loading_fails_the_old_weights_are_put_back(rig, left_out):
    await rig.resync()
    held, version, weights = rig.engine.weights.loaded, rig.version, rig.weights()
    manifest = rig.publish(leave_out=left_out)
    with pytest.raises(WeightsRefused, match=f"no weights for 1 layers.*version {version} was put back"):
        await rig.engine.weights.apply(manifest)
    assert rig.engine.weights.loaded == held
    rig.model.load_state_dict(weights, strict=False)
    generations = await rig.draw(8)
    assert generations[0].spans[0][2] == version
    assert rig.error(generations) < 0.02
    await rig.resync()
    assert rig.error(await rig.draw(8)) < 0.02


async def test_a_failure_after_a_delta_goes_back_through_it(rig, monkeypatch):
    await rig.resync()
    version, weights = rig.version, rig.weights()
    manifest = rig.publish()
    assert manifest.codec == "delta"
    load, calls = rig.engine.weights._load, []

    async def fails_once(manifest: WeightManifest) -> None:
        calls.append(manifest.version)
        await load(manifest)
        if len(calls) == 1:
            raise RuntimeError("as if a worker had failed after it loaded")

    monkeypatch.setattr(rig.engine.weights, "_load", fails_once)
    with pytest.raises(WeightsRefused, match=f"as if a worker .*version {version} was put back"):
        await rig.engine.weights.apply(manifest)
    assert calls == [rig.version, version]
    rig.model.load_state_dict(weights, strict=False)
    assert rig.error(await rig.draw(8)) < 0.02
    assert await rig.engine.weights.apply(manifest) == manifest.digest


async def test_weights_that_cannot_be_put_back_stop_the_engine_until_a_resync(rig, monkeypatch):
    await rig.resync()

    async def fails(manifest: WeightManifest) -> None:
        raise RuntimeError(f"no way to {manifest.version}")

    with monkeypatch.context() as patch:
        patch.setattr(rig.engine.weights, "_load", fails)
        with pytest.raises(WeightsTorn, match=f"no way to {rig.version + 1}; putting version {rig.version} "):
            await rig.engine.weights.apply(rig.publish())
    with pytest.raises(EngineError, match="no complete weight version"):
        await rig.draw(1)
    await rig.resync()
    assert rig.error(await rig.draw(8)) < 0.02


async def test_a_tensor_of_a_wrong_shape_leaves_the_old_weights(rig):
    await rig.resync()
    version = rig.version
    parameter = rig.model.model.norm
    good = parameter.weight
    parameter.weight = torch.nn.Parameter(torch.ones(7, dtype=good.dtype))
    with pytest.raises(WeightsRefused, match="was put back"):
        await rig.engine.weights.apply(rig.publish(change=False, full=True))
    parameter.weight = good
    rig.last = None
    assert rig.engine.version == version
    assert rig.error(await rig.draw(8)) < 0.02


async def test_the_engine_keeps_its_own_weights_when_the_host_copy_changes(rig):
    await rig.resync()
    words = rig.engine.weights.receiver.copy._buffer.bytes
    words ^= 0x55
    try:
        assert rig.error(await rig.draw(8)) < 0.02
    finally:
        words ^= 0x55


GROUPS = ["embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"]
GROUPS += ["gate_proj", "up_proj", "down_proj", "input_layernorm", "post_attention_layernorm", "model.norm"]


async def test_every_parameter_group_changed_alone(rig):
    await rig.resync()
    seen = 0.0
    for group in GROUPS:
        names = [name for name in rig.base if group in name]
        if not names:
            assert group == "lm_head" and rig.model.config.tie_word_embeddings
            continue
        changed = perturbed({name: rig.base[name] for name in names}, seed=len(group))
        rig.model.load_state_dict({**rig.base, **changed}, strict=False)
        manifest = rig.publish(change=False)
        assert manifest.codec == "delta"
        await rig.engine.weights.apply(manifest)
        error = rig.error(await rig.draw(24))
        assert error < 0.01, group
        seen = max(seen, error)
    print(f"largest mean difference of log-probs: {seen:.4f} nats")


async def test_an_update_aborts_requests_in_flight(rig):
    await rig.resync()
    drawing = [asyncio.create_task(rig.engine.generate(f"long-{s}", PROMPT, s, 150)) for s in range(200)]
    await asyncio.sleep(0.1)
    await rig.resync()
    results = await asyncio.gather(*drawing, return_exceptions=True)
    aborted = [r for r in results if isinstance(r, GenerationAborted)]
    assert aborted
    assert all(isinstance(r, GenerationAborted | Generation) for r in results)
    assert rig.engine.inflight == 0
    assert rig.error(await rig.draw(8)) < 0.02


async def test_abort_all_ends_every_request(rig):
    await rig.resync()
    drawing = [asyncio.create_task(rig.engine.generate(f"abort-{s}", PROMPT, s, 150)) for s in range(8)]
    await asyncio.sleep(0.05)
    await rig.engine.abort_all()
    assert rig.engine.inflight == 0
    results = await asyncio.gather(*drawing, return_exceptions=True)
    assert any(isinstance(r, GenerationAborted) for r in results)
    assert rig.error(await rig.draw(4)) < 0.02
