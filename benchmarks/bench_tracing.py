"""What tracing costs a step: two runs of which one is traced, in turn, and the time of the spans themselves.

    python benchmarks/bench_tracing.py                                    # the tiny model
    python benchmarks/bench_tracing.py examples/quickstart.yaml --pairs 200 \\
        --set batch.prompts=1 batch.group_size=4 sync.max_age=null sync.clip_fraction=null

The second is a model of 135 million parameters, in many short steps that send no weights.

paired     a run with tracing off and one with it on do a step in turn while the other stands still (SIGSTOP):
           where the machine gets faster or slower it does so for both; the interval holds the median ratio
           with at least 95 % (order statistics)
direct     CPU time of the spans of one response and of one step, made by the services' own functions and sent
           by the real exporter, times how many there are; as if none of it ran beside anything else
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

if TYPE_CHECKING:
    from leeway.config import RunConfig

ROOT = Path(__file__).parents[1]
SKIPPED = 5
"""First steps of a run, which wait for the first batch and compile."""
STEP_BUDGET_S = 600
BLOCK = 5
STANDING = (
    "sync.max_lead=0",
    "sync.heartbeat_s=5",
    "sync.ticket_idle_s=3600",
    "redis.socket_timeout_s=600",
    "trainer.checkpoint_every=100000",
)
"""So that a step's work is done within it, and that nobody is missed while standing still."""
RESPONSES = 4000


def serve_receiver() -> None:
    """Count spans that come in over OTLP/HTTP; a GET answers with {"name": count}. Prints its port first."""
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb

    counts: dict[str, int] = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request = pb.ExportTraceServiceRequest.FromString(
                self.rfile.read(int(self.headers["Content-Length"]))
            )
            for span in (s for r in request.resource_spans for c in r.scope_spans for s in c.spans):
                counts[span.name] = counts.get(span.name, 0) + 1
            self.reply(b"")

        def do_GET(self) -> None:
            self.reply(json.dumps(counts).encode())
            counts.clear()

        def reply(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


@contextmanager
def receiver() -> Iterator[str]:
    """URL of a receiver in a process of its own."""
    process = subprocess.Popen([sys.executable, __file__, "--receiver"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.terminate()
        process.wait(10)


def take_counts(url: str) -> dict[str, int]:
    """Spans by name since the last call."""
    import urllib.request

    with urllib.request.urlopen(url, timeout=10) as answer:
        counts: dict[str, int] = json.load(answer)
    return counts


class Run:
    """`leeway run` that goes on only when told to; all its processes stand still meanwhile."""

    def __init__(self, config: Path, settings: list[str], endpoint: str | None, folder: Path) -> None:
        self.out, self.log = folder / "run", folder / "log"
        self.endpoint, self.steps = endpoint, 0
        environ = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")}
        if endpoint:
            environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
        command = [sys.executable, "-m", "leeway.cli", "run", str(config), "--steps", "100000"]
        command += ["--out", str(self.out)]
        command += [word for setting in [*STANDING, *settings] for word in ("--set", setting)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env=environ, cwd=ROOT, stdout=log, stderr=log)

    def advance(self) -> float:
        """Go on until the next step is reported; seconds that took."""
        began = time.perf_counter()
        self.signal(signal.SIGCONT)
        while self.reported() == self.steps:
            if self.process.poll() is not None or time.perf_counter() - began > STEP_BUDGET_S:
                sys.exit(f"no step {self.steps} within {STEP_BUDGET_S} s:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.002)
        self.signal(signal.SIGSTOP)
        self.steps = self.reported()
        return time.perf_counter() - began

    def reported(self) -> int:
        path = self.out / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def signal(self, number: int) -> None:
        for process in [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(True)]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def end(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self.signal(signal.SIGCONT)
        self.process.terminate()
        self.process.wait(120)


def median_interval(values: list[float], coverage: float = 0.95) -> tuple[float, float, float]:
    """(low, high, coverage) of order statistics that hold the median of what `values` are drawn from."""
    values, n = sorted(values), len(values)

    def covered(cut: int) -> float:
        return 1 - 2 * sum(math.comb(n, i) for i in range(cut + 1)) / 2**n

    cut = max((c for c in range((n - 1) // 2 + 1) if covered(c) >= coverage), default=0)
    return values[cut], values[n - 1 - cut], covered(cut)


def paired(
    config: Path, settings: list[str], pairs: int, endpoint: str
) -> tuple[list[float], list[float], dict[str, float]]:
    """Seconds of each step of the run without and of that with tracing, and spans per step by name."""
    seconds: tuple[list[float], list[float]] = ([], [])
    with ExitStack() as stack:
        runs = []
        for to in (None, endpoint):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            runs.append(Run(config, settings, to, folder))
            stack.callback(runs[-1].end)
            for _ in range(SKIPPED):
                runs[-1].advance()
        take_counts(endpoint)
        began = runs[1].steps
        for pair in range(pairs):
            for at in (0, 1) if pair % 2 == 0 else (1, 0):
                seconds[at].append(runs[at].advance())
            if (pair + 1) % 20 == 0:
                off, on = (statistics.fmean(column) for column in seconds)
                print(f"{pair + 1} pairs of steps: off {off:.3f} s, on {on:.3f} s on average", flush=True)
        steps = runs[1].steps - began
    # what had ended and was not sent yet came at the end
    return *seconds, {name: count / steps for name, count in take_counts(endpoint).items()}


def blocks(off: list[float], on: list[float]) -> list[float]:
    """Ratios on / off of sums over BLOCK steps: a step is seen to end only when the launcher looks."""
    cuts = range(0, len(off) - BLOCK + 1, BLOCK)
    return [sum(on[at : at + BLOCK]) / sum(off[at : at + BLOCK]) for at in cuts]


def direct(run: RunConfig, endpoint: str) -> tuple[float, float]:
    """CPU seconds of the spans of one response, and of those of a step beside its responses."""
    from leeway.messages import Ticket, TicketHeader
    from leeway.telemetry.tracing import add_link, messaging, span, start_tracing, traceparent
    from leeway_sampler.serve import generate_span

    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
    stop = start_tracing(run.telemetry, "bench", "bench", "bench", links=RESPONSES)

    def response(at: int) -> str | None:
        with span(
            "ticket", {**messaging("send", "tickets", str(at)), "leeway.batch": 0, "leeway.version": 0}
        ):
            parent = traceparent()
        header = TicketHeader(
            ticket_id=str(at), epoch=0, version=0, batch=0, group=0, index=0, item=0, seed=at,
            max_new_tokens=64, traceparent=parent,
        )  # fmt: skip
        ticket = Ticket(header=header, prompt_ids=np.zeros(8, np.int32))
        with generate_span(run, ticket) as opened:
            traceparent()  # for vLLM
            assert opened is not None
            opened.set_attributes(
                {"gen_ai.usage.output_tokens": 8, "gen_ai.response.finish_reasons": ["stop"]}
            )
            with span(
                "llm_request", {f"gen_ai.latency.{i}": 0.1 for i in range(12)}
            ):  # stands for vLLM's own
                pass
        with span("reward", {"leeway.item": 0}, parent=parent) as opened:
            assert opened is not None
            opened.set_attribute("leeway.reward", 1.0)
        with span("publish", messaging("send", "rollouts", str(at)), kind="producer", parent=parent):
            return parent

    def rest(parents: list[str | None]) -> None:
        with (
            span("plan batch", {"leeway.batch": 0}, root=True),
            span("step", {"leeway.step": 0}, root=True) as opened,
        ):
            with span("assemble", links=parents):
                pass
            for name in (
                "score",
                "forward_backward",
                "optimizer",
                "report",
                "await verdict",
                "verdict",
                "publish weights",
            ):
                with span(name, messaging("send", "reports")):
                    traceparent()
            add_link(opened, parents[0])

    parents = [response(at) for at in range(200)]  # warm-up
    began = time.process_time()
    parents = [response(at) for at in range(RESPONSES)]
    flush()
    each = (time.process_time() - began) / RESPONSES
    size = run.batch.size
    began = time.process_time()
    for _ in range(100):
        rest(parents[:size])
    flush()
    beside = (time.process_time() - began) / 100
    stop()
    return each, beside


def flush() -> None:
    """Send what is held; the thread that sends counts to this process's CPU time."""
    from opentelemetry import trace

    provider: Any = trace.get_tracer_provider()
    assert provider.force_flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path, nargs="?", default=ROOT / "examples" / "tiny.yaml")
    parser.add_argument("--pairs", type=int, default=100, help="pairs of steps; 0: only the direct figure")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of the run")
    parser.add_argument("--step-seconds", type=float, help="step time to compare with when --pairs is 0")
    parser.add_argument("--receiver", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.receiver:
        serve_receiver()
    from leeway.config_load import load_config

    run = load_config(args.config, args.set)
    with receiver() as endpoint:
        step_s = args.step_seconds
        if args.pairs:
            off, on, spans = paired(args.config, args.set, args.pairs, endpoint)
            ratios, step_s = blocks(off, on), statistics.fmean(off)
            low, high, covered = median_interval(ratios)
            print(
                f"paired: {args.pairs} steps each, off {step_s:.3f} s, on {statistics.fmean(on):.3f} s: "
                f"ratio {sum(on) / sum(off):.4f}, of {len(ratios)} blocks of {BLOCK} in the median "
                f"{statistics.median(ratios):.4f}, {100 * covered:.0f} % interval {low:.4f} to {high:.4f}"
            )
            print(
                f"spans per step: {sum(spans.values()):.0f}  "
                + json.dumps({k: round(v, 2) for k, v in spans.items()})
            )
        each, beside = direct(run, endpoint)
    responses = run.batch.size
    total = each * responses + beside
    print(
        f"direct: {1e6 * each:.0f} us of CPU a response x {responses} + {1e3 * beside:.1f} ms beside them = "
        f"{1e3 * total:.1f} ms a step"
    )
    if step_s:
        print(f"direct: {100 * total / step_s:.2f} % of a step of {step_s:.3f} s")


if __name__ == "__main__":
    main()
