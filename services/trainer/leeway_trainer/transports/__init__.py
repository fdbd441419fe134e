"""How weights reach the samplers: one module per transport in `kinds`, chosen by `weights.transport`.

An installed package adds one by an entry point of group `leeway.transports.trainer`; its other half, of the
same name, is registered for the samplers in group `leeway.transports.sampler`.
"""

from __future__ import annotations

from leeway.config import RunConfig
from leeway.registry import Registry
from leeway_trainer.ranks import Ranks
from leeway_trainer.transports.base import Transport

TRANSPORTS = Registry(
    "leeway.transports.trainer",
    "leeway_trainer.transports.kinds",
    "TRANSPORT",
    Transport,  # type: ignore[type-abstract]  # only instances of subclasses are registered
    "weight transport",
)


def find_transport(config: RunConfig, ranks: Ranks) -> Transport:
    """The transport that `weights.transport` names, which works here.

    Raises UsageError for a name that is not registered, and for a transport that this machine cannot run.
    """
    transport = TRANSPORTS[config.weights.transport]
    transport.check(config, ranks)
    return transport
