"""`python -m leeway_controller`: wiring."""

from __future__ import annotations

import argparse
import logging
import signal
import threading

from leeway.errors import EXIT_OK, LeewayError
from leeway.process import run_service, service_parser, stop_signals

log = logging.getLogger("leeway_controller")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = service_parser("leeway_controller", "Plans batches and decides when samplers get new weights.")
    parser.add_argument("--stay", action="store_true", help="keep running after the trainer has finished")
    parser.add_argument("--port", type=int, default=0, help="port of /healthz and /readyz; 0: none")
    parser.add_argument("--release", help="in a cluster: common prefix of the names of the release's objects")
    parser.add_argument(
        "--lease-seconds",
        type=int,
        default=15,
        help="in a cluster: seconds until a silent leader is replaced",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    stop = threading.Event()
    for number in stop_signals():
        signal.signal(number, lambda *_: stop.set())
    from leeway.config.load import load_config
    from leeway.telemetry.logs import setup_logging
    from leeway_controller.service import serve

    try:
        config = load_config(args.config, environ={})
        setup_logging(config.telemetry, "controller")
        serve(args, config, stop)
    except LeewayError as exc:
        log.error("%s", exc)
        return exc.exit_code
    return EXIT_OK


if __name__ == "__main__":
    run_service(main)
