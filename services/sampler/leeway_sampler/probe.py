"""Prober: draws from one fixed prefix, compared with what the engine reports about it.

The check needs neither trainer nor weights of its own: whatever the engine's distribution is, tokens must be
drawn as often as their reported probabilities say.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from leeway.checks.sampling import describe_draws
from leeway.checks.stats import chi_square
from leeway.messages import Probe
from leeway_sampler.engine import EngineError, SamplerEngine
from leeway_sampler.generation import Generation, LogProbError

log = logging.getLogger(__name__)

AT_ONCE = 32
"""Draws in flight, so that tickets and heartbeats do not wait behind a probe."""
INTERVAL_S = 60.0
"""Least time between two probes that nobody asked for."""


class Prober:
    """The probe of one engine, from half of the first prompt that it was given. `result` is the last.

    due | asked -> True: `run` must follow, and until it has ended both say False
    """

    def __init__(self, engine: SamplerEngine, draws: int) -> None:
        self._engine, self._draws = engine, draws
        self._prompt: list[int] = []
        self._version: int | None = None
        self._ended = -INTERVAL_S
        self._running = False
        self._request = 0
        self.result: Probe | None = None

    def due(self, prompt_ids: NDArray[np.int32]) -> bool:
        """Remember the first prompt; whether a probe of the engine's version is due by itself."""
        if not self._prompt:
            # Its first half: what follows a whole prompt may be all but certain, which nothing can test.
            self._prompt = prompt_ids[: max(1, prompt_ids.size // 2)].tolist()
        fresh = self._engine.version != self._version
        return bool(self._draws) and fresh and self._rested() and self._claim()

    def asked(self, request: int) -> bool:
        """Whether a request for a probe that was not answered yet can be answered now."""
        answered = self.result.request if self.result else 0
        if request <= answered or not self._prompt or not self._draws or not self._claim():
            return False
        self._request = request
        return True

    async def run(self) -> None:
        """Probe once. What goes wrong with a draw is logged; it says nothing about the distribution.

        New weights cut a probe short; what was drawn until then counts. Which draws those are does not depend
        on their tokens: each is one token long. A run that resyncs all the time has no others.
        """
        version, request = self._engine.version, self._request
        few = asyncio.Semaphore(AT_ONCE)

        async def draw(index: int) -> Generation:
            async with few:
                name = f"probe-{version}-{request}-{index}"
                return await self._engine.generate(name, self._prompt, _seed(version, request, index), 1)

        try:
            drawn = await asyncio.gather(*map(draw, range(self._draws)), return_exceptions=True)
        finally:
            self._running = False
        whole = [g for g in drawn if isinstance(g, Generation) and g.spans[0][2] == version]
        failed = [e for e in drawn if isinstance(e, BaseException)]
        unexpected = [e for e in failed if not isinstance(e, (EngineError, LogProbError))]
        if unexpected:
            raise unexpected[0]
        if len(whole) == len(drawn):
            self._ended = time.monotonic()
        else:
            done = f"{len(whole)} of {len(drawn)} draws"
            log.info("a probe of version %s ended after %s: %s", version, done, failed[:1])
        if not whole or any(isinstance(e, LogProbError) for e in failed):
            return
        probe = build_probe(whole, request=request, version=-1 if version is None else version)
        if probe.dof or len(whole) == len(drawn):  # or it was too short to say anything, and comes again
            self._version, self.result = version, probe

    def _claim(self) -> bool:
        # At once, and not when `run` starts: many tickets come together, and one probe is enough for all.
        if self._running or self._engine.version is None:
            return False
        self._running = True
        return True

    def _rested(self) -> bool:
        return time.monotonic() - self._ended >= INTERVAL_S


def _seed(version: int | None, request: int, index: int) -> int:
    # Other seeds for every probe, so that probes of a run add up as independent evidence.
    digest = hashlib.blake2b(f"{version}/{request}/{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % 2**31


def build_probe(drawn: list[Generation], *, request: int, version: int) -> Probe:
    """The probe that one-token responses to the same prompt amount to."""
    counts = Counter(int(generation.token_ids[0]) for generation in drawn)
    first = drawn[0]
    probabilities = {
        int(token): float(np.exp(logp)) for token, logp in zip(first.head_ids, first.head_logp, strict=True)
    }
    chi2, dof = chi_square(counts, probabilities)
    return Probe(
        request=request,
        version=version,
        draws=len(drawn),
        chi2=round(chi2, 3),
        dof=dof,
        example=describe_draws(dict(counts), probabilities),
    )
