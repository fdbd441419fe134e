"""`python -m leeway_controller`: wiring."""

from __future__ import annotations

import argparse
import logging
import signal
import sys

from leeway.errors import LeewayError
from leeway.process import secret, service_parser, setup_logging


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = service_parser("leeway_controller", "Plans batches, decides resyncs.")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    from leeway.config_load import load_config
    from leeway.streams import Keys, connect

    try:
        config = load_config(args.config, environ={})
        setup_logging(config.telemetry.log_level, "controller")
        client = connect(
            secret(args.redis),
            socket_timeout_s=config.redis.socket_timeout_s,
            wait_s=config.redis.reconnect_s,
        )
        from leeway_controller.checks import Checks, text_round_trip
        from leeway_controller.prompts import check_prompts, prompt_encoder
        from leeway_controller.reconcile import Controller

        model, keys = args.model or config.model.name, Keys(args.run)
        encode_item, size = prompt_encoder(config, model)
        check_prompts(config, encode_item, size)
        checks = None
        if config.checks.enabled:
            round_trip = text_round_trip(model, config.model.trust_remote_code)
            checks = Checks(client, keys, config, round_trip)
        controller = Controller(client, keys, config, encode_item, size, checks)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: setattr(controller, "stopping", True))
        controller.run()
    except LeewayError as exc:
        logging.getLogger("leeway_controller").error("%s", exc)
        return exc.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
