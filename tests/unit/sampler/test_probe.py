"""When a sampler probes itself. What a probe finds is tested with a real engine, in integration/sampler."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from leeway_sampler.engine import EngineError
from leeway_sampler.generation import Generation
from leeway_sampler.probe import Prober

PROMPT = np.array([5, 6], np.int32)


class Engine(SimpleNamespace):
    """Answers at once and counts the requests by id."""

    async def generate(
        self, request_id: str, prompt_ids: list[int], seed: int, max_new_tokens: int
    ) -> Generation:
        self.asked[request_id] += 1
        ids, logp = np.array([3, 4], np.int32), np.log(np.array([0.5, 0.5], np.float32))
        offsets, spans = np.array([0, 2], np.int32), ((0, 1, self.version),)
        return Generation(ids[:1], logp[:1], offsets, ids, logp, "length", spans, False)


def test_tickets_that_arrive_together_cause_one_probe() -> None:
    engine = Engine(version=1, asked=Counter())
    prober = Prober(engine, 16)  # type: ignore[arg-type]

    async def accept(tickets: int) -> list[bool]:
        due = [prober.due(PROMPT) for _ in range(tickets)]
        assert not prober.asked(1), "one is about to run"
        await asyncio.gather(*(prober.run() for wanted in due if wanted))
        return due

    assert asyncio.run(accept(5)) == [True, False, False, False, False]
    assert len(engine.asked) == 16 and set(engine.asked.values()) == {1}
    assert prober.result is not None
    assert prober.asked(1), "the next one may run"


class Resyncing(Engine):
    """Loads version 2 after `cut` draws, and fails one request meanwhile."""

    async def generate(
        self, request_id: str, prompt_ids: list[int], seed: int, max_new_tokens: int
    ) -> Generation:
        if len(self.asked) == self.cut:
            self.version = 2
        if len(self.asked) == self.cut + 2:
            self.cut = -1
            raise EngineError("no version")
        generation = await super().generate(request_id, prompt_ids, seed, max_new_tokens)
        token = np.array([3 + len(self.asked) % 2])
        return replace(generation, token_ids=token)


def test_draws_before_new_weights_count() -> None:
    engine = Resyncing(version=1, asked=Counter(), cut=40)
    prober = Prober(engine, 64)  # type: ignore[arg-type]
    assert prober.due(PROMPT)
    asyncio.run(prober.run())
    assert prober.result is not None and prober.result.dof > 0
    assert (prober.result.version, prober.result.draws) == (1, 40)
    assert prober.due(PROMPT), "a partial probe does not delay the next one"


def test_too_few_draws_do_not_answer_a_request() -> None:
    engine = Resyncing(version=1, asked=Counter(), cut=1)
    prober = Prober(engine, 64)  # type: ignore[arg-type]
    assert prober.due(PROMPT)
    asyncio.run(prober.run())
    assert prober.result is None
    assert prober.asked(1)
    asyncio.run(prober.run())
    assert prober.result is not None
    assert (prober.result.request, prober.result.version, prober.result.draws) == (1, 2, 64)
    assert not prober.asked(1), "it is answered"
