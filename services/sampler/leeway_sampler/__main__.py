"""`python -m leeway_sampler`: wiring."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

from leeway.errors import EXIT_FAILED, LeewayError
from leeway.process import exit_on_sigterm, freeze_heap, secret, service_parser
from leeway.telemetry.logs import setup_logging
from leeway.telemetry.metrics import serve_metrics
from leeway.telemetry.tracing import start_tracing

if TYPE_CHECKING:
    import redis

    from leeway.config import RunConfig

log = logging.getLogger("leeway_sampler")

GC_YOUNG = 10_000
"""New objects before the collector looks for garbage among them. With hundreds of responses and their spans
in the air most still live at Python's default of 700, and are looked at again and again."""


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
    from leeway.streams import Keys, client_name, connect

    try:
        config = load_config(args.config, environ={})
        telemetry = config.telemetry
        setup_logging(telemetry, args.id)
        url = secret(args.redis)
        client = connect(
            url,
            socket_timeout_s=config.redis.socket_timeout_s,
            wait_s=config.redis.reconnect_s,
            name=client_name(args.run, args.id),
        )
        tell_start(client, Keys(args.run), args.id, config.redis.reconnect_s)
        from leeway_sampler.engine import engine_environment

        os.environ.update(engine_environment(config))
        # Before vLLM, whose spans take the same way; its processes are spawned, not forked.
        stop_tracing = start_tracing(telemetry, "sampler", args.id, args.run)
        port = telemetry.metrics_port if args.metrics_port is None else args.metrics_port
        try:
            with serve_metrics(port):
                asyncio.run(_serve(args, config, client, url))
        finally:
            stop_tracing()
    except LeewayError as exc:
        log.error("%s", exc)
        return exc.exit_code
    except TimeoutError as exc:
        log.error("no answer within the budget: %s", exc or "see above")
        return EXIT_FAILED
    return 0


async def _serve(args: argparse.Namespace, config: RunConfig, client: redis.Redis, url: str) -> None:
    from leeway.rewards import RewardPool
    from leeway.streams import Keys
    from leeway_sampler.engine import SamplerEngine
    from leeway_sampler.health import serve_health
    from leeway_sampler.serve import Sampler
    from leeway_sampler.text import text_decoder

    model = args.model or config.model.name
    decode_text = text_decoder(model, config.model.trust_remote_code)
    engine = await SamplerEngine.start(config, model=model, redis_url=url, run=args.run)
    try:
        async with RewardPool(config.task) as rewards:
            sampler = Sampler(client, Keys(args.run), config, engine, rewards, decode_text, args.id)
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, sampler.stop)
            port = config.sampler.http_port if args.port is None else args.port
            async with serve_health(config.sampler.http_host, port, engine.healthy, sampler.readiness):
                freeze_heap()
                gc.set_threshold(GC_YOUNG)
                await sampler.run()
    finally:
        engine.shutdown()


if __name__ == "__main__":
    sys.exit(main())
