"""Weight transports: how a published version gets into the engine.

base.py           what a transport implements
kinds/            one module per transport; its name is the value of weights.transport
redis_engine.py   the part of `redis` that runs in vLLM's workers

An installed package adds a transport by an entry point in the group `leeway.transports.sampler`. The
trainer's side is `leeway_trainer.transports`.
"""

from leeway.registry import Registry
from leeway_sampler.transports.base import Transport

TRANSPORTS: Registry[Transport] = Registry(
    "leeway.transports.sampler", "leeway_sampler.transports.kinds", "TRANSPORT", Transport, "weight transport"
)
