"""`python -m leeway_sampler`: wiring."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

from leeway.errors import EXIT_FAILED, LeewayError
from leeway.process import exit_on_sigterm, freeze_heap, run_service, secret, service_parser, stop_signals

if TYPE_CHECKING:
    import redis

    from leeway.config import RunConfig

log = logging.getLogger("leeway_sampler")

GC_YOUNG = 10_000
"""New objects before the garbage collector runs. With hundreds of responses in flight, most objects are still
alive after Python's default of 700, and would be scanned again and again."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = service_parser("leeway_sampler", "Draws responses with vLLM.")
    parser.add_argument("--id", required=True, help="name of this sampler, unique in the run")
    parser.add_argument("--port", type=int, help="port of /healthz and /readyz; 0: none")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    exit_on_sigterm()
    from leeway.config.load import load_config
    from leeway.diagnose import tell_start
    from leeway.incarnations import new_holder, register
    from leeway.streams import Keys, client_name, connect
    from leeway.telemetry.logs import setup_logging
    from leeway.telemetry.prometheus import serve_metrics
    from leeway.telemetry.tracing import start_tracing
    from leeway_sampler.arguments import engine_environment

    try:
        config = load_config(args.config, environ={})
        telemetry, timeouts = config.telemetry, config.redis
        setup_logging(telemetry, args.id)
        client = connect(
            secret(args.redis),
            socket_timeout_s=timeouts.socket_timeout_s,
            wait_s=timeouts.reconnect_s,
            name=client_name(args.run, args.id),
        )
        tell_start(client, Keys(args.run), args.id, timeouts.reconnect_s)
        # Before the engine starts, which takes long: until then an earlier process counts as alive.
        holder = new_holder(args.id)
        register(client, Keys(args.run), holder, budget_s=timeouts.reconnect_s)
        os.environ.update(engine_environment(config))
        with ExitStack() as stack:
            # Before vLLM starts, whose spans go to the same place.
            stack.callback(start_tracing(telemetry, "sampler", args.id, args.run))
            port = telemetry.metrics_port if args.metrics_port is None else args.metrics_port
            stack.enter_context(serve_metrics(port))
            asyncio.run(serve(args, config, client, holder))
    except LeewayError as exc:
        log.error("%s", exc)
        return exc.exit_code
    except TimeoutError as exc:
        log.error("timed out: %s", exc or "see the messages above")
        return EXIT_FAILED
    return 0


async def serve(args: argparse.Namespace, config: RunConfig, client: redis.Redis, holder: str) -> None:
    """Start the engine and serve until SIGTERM. `holder`: this process."""
    from leeway.health import serve_health
    from leeway.rewards import RewardPool
    from leeway.streams import Keys
    from leeway_sampler.engine import SamplerEngine
    from leeway_sampler.serve import Sampler
    from leeway_sampler.status import SamplerHealth
    from leeway_sampler.text import text_decoder

    model, url = args.model or config.model.name, secret(args.redis)
    decode_text = text_decoder(model, config.model.trust_remote_code)
    engine = await SamplerEngine.start(config, model=model, redis_url=url, run=args.run, name=args.id)
    with ExitStack() as stack:
        stack.callback(engine.shutdown)
        async with RewardPool(config.task) as rewards:
            keys = Keys(args.run)
            sampler = Sampler(client, keys, config, engine, rewards, decode_text, args.id, holder)
            loop = asyncio.get_running_loop()
            for number in stop_signals():
                loop.add_signal_handler(number, sampler.stop)
            if port := config.sampler.http_port if args.port is None else args.port:
                health = SamplerHealth(sampler, loop)
                stack.enter_context(serve_health(health, port, config.sampler.http_host))
            freeze_heap()
            gc.set_threshold(GC_YOUNG)
            await sampler.run()


if __name__ == "__main__":
    run_service(main)
