"""What tracing costs a step: runs with it off and on in turn, and the time of the spans themselves.

    python benchmarks/bench_tracing.py                                    # the tiny model, 3 pairs of runs
    python benchmarks/bench_tracing.py examples/quickstart.yaml --pairs 2 --steps 123 \
        --set batch.prompts=1 batch.group_size=4 sync.max_lead=0 sync.max_age=null sync.clip_fraction=null \
        trainer.checkpoint_every=1000

The second is a model of 135 million parameters, in many short steps that all do the same work: nothing is
generated beside a step and no weights are sent in it.

Two figures, because runs on a busy machine differ by more than tracing costs:

paired     time on / off of each step of each pair of neighbouring runs, which have the same prompts at the
           same step, and the interval that holds the median ratio with at least 95 % (order statistics)
direct     CPU time of the spans of one response and of one step, made by the services' own functions and sent
           by the real exporter, times how many there are; as if none of it ran beside anything else
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from leeway.config import RunConfig

ROOT = Path(__file__).parents[1]
SKIPPED = 3
"""First steps of a run, which wait for the first batch and compile."""
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


def run_steps(config: Path, settings: list[str], steps: int, endpoint: str | None) -> list[float]:
    """Seconds of each step of one run, but the first ones."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")}
    if endpoint:
        environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [
            sys.executable,
            "-m",
            "leeway.cli",
            "run",
            str(config),
            "--steps",
            str(steps),
            "--out",
            str(out),
            *(word for setting in settings for word in ("--set", setting)),
        ]
        done = subprocess.run(
            command,
            env=environ,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout[-4000:]}")
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["time/step_s"] for row in rows][SKIPPED:]


def median_interval(values: list[float], coverage: float = 0.95) -> tuple[float, float, float]:
    """(low, high, coverage) of order statistics that hold the median of what `values` are drawn from."""
    values, n = sorted(values), len(values)

    def covered(cut: int) -> float:
        return 1 - 2 * sum(math.comb(n, i) for i in range(cut + 1)) / 2**n

    cut = max((c for c in range((n - 1) // 2 + 1) if covered(c) >= coverage), default=0)
    return values[cut], values[n - 1 - cut], covered(cut)


def paired(
    config: Path, settings: list[str], pairs: int, steps: int, endpoint: str
) -> tuple[list[float], float, dict[str, float]]:
    """Ratios on / off of each step, the median step time off, and spans per step by name."""
    ratios, off_s, spans = [], [], {}
    for pair in range(pairs):
        times: dict[bool, list[float]] = {}
        for on in (False, True) if pair % 2 == 0 else (True, False):
            times[on] = run_steps(config, settings, steps, endpoint if on else None)
            if on:
                spans = {name: count / steps for name, count in take_counts(endpoint).items()}
        ratios += [on / off for on, off in zip(times[True], times[False], strict=True)]
        off_s += times[False]
        medians = ", ".join(f"{'on' if on else 'off'} {statistics.median(times[on]):.3f} s" for on in times)
        print(f"pair {pair + 1}: median step {medians}", flush=True)
    return ratios, statistics.median(off_s), spans


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
    parser.add_argument("--pairs", type=int, default=3, help="pairs of runs; 0: only the direct figure")
    parser.add_argument("--steps", type=int, default=25)
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
            ratios, step_s, spans = paired(args.config, args.set, args.pairs, args.steps, endpoint)
            low, high, covered = median_interval(ratios)
            print(
                f"paired: median ratio {statistics.median(ratios):.4f}, {100 * covered:.0f} % interval "
                f"{low:.4f} to {high:.4f} over {len(ratios)} steps of {args.pairs} pairs of runs"
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
