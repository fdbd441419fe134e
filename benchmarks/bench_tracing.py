"""The cost of tracing per step: a run that is traced half of the time, and the CPU time of the spans alone.

    python benchmarks/bench_tracing.py                                    # the tiny model
    python benchmarks/bench_tracing.py examples/quickstart.yaml --steps 800 \\
        --set batch.prompts=1 batch.group_size=4 sync.ess_threshold=null sync.max_age=null \\
        sync.clip_fraction=null

The second command trains a model of 135 million parameters in many short steps that send no weights; it takes
40 minutes.

paired     within the processes of one run, tracing is off and on in turn, in slots of 20 seconds, and
           each slot is compared with its two neighbours: step times of two runs of the same configuration
           differ by 5 %, and the speed of a machine varies from minute to minute
direct     CPU time of the spans of one response and of one step, created by the services' own functions and
           sent by the real exporter, times their number; an upper bound, since some of it runs in parallel
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
SKIPPED = 5
"""First steps of a run, which wait for the first batch and for compilation."""
SLOT_S = 20
BLOCK, MIN_BLOCKS = 6, 8
SEEN_AFTER_S = 0.25
"""Maximum time from the end of a step until its line is in metrics.jsonl."""
ALONE = ("sync.max_lead=0", "trainer.checkpoint_every=100000")
"""Settings that keep all work of a step within it."""
SWITCH = """
import os, sys, threading, time

def switch():
    while True:
        time.sleep(SLOT_S - time.time() % SLOT_S)
        if not os.path.exists("METRICS") or not os.path.getsize("METRICS"):
            continue  # the engine is built with tracing on
        on = int(time.time() // SLOT_S) % 2 == 1
        sys.modules["leeway.telemetry.tracing"]._on = on
        vllm = sys.modules.get("vllm.v1.engine.output_processor")
        if vllm is not None:
            spans = vars(vllm).setdefault("_spans", vllm.OutputProcessor.do_tracing)
            vllm.OutputProcessor.do_tracing = spans if on else lambda *args: None

if any(word.startswith("leeway_") for word in sys.orig_argv):
    threading.Thread(target=switch, daemon=True).start()
"""
"""Source of a sitecustomize module, which services import when they start."""
RESPONSES = 4000


def serve_receiver() -> None:
    """Count spans received over OTLP/HTTP; a GET returns {"name": count}. Prints its port first."""
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
    """URL of a receiver in a separate process."""
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


def paired(
    config: Path, settings: list[str], steps: int, endpoint: str
) -> tuple[dict[int, list[float]], dict[str, float]]:
    """Step times in seconds by slot, and spans per step by name.

    Tracing is on in odd slots; steps that start in one slot and end in another are excluded.
    """
    environ = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")}
    slots: dict[int, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "run", Path(folder) / "log"
        switch = SWITCH.replace("SLOT_S", str(SLOT_S)).replace("METRICS", str(out / "metrics.jsonl"))
        (Path(folder) / "sitecustomize.py").write_text(switch)
        path = os.pathsep.join(filter(None, (folder, environ.get("PYTHONPATH"))))
        environ |= {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "PYTHONPATH": path}
        command = [sys.executable, "-m", "leeway_host", "run", str(config), "--steps", str(steps)]
        command += ["--out", str(out)]
        command += [word for setting in (*ALONE, *settings) for word in ("--set", setting)]
        with log.open("w") as stream:
            code = subprocess.call(command, env=environ, cwd=ROOT, stdout=stream, stderr=stream)
        if code:
            sys.exit(f"{' '.join(command)}: exit {code}\n{log.read_text()[-4000:]}")
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for row in rows[SKIPPED:]:
        ended = row["time"]
        if (ended - SEEN_AFTER_S - row["time/step_s"]) // SLOT_S == ended // SLOT_S:
            slots.setdefault(int(ended // SLOT_S), []).append(row["time/step_s"])
    return slots, {name: count / steps for name, count in take_counts(endpoint).items()}


def neighbours(slots: dict[int, list[float]]) -> list[float]:
    """log(on / off) of the mean step time in each slot and its two neighbours."""
    means = {at: math.log(statistics.fmean(seconds)) for at, seconds in slots.items()}
    return [
        (1 if at % 2 else -1) * (means[at] - (means[at - 1] + means[at + 1]) / 2)
        for at in sorted(means)
        if at - 1 in means and at + 1 in means
    ]


def interval(values: list[float]) -> tuple[float, float]:
    """95 % interval of the mean: bootstrap over means of BLOCK values, because each slot is in up to three
    of them; infinite with fewer than MIN_BLOCKS blocks."""
    blocks = [np.mean(values[at : at + BLOCK]) for at in range(0, len(values), BLOCK)]
    if len(blocks) < MIN_BLOCKS:
        return -math.inf, math.inf
    means = np.random.default_rng(0).choice(blocks, (10_000, len(blocks))).mean(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def direct(run: RunConfig, endpoint: str) -> tuple[float, float]:
    """CPU seconds of the spans of one response, and of a step without its responses."""
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
            ):  # in place of the one from vLLM
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
    """Send everything that is buffered; the sending thread counts towards this process's CPU time."""
    from opentelemetry import trace

    provider: Any = trace.get_tracer_provider()
    assert provider.force_flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path, nargs="?", default=ROOT / "examples" / "tiny.yaml")
    parser.add_argument("--steps", type=int, default=200, help="0: only the direct figure")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of the run")
    parser.add_argument("--step-seconds", type=float, help="step time to compare with when --steps is 0")
    parser.add_argument("--receiver", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.receiver:
        serve_receiver()
    from leeway.config.load import load_config

    run = load_config(args.config, args.set)
    with receiver() as endpoint:
        step_s = args.step_seconds
        if args.steps:
            slots, spans = paired(args.config, args.set, args.steps, endpoint)
            off, on = ([s for at in slots if at % 2 == odd for s in slots[at]] for odd in (0, 1))
            step_s = statistics.fmean(off)
            changes = neighbours(slots)
            mean, low, high = (100 * math.expm1(x) for x in (statistics.fmean(changes), *interval(changes)))
            within = f"{low:.2f} to {high:.2f} %, 95 %" if math.isfinite(high) else "too few for an interval"
            print(
                f"paired: {len(off)} steps off, {step_s:.3f} s on average, {len(on)} on, "
                f"{statistics.fmean(on):.3f} s; {len(changes)} slots with their neighbours: on costs "
                f"{mean:.2f} % ({within})"
            )
            error = math.hypot(
                *(statistics.stdev(x) / math.sqrt(len(x)) / statistics.fmean(x) for x in (off, on))
            )
            ratio = statistics.fmean(on) / step_s
            print(f"all steps: ratio {ratio:.4f} +- {1.96 * error:.4f} (95 %)")
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
