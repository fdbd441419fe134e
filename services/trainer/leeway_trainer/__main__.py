"""`python -m leeway_trainer`: wiring. Under torchrun each process is one rank."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path

from leeway.errors import EXIT_OK, LeewayError
from leeway.process import exit_on_sigterm, limit_threads, run_service, service_parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = service_parser("leeway_trainer", "Trains the policy on rollouts.")
    parser.add_argument("--out", required=True, type=Path, help="output directory of the run")
    parser.add_argument(
        "--resume",
        type=Path,
        help="checkpoint, directory of a run, or auto: --out if it has a checkpoint",
    )
    parser.add_argument(
        "--resume-from", type=int, metavar="STEP", help="the checkpoint of this step instead of the latest"
    )
    parser.add_argument("--stay", action="store_true", help="wait for SIGTERM after the run has finished")
    parser.add_argument("--port", type=int, default=0, help="port of /healthz and /readyz; 0: none")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    exit_on_sigterm()
    from leeway.config.load import load_config
    from leeway.telemetry.logs import setup_logging

    try:
        config = load_config(args.config, environ={})
        setup_logging(config.telemetry, f"trainer-{os.environ.get('RANK', '0')}")
        limit_threads(config.trainer.cpu_threads)  # numpy and torch, which come next, read it at import
        from leeway_trainer.process import run_process

        run_process(args, config)
    except LeewayError as error:
        logging.getLogger("leeway_trainer").error("%s", error)
        return error.exit_code
    return EXIT_OK


if __name__ == "__main__":
    run_service(main)
