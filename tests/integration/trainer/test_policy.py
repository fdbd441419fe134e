"""The policy in real DeepSpeed: values, gradients, ZeRO stages, gates."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from trainer_support import VOCABULARY, make_batch, micro_batches, run_config

from leeway.errors import UsageError
from leeway_trainer.errors import NonFiniteError
from leeway_trainer.model import PolicyModel, load_policy_model
from leeway_trainer.policy import Policy
from leeway_trainer.snapshot import Snapshot, wire_tensors

STAGES = [0, 1, 2, 3]


def load(tiny_dir, dtype=torch.float32) -> PolicyModel:
    return load_policy_model(tiny_dir, dtype=dtype, chunk_tokens=5)


def score_loss(logp, head_logp, batch, counts: int):
    """Any loss that uses both outputs, as a share of a sum over the global batch."""
    loss = (logp * (1 + batch.sequence % 3)).sum() / counts - 0.1 * head_logp.exp().sum() / counts
    return loss if batch.counts else 0 * loss


def train(policy: Policy, batches, counts: int, step: int = 0):
    for i, batch in enumerate(batches):
        logp, head_logp = policy.forward(batch, last=i == len(batches) - 1)[:2]
        policy.backward(score_loss(logp, head_logp, batch, counts))
    return policy.step(step)


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in wire_tensors(policy, torch.float32, step=0)}


def test_log_probs_equal_the_models_own(tiny_dir):
    model, rollouts = load(tiny_dir), make_batch()
    for batch in micro_batches(rollouts, budget=1000):
        logp, head = model(batch)[:2]
        at = 0
        for i in batch.sequence.unique_consecutive():
            rollout = rollouts[int(i)]
            ids = torch.tensor([*rollout.prompt_ids, *rollout.response_ids]).long()[None]
            dense = model.lm(ids).logits[0].float().log_softmax(-1)[rollout.prompt_ids.size - 1 : -1]
            n = rollout.response_ids.size
            want = dense.gather(1, torch.tensor(rollout.response_ids).long()[:, None])[:, 0]
            torch.testing.assert_close(logp[at : at + n], want, atol=1e-5, rtol=0)
            ids_head = torch.tensor(rollout.head_ids).long().view(n, -1)
            torch.testing.assert_close(head[at : at + n], dense.gather(1, ids_head), atol=1e-5, rtol=0)
            at += n


def reference_step(tiny_dir, rollouts, counts):
    """The same update with plain torch on the whole batch at once."""
    model, config = load(tiny_dir), run_config(tiny_dir).trainer
    for batch in micro_batches(rollouts, budget=10_000):
        score_loss(*model(batch)[:2], batch, counts).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, betas=config.betas, weight_decay=0.0
    ).step()
    return {n.removeprefix("lm."): p.detach() for n, p in model.named_parameters()}, float(norm)


@pytest.mark.parametrize(("stage", "recompute"), [*((s, False) for s in STAGES), (0, True), (3, True)])
def test_micro_batches_give_the_update_of_the_whole_batch(tiny_dir, ranks, stage, recompute):
    rollouts = make_batch()
    counts = sum(r.response_ids.size for r in rollouts)
    want, norm = reference_step(tiny_dir, rollouts, counts)
    policy = Policy(load(tiny_dir), _config(tiny_dir, stage, gradient_checkpointing=recompute), ranks)
    result = train(policy, micro_batches(rollouts, budget=30), counts)
    got = weights(policy)
    assert list(got) == list(want)
    assert result.grad_norm == pytest.approx(norm, rel=1e-4)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, atol=1e-6, rtol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def _config(tiny_dir, stage, dtype="float32", **over):
    base = dict(run_config(tiny_dir).trainer.model_dump(), zero_stage=stage, dtype=dtype, **over)
    return run_config(tiny_dir, trainer=base).trainer


@pytest.mark.parametrize("stage", STAGES)
def test_lag_is_exactly_zero_after_a_refresh_and_not_before(tiny_dir, ranks, stage):
    config = _config(tiny_dir, stage, "bfloat16")
    model = load(tiny_dir, torch.bfloat16)
    snapshot = Snapshot(copy.deepcopy(model), config, ranks)
    policy = Policy(model, config, ranks)
    rollouts = make_batch()
    batches = micro_batches(rollouts)
    snapshot.refresh(wire_tensors(policy, torch.bfloat16, step=0))
    for step in range(2):
        for batch in batches:
            logp, head = policy.forward(batch, last=False)[:2]
            sync, head_sync = snapshot.score(batch)[:2]
            assert torch.equal(logp.detach(), sync)
            assert torch.equal(head.detach(), head_sync)
        policy.engine.zero_grad()
        train(policy, batches, 50, step)
        moved = [snapshot.score(b)[0] - policy.forward(b, last=False)[0].detach() for b in batches]
        assert max(float(m.abs().max()) for m in moved) > 1e-3
        snapshot.refresh(wire_tensors(policy, torch.bfloat16, step=step))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_non_finite_loss_is_rejected(tiny_dir, ranks, stage, dtype):
    config = _config(tiny_dir, stage, dtype)
    policy = Policy(load(tiny_dir, getattr(torch, dtype)), config, ranks)
    batches = micro_batches(make_batch())
    for i, batch in enumerate(batches):
        logp = policy.forward(batch, last=i == len(batches) - 1).logp
        policy.backward(logp.sum() * (math.nan if i == 0 else 1.0))
    with pytest.raises(NonFiniteError, match="step 7: loss is nan") as error:
        policy.step(7)
    assert (error.value.step, error.value.quantity) == (7, "loss")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_non_finite_gradient_is_rejected(tiny_dir, ranks, stage, dtype):
    policy = Policy(load(tiny_dir, getattr(torch, dtype)), _config(tiny_dir, stage, dtype), ranks)
    batch = micro_batches(make_batch(), budget=10_000)[0]
    logp = policy.forward(batch, last=True).logp
    logp.register_hook(lambda grad: grad * math.inf)
    policy.backward(logp.sum())
    with pytest.raises(NonFiniteError, match="step 3: grad_norm"):
        policy.step(3)


def test_non_finite_weight_does_not_leave(tiny_dir, ranks):
    policy = Policy(load(tiny_dir), _config(tiny_dir, 0), ranks)
    name, param = list(policy.named_parameters())[3]
    with torch.no_grad():
        param.view(-1)[0] = math.nan
    with pytest.raises(NonFiniteError, match=name):
        list(wire_tensors(policy, torch.bfloat16, step=1))


def test_wire_names_are_the_checkpoints(tiny_dir, ranks):
    from safetensors import safe_open

    policy = Policy(load(tiny_dir), _config(tiny_dir, 0), ranks)
    sent = dict(wire_tensors(policy, torch.bfloat16, step=0))
    with safe_open(tiny_dir / "model.safetensors", "pt") as stored:
        assert set(sent) == set(stored.keys())
    assert next(iter(sent)) == "model.embed_tokens.weight"
    assert sent["model.embed_tokens.weight"].shape == (VOCABULARY, 32)


@pytest.mark.parametrize(
    "settings",
    [{"zero_optimization": {"reduce_bucket_size": "many"}}, {"optimizer": {"params": {"no_such": 1}}}],
    ids=["value", "argument"],
)
def test_deepspeed_settings_that_it_refuses_are_named(tiny_dir, ranks, settings):
    with pytest.raises(UsageError) as caught:
        Policy(load(tiny_dir), _config(tiny_dir, 0, deepspeed=settings), ranks)
    assert str(caught.value).startswith(
        f"trainer.deepspeed: DeepSpeed cannot start with {json.dumps(settings)}"
    )
