"""Prober: draws many tokens after one fixed prefix and compares their counts with the reported probabilities.

    due | asked -> run -> result        once per version, and whenever the controller asks

The check needs no reference model: whatever the engine's distribution is, it must draw tokens as often as the
probabilities that it reports for them.
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
"""Maximum number of draws in flight, so that tickets and heartbeats do not queue behind a probe."""
INTERVAL_S = 60.0
"""Minimum time between two probes that nobody asked for."""


class Prober:
    """Probes one engine, after the first half of the first prompt that it served.

    When `due` or `asked` returns True, the caller must call `run`; both return False until it has ended.
    `draws`: number of tokens to draw, 0 turns probes off.
    """

    def __init__(self, engine: SamplerEngine, draws: int) -> None:
        self._engine, self._draws = engine, draws
        self._prompt: list[int] = []
        self._version: int | None = None
        self._ended = -INTERVAL_S
        self._running = False
        self._request = 0
        self.result: Probe | None = None
        """The last probe."""

    def due(self, prompt_ids: NDArray[np.int32]) -> bool:
        """Whether a probe of the engine's version is due. Remembers the first prompt that it is given."""
        if not self._prompt:
            # Half of it: the token after a whole prompt may be all but certain, which leaves nothing to test.
            self._prompt = prompt_ids[: max(1, prompt_ids.size // 2)].tolist()
        fresh = self._engine.version != self._version
        return bool(self._draws) and fresh and self._rested() and self._claim()

    def asked(self, request: int) -> bool:
        """Whether probe number `request` of the controller is unanswered and can be answered now."""
        answered = self.result.request if self.result else 0
        if request <= answered or not self._prompt or not self._draws or not self._claim():
            return False
        self._request = request
        return True

    async def run(self) -> None:
        """Probe once. Draws that fail are logged: they say nothing about the distribution.

        New weights cut a probe short, and the draws up to then count. That does not bias them, because each
        is one token long, whichever token it is. With frequent resyncs there are no other probes.
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
        if probe.dof or len(whole) == len(drawn):  # otherwise it is too short to test anything: try again
            self._version, self.result = version, probe

    def _claim(self) -> bool:
        # Now, not when `run` starts: tickets arrive together, and one probe is enough for all of them.
        if self._running or self._engine.version is None:
            return False
        self._running = True
        return True

    def _rested(self) -> bool:
        return time.monotonic() - self._ended >= INTERVAL_S


def _seed(version: int | None, request: int, index: int) -> int:
    # Different seeds for every probe, so that the probes of a run are independent evidence.
    digest = hashlib.blake2b(f"{version}/{request}/{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % 2**31


def build_probe(drawn: list[Generation], *, request: int, version: int) -> Probe:
    """The chi-square test of one-token responses to the same prompt against their reported head."""
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
