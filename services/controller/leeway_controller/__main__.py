"""`python -m leeway_controller`: wiring."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from leeway.errors import LeewayError
from leeway.process import freeze_heap, secret, service_parser
from leeway.telemetry.logs import setup_logging
from leeway.telemetry.metrics import serve_metrics
from leeway.telemetry.tracing import start_tracing

if TYPE_CHECKING:
    from leeway_controller.lease import Leadership

log = logging.getLogger("leeway_controller")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = service_parser("leeway_controller", "Plans batches, decides resyncs.")
    parser.add_argument("--stay", action="store_true", help="do not end when the trainer has finished")
    parser.add_argument("--port", type=int, default=0, help="port of /healthz and /readyz; 0: none")
    parser.add_argument("--release", help="in a cluster: what the names of its objects begin with")
    parser.add_argument("--lease-seconds", type=int, default=15, help="how long a silent leader stays")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    from leeway.config.load import load_config
    from leeway.health import Health, serve_health
    from leeway.streams import Keys, client_name, connect

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        config = load_config(args.config, environ={})
        telemetry = config.telemetry
        setup_logging(telemetry, "controller")
        with ExitStack() as stack:
            health = Health()
            if args.port:
                stack.enter_context(serve_health(health, args.port))
            client = connect(
                secret(args.redis),
                socket_timeout_s=config.redis.socket_timeout_s,
                wait_s=config.redis.reconnect_s,
                name=client_name(args.run, "controller"),
            )
            from leeway_controller.checks import Checks, text_round_trip
            from leeway_controller.prompts import check_prompts, prompt_encoder
            from leeway_controller.reconcile import Controller

            model, keys = args.model or config.model.name, Keys(args.run)
            encode_item, size = prompt_encoder(config, model)
            check_prompts(config, encode_item, size)
            leadership = stand_by(args, stack, stop, lambda role: health.ready.update(ready=True, role=role))
            if stop.is_set():
                return 0
            checks = None
            if config.checks.enabled:
                round_trip = text_round_trip(model, config.model.trust_remote_code)
                checks = Checks(client, keys, config, round_trip)
            controller = Controller(client, keys, config, encode_item, size, checks, stay=args.stay)
            patience_s = 2 * config.redis.reconnect_s + 60
            health.alive = lambda: time.monotonic() - controller.ticked_at < patience_s
            health.ready = {"ready": True, "role": "leader"}
            watch_ends(controller, stop, leadership)
            if args.release:
                watch_pods(args.release, controller)
            port = telemetry.metrics_port if args.metrics_port is None else args.metrics_port
            stack.enter_context(serve_metrics(port))
            stack.callback(start_tracing(telemetry, "controller", "controller", args.run))
            freeze_heap()
            controller.run()
    except LeewayError as exc:
        log.error("%s", exc)
        return exc.exit_code
    return 0


def stand_by(
    args: argparse.Namespace, stack: ExitStack, stop: threading.Event, say: Callable[[str], None]
) -> Leadership | None:
    """Wait until this controller leads (in a cluster) or `stop`."""
    if not args.release:
        return None
    from leeway.kube import default_namespace, load_client
    from leeway_controller.lease import Leadership, LeaseLostError

    name = f"{args.release}-controller"
    identity = os.environ.get("POD_NAME") or socket.gethostname()
    leadership = Leadership(load_client(), name, default_namespace(), identity, args.lease_seconds)
    stack.callback(leadership.release)
    leadership.start()
    say("standby")
    log.info("standing by for lease %s", name)
    while not (leadership.leading.is_set() or leadership.lost.is_set() or stop.is_set()):
        leadership.leading.wait(0.2)
    if leadership.lost.is_set():
        raise LeaseLostError(f"lease {name}: the election ended before this controller led")
    if leadership.leading.is_set():
        log.info("%s leads", identity)
    return leadership


def watch_ends(controller: object, stop: threading.Event, leadership: Leadership | None) -> None:
    """End the loop on a signal, and the process when the lease is lost: a standby starts afresh."""

    def watch() -> None:
        while not stop.wait(0.2):
            if leadership is not None and leadership.lost.is_set():
                log.error("the lease is lost")
                os._exit(1)  # at once: whatever the loop waits for
        controller.stopping = True  # type: ignore[attr-defined]

    threading.Thread(target=watch, name="ends", daemon=True).start()


def watch_pods(release: str, controller: object) -> None:
    """Have the samplers' pods watched."""
    from leeway.kube import Cluster, default_namespace, load_client
    from leeway_controller.pods import PodWatch

    watch = PodWatch(Cluster(release, default_namespace(), load_client()))
    controller.lost = watch.lost  # type: ignore[attr-defined]
    watch.start()


if __name__ == "__main__":
    sys.exit(main())
