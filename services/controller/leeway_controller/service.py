"""The controller as a process: what is started, in which order, and what ends it.

check prompts -> stand by until this controller leads -> run the loop | a signal | the lease is lost

A controller that stands by has checked every prompt, so that it takes over within a pass.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack

from leeway.config import RunConfig
from leeway.events import EventWriter
from leeway.health import Health, serve_health
from leeway.kube import Cluster, default_namespace, load_client
from leeway.models.special import special_token_notes
from leeway.process import freeze_heap, secret
from leeway.streams import Keys, client_name, connect
from leeway.telemetry.prometheus import serve_metrics
from leeway.telemetry.tracing import start_tracing
from leeway_controller.check_feed import CheckFeed, text_round_trip
from leeway_controller.lease import Leadership
from leeway_controller.pods import PodWatch
from leeway_controller.prompts import check_prompts, checked_tokenizer, prompt_encoder
from leeway_controller.reconcile import Controller

log = logging.getLogger(__name__)


def serve(args: argparse.Namespace, config: RunConfig, stop: threading.Event) -> None:
    """Run the controller until the run ends or `stop` is set. Raises LeewayError."""
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
        model, keys = args.model or config.model.name, Keys(args.run)
        tokenizer = checked_tokenizer(config, model)
        encode_item, size = prompt_encoder(config, model, tokenizer)
        check_prompts(config, encode_item, size)
        events = EventWriter(client, keys, "controller", budget_s=config.redis.reconnect_s)
        for note in special_token_notes(tokenizer):
            events.write("warning", "special_tokens", note)
        leadership = None
        if args.release:
            leadership = lead(args.release, args.lease_seconds, health, stop, stack.callback)
        if stop.is_set():
            return
        check_feed = None
        if config.checks.enabled:
            round_trip = text_round_trip(model, config.model.trust_remote_code)
            check_feed = CheckFeed(client, keys, config, round_trip)
        controller = Controller(client, keys, config, encode_item, size, check_feed, stay=args.stay)
        patience_s = 2 * config.redis.reconnect_s + 60
        health.alive = lambda: controller.seconds_since_tick() < patience_s
        health.ready = {"ready": True, "role": "leader"}
        watch_end(controller, stop, leadership)
        if args.release:
            PodWatch(
                Cluster(args.release, default_namespace(), load_client()), controller.sampler_lost
            ).start()
        port = config.telemetry.metrics_port if args.metrics_port is None else args.metrics_port
        stack.enter_context(serve_metrics(port, config.telemetry.metrics_host))
        stack.callback(start_tracing(config.telemetry, "controller", "controller", args.run))
        freeze_heap()
        controller.run()


def lead(
    release: str,
    lease_s: int,
    health: Health,
    stop: threading.Event,
    at_exit: Callable[[Callable[[], None]], object],
) -> Leadership:
    """Stand by until this controller leads, or `stop` is set. Raises LeaseLostError."""
    identity = os.environ.get("POD_NAME") or socket.gethostname()
    leadership = Leadership(load_client(), f"{release}-controller", default_namespace(), identity, lease_s)
    at_exit(leadership.release)
    leadership.start()
    health.ready = {"ready": True, "role": "standby"}
    leadership.wait(stop)
    return leadership


def watch_end(controller: Controller, stop: threading.Event, leadership: Leadership | None) -> None:
    """End the loop on a signal, and the process once the lease is lost: Kubernetes starts a new standby."""

    def watch() -> None:
        while not stop.wait(0.2):
            if leadership is not None and leadership.lost.is_set():
                log.error("the lease is lost: another controller leads now")
                os._exit(1)  # at once, whatever the loop waits for
        controller.stop()

    threading.Thread(target=watch, name="end", daemon=True).start()
