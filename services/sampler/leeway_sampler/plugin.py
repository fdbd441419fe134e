"""Entry point of group `vllm.general_plugins`: vLLM calls `register` in every process that it starts."""

from __future__ import annotations

import os

from leeway.process import die_with_parent

OWNER_ENV = "_LEEWAY_ENGINE_OWNER"
"""Process id of the sampler that owns the engine processes."""
TRANSPORT_ENV = "_LEEWAY_TRANSPORT"
"""The sampler's weights.transport; unset in processes of vLLM that Leeway did not start."""


def register() -> None:
    """Make the transport's backend known to vLLM, and end engine processes together with their sampler.

    Repeated calls in a process have no effect.
    """
    transport = os.environ.get(TRANSPORT_ENV)
    if transport is not None:
        from leeway_sampler.transports import TRANSPORTS

        TRANSPORTS[transport].register()
    _end_with_owner()


def _end_with_owner() -> None:
    # A sampler that is killed cannot stop its engine, which would occupy its cores or its GPU forever.
    owner = os.environ.get(OWNER_ENV)
    if owner is not None and os.getpid() != int(owner):
        die_with_parent()
