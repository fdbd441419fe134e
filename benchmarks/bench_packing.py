"""Packed rows with shared prompts against padded batches: CPU time of a forward and backward pass.

    python benchmarks/bench_packing.py [--model DIR] [--repeats 3]

Five groups of eight responses, float32, one thread, at several lengths of prompt and response. Both sides
run in turns in one process, and the fastest turn of each counts, so that the ratios hold on a busy machine.
Without --model: a random model with the shape of SmolLM2-135M.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from leeway.messages import Rollout, RolloutHeader
from leeway_trainer.batch import MicroBatch, rank_micro_batches
from leeway_trainer.model import PolicyModel, load_policy_model

GROUPS = 5
CASES = [(40, 8, 8), (40, 8, 64), (200, 8, 64)]
"""(tokens of the prompt, responses per group, tokens per response)"""
BUDGET_TOKENS = 2048
HEAD_TOKENS = 32
SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, help="a directory in Hugging Face format")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        model = load_policy_model(
            args.model or random_model(Path(directory)), dtype=torch.float32, chunk_tokens=128
        )
    print("prompt  n x tokens   computed tokens      CPU seconds        ratio   |log pi| differs by at most")
    for case in CASES:
        print(measured(model, case, args.repeats), flush=True)


def measured(model: PolicyModel, case: tuple[int, int, int], repeats: int) -> str:
    """One line of the table."""
    batches = {packed: micro_batches(model, case, packed) for packed in (False, True)}
    best = dict.fromkeys(batches, float("inf"))
    logp = {}
    for _ in range(repeats):
        for packed, parts in batches.items():
            model.zero_grad()
            started = time.process_time()
            logp[packed] = forward_backward(model, parts)
            best[packed] = min(best[packed], time.process_time() - started)
    tokens = {packed: sum(b.input_ids.numel() for b in parts) for packed, parts in batches.items()}
    worst = float((logp[True] - logp[False]).abs().max())
    prompt, n, length = case
    return (
        f"{prompt:6}  {n} x {length:<8} {tokens[False]:6} -> {tokens[True]:<6}  {best[False]:7.2f} -> "
        f"{best[True]:<7.2f} {best[False] / best[True]:6.2f}   {worst:.1e}"
    )


def forward_backward(model: PolicyModel, batches: list[MicroBatch]) -> torch.Tensor:
    """[tokens] log-probabilities in the order of responses."""
    logp, owner = [], []
    for batch in batches:
        found = model(batch)
        (found.logp.sum() + found.head_logp.sum()).backward()
        logp.append(found.logp.detach())
        owner.append(batch.sequence)
    return torch.cat(logp)[torch.cat(owner).argsort(stable=True)]


def micro_batches(model: PolicyModel, case: tuple[int, int, int], packed: bool) -> list[MicroBatch]:
    """The micro-batches of GROUPS groups of random tokens."""
    prompt, n, length = case
    vocabulary = model.head.weight.shape[0]
    rng = np.random.default_rng(0)
    prompts = rng.integers(2, vocabulary, (GROUPS, prompt)).astype(np.int32)
    rollouts = [rollout(prompts[group], rng, length, vocabulary) for group in range(GROUPS) for _ in range(n)]
    return rank_micro_batches(
        rollouts, budget_tokens=BUDGET_TOKENS, temperature=1.0, vocabulary=vocabulary, packed=packed
    )


def rollout(prompt: np.ndarray, rng: np.random.Generator, length: int, vocabulary: int) -> Rollout:
    """Random tokens and heads."""
    header = RolloutHeader(
        ticket_id="t", epoch=0, version=0, batch=0, group=0, index=0, item=0, sampler="s",
        finish_reason="length", reward=0.0, spans=[(0, length, 0)], support_complete=False,
    )  # fmt: skip
    return Rollout(
        header=header,
        prompt_ids=prompt,
        response_ids=rng.integers(2, vocabulary, length).astype(np.int32),
        logp=np.full(length, -1.0, np.float32),
        head_offsets=np.arange(0, length * HEAD_TOKENS + 1, HEAD_TOKENS).astype(np.int32),
        head_ids=rng.integers(2, vocabulary, length * HEAD_TOKENS).astype(np.int32),
        head_logp=np.full(length * HEAD_TOKENS, -5.0, np.float32),
    )


def random_model(directory: Path) -> Path:
    """A random model with the shape of SmolLM2-135M."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMOLLM2)).save_pretrained(directory)
    return directory


if __name__ == "__main__":
    main()
