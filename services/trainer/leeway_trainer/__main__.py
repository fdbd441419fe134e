"""`python -m leeway_trainer`: wiring. Under torchrun each process is one rank."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from leeway.errors import EXIT_OK, LeewayError
from leeway.process import limit_threads, secret, service_parser, setup_logging


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = service_parser("leeway_trainer", "Trains the policy on rollouts.")
    parser.add_argument("--out", required=True, type=Path, help="output directory of the run")
    parser.add_argument("--resume", type=Path, help="checkpoint, or a run's output directory")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    from leeway.config_load import load_config

    log = logging.getLogger("leeway_trainer")
    client = keys = None
    try:
        config = load_config(args.config, environ={})
        rank = int(os.environ.get("RANK", "0"))
        setup_logging(config.telemetry.log_level, f"trainer-{rank}")
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        limit_threads(config.trainer.cpu_threads)
        from leeway.streams import Keys, connect

        keys = Keys(args.run)
        if rank == 0:
            redis_config = config.redis
            client = connect(
                secret(args.redis),
                socket_timeout_s=redis_config.socket_timeout_s,
                wait_s=redis_config.reconnect_s,
            )
        from leeway.checks.board import post_refused
        from leeway.messages import MessageError
        from leeway_trainer.feed import report_failure
        from leeway_trainer.policy import NonFiniteError
        from leeway_trainer.ranks import start_ranks, stop_ranks
        from leeway_trainer.train import Place, StoppedError, Trainer

        patience_s = max(config.sync.stall_timeout_s, config.sampler.start_timeout_s) + 600
        ranks = start_ranks(config.trainer.device, config.trainer.ranks, patience_s)
        place = Place(args.model or config.model.name, args.out, keys, client, args.resume)
        try:
            trainer = Trainer(config, ranks, place)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: setattr(trainer, "stopping", True))
            trainer.run()
        except StoppedError:
            raise
        except BaseException as error:
            if client is not None:
                report_failure(client, keys, error)
                if isinstance(error, (NonFiniteError, MessageError)):
                    with suppress(LeewayError):
                        post_refused(client, keys, str(error), source="trainer", budget_s=2.0)
            raise
        stop_ranks()
    except LeewayError as error:
        log.error("%s", error)
        return error.exit_code
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
