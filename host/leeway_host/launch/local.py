"""`leeway run`: all services of a run as processes of this machine.

prepare    check the task, the server and the ports; build or find the model
start      Redis, controller, trainer, samplers
watch      reports and verdicts into metrics.jsonl and the table; restart what may be restarted
stop       samplers drain; whatever is left is killed; summary.json is written in every case
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import redis

from leeway.config import RunConfig
from leeway.config.load import dump_config
from leeway.diagnose import describe_tickets, is_stalled
from leeway.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_POISONED,
    EXIT_STALLED,
    EXIT_USAGE,
    LeewayError,
    StalledError,
    UsageError,
)
from leeway.events import EventTail
from leeway.messages import Report, ReportHeader, Verdict, decode
from leeway.statuses import read_statuses
from leeway.streams import SCALE_FIELD, Keys, RedisUnavailable, Tail, client_name, connect, retrying
from leeway_host.launch.address import Place, published
from leeway_host.launch.checks import CheckFile
from leeway_host.launch.claims import CONFIG_FILE, check_checkpoint, check_ports, claimed
from leeway_host.launch.history import is_repeat
from leeway_host.launch.record import Recorder, write_atomic
from leeway_host.launch.services import Service, describe_exit, stop_all
from leeway_host.launch.table import View, open_view
from leeway_host.redis_server import EmbeddedRedis

REDIS_ENV = "LEEWAY_REDIS_URL"
POLL_S = 0.2
SERVER_S = 1.0
"""Longest wait for the server in one pass of the loop: in between the launcher looks whether it died."""
RESTARTS = 3
"""Of the controller, and of a server of the run's own."""
SERVICES_CONFIG = ".services.yaml"
"""What the processes read; it becomes CONFIG_FILE once the trainer has started with it."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class RunFailed(LeewayError):
    """A process of the run failed; the message holds its name and log tail."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Interrupted(LeewayError):
    """Ctrl-C or SIGTERM."""

    exit_code = EXIT_INTERRUPTED


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    summary: dict[str, Any]
    out: Path
    exit_code: int


def plan_samplers(names: list[str], wanted: int) -> tuple[set[str], list[str]]:
    """(those that go, those that stay): the youngest go first."""
    return set(names[wanted:]), names[:wanted]


class StopRequest:
    """SIGINT, SIGTERM and SIGHUP while it is entered: remembered, and looked at by `check`.

    With `immediate` set the signal also raises Interrupted where it arrives, to cut short work that does not
    look; Python drops such an exception in a few places, which is why it is remembered as well.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.immediate = False

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        self.number = number
        if self.immediate:
            self.check()

    def check(self) -> None:
        """Raise Interrupted when a signal came."""
        if self.number is not None:
            raise Interrupted(f"stopped by {signal.Signals(self.number).name}")


class LocalRun:
    """One run on this machine. `run()` never raises; it returns a Result and leaves no process behind."""

    def __init__(self, config: RunConfig, out: Path, *, resume: bool = False, as_json: bool = False) -> None:
        self.config, self.out, self.resume, self.as_json = config, out, resume, as_json
        self.services: list[Service] = []
        self.run_id = f"{config.name}-{time.strftime('%Y%m%d%H%M%S')}-{os.getpid()}"
        self.keys = Keys(self.run_id)
        self.began = False
        self.wanted_samplers = config.sampler.replicas
        self.leaving: list[Service] = []
        """Samplers that were told to drain and go."""
        self.reward_errors: set[str] = set()
        self.server: EmbeddedRedis | None = None
        self.server_restarts = 0
        self.last_report: ReportHeader | None = None

    def run(self) -> Result:
        """Prepare, start, watch, stop. Raises UsageError when the output directory cannot be used."""
        with claimed(self.out, self.resume):
            return self._run_claimed()

    def _run_claimed(self) -> Result:
        status, error, code = "completed", None, 0
        self.recorder = Recorder(self.out, self.config, self.run_id)
        self.view: View = open_view(self.config.trainer.steps, self.as_json)
        with StopRequest() as self.stop, ExitStack() as stack:
            stack.callback(self.view.close)
            try:
                self._run(stack)
            except Interrupted as exc:
                status, error, code = "interrupted", str(exc), exc.exit_code
            except LeewayError as exc:
                status = "stalled" if isinstance(exc, StalledError) else "failed"
                error, code = str(exc), exc.exit_code
            except Exception as exc:  # noqa: BLE001 (a bug or a full disk must still end with a summary)
                status, code = "failed", EXIT_FAILED
                error = f"{type(exc).__name__}: {exc}; more with --set telemetry.log_level=DEBUG"
                if self.config.telemetry.log_level == "DEBUG":
                    error = traceback.format_exc()
            finally:
                self.stop.immediate = False
                # Without mercy after a failure, with a drain after success (which _run has done).
                stop_all(self.services, grace_s=2.0)
            # A resume that was refused must not turn a good run's summary into a failed one.
            summary = self.recorder.finish(status, error, write=self.began or not self.resume)
        return Result(summary, self.out, code)

    # -- prepare and start ------------------------------------------------------------

    def _run(self, stack: ExitStack) -> None:
        from leeway.tasks import load_task

        self.stop.immediate = True
        check_ports(self.config)
        load_task(self.config.task)
        if self.resume:
            check_checkpoint(self.out, self.config)
        url = self._redis_url(stack)
        self.client = self._connect(url)
        stack.callback(self.client.close)
        stack.callback(self._delete_keys)
        self.checks = CheckFile(self.client, self.keys, self.out)
        stack.callback(self.checks.close)
        stack.enter_context(published(self.out, Place(self.run_id, url)))
        model = self._prepare_model()
        self.stop.immediate = False
        write_atomic(self.out / SERVICES_CONFIG, dump_config(self.config))
        self._start_services(url, model)
        if self.config.redis.url:
            self.view.note(f"run {self.run_id}; leeway resync {self.run_id} --redis URL asks for new weights")
        self._watch()
        self.view.status("stopping")
        stop_all(self.services, grace_s=self.config.sampler.drain_s + 10)

    def _prepare_model(self) -> Path:
        from leeway_host.models import prepare_model

        return prepare_model(
            self.config.model, task=self.config.task, seed=self.config.seed, progress=self.view.status
        )

    def _connect(self, url: str) -> redis.Redis:
        try:
            return connect(
                url,
                socket_timeout_s=self.config.redis.socket_timeout_s,
                wait_s=5.0,
                name=client_name(self.run_id, "launcher"),
            )
        except RedisUnavailable as exc:
            raise UsageError(f"{exc}; start that server, or leave --redis and redis.url away") from exc

    def _redis_url(self, stack: ExitStack) -> str:
        if self.config.redis.url:
            return self.config.redis.url
        settings = self.config.redis
        server = EmbeddedRedis(maxmemory_mib=settings.maxmemory_mib, appendonly=settings.appendonly)
        stack.callback(server.stop)
        self.server = server.start()
        return server.url

    def _delete_keys(self) -> None:
        # Only for a server that outlives the run; a run's keys are of no use without its processes.
        if self.config.redis.url:
            try:
                names = list(self.client.scan_iter(match=self.keys.key("*").replace("[", "\\["), count=1000))
                if names:
                    self.client.unlink(*names)
            except redis.RedisError as exc:
                self.view.note(f"the keys of {self.run_id} were left on the server: {exc}")

    def _start_services(self, url: str, model: Path) -> None:
        common = [
            "--config",
            str(self.out / SERVICES_CONFIG),
            "--run",
            self.run_id,
            "--redis",
            f"env:{REDIS_ENV}",
        ]
        common += ["--model", str(model)]
        urls = {"controller": url, "trainer": url, "sampler": url, **self.config.redis.service_urls}
        env = {name: {REDIS_ENV: place, "TOKENIZERS_PARALLELISM": "false"} for name, place in urls.items()}
        python = [sys.executable, "-m"]
        self.controller = self._service(
            "controller",
            [*python, "leeway_controller", *common, *self._metrics_port(0)],
            env["controller"],
            max_restarts=RESTARTS,
        )
        trainer = [*python, "leeway_trainer"]
        if self.config.trainer.ranks > 1:
            trainer = [
                *python,
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={self.config.trainer.ranks}",
                "-m",
                "--",  # torchrun would take our --run for its own --run-path
                "leeway_trainer",
            ]
        trainer += [*common, *self._metrics_port(1), "--out", str(self.out)]
        self.trainer = self._service(
            "trainer", trainer, env["trainer"], max_restarts=self.config.trainer.max_restarts
        )
        if self.resume:
            self._resume_trainer()
        self.samplers: list[Service] = []
        self.sampler_command = [*python, "leeway_sampler", *common], env["sampler"]
        for _ in range(self.config.sampler.replicas):
            self._add_sampler()
        for service in self.services:
            service.start()

    def _add_sampler(self) -> Service:
        argv, env = self.sampler_command
        index, port = len(self.samplers), self.config.sampler.http_port
        argv = [*argv, *self._metrics_port(2 + index), "--id", f"sampler-{index}"]
        argv += ["--port", str(port + index if port else 0)]
        restarts = self.config.sampler.max_restarts
        self.samplers.append(self._service(f"sampler-{index}", argv, env, max_restarts=restarts))
        return self.samplers[-1]

    def _scale(self) -> None:
        """Start or drain samplers as `leeway scale samplers` asked."""
        raw: Any = retrying(
            lambda: self.client.hget(self.keys.state, SCALE_FIELD),
            budget_s=SERVER_S,
            what="reading the scale",
        )
        wanted = int(raw) if raw else self.wanted_samplers
        if wanted == self.wanted_samplers:
            return
        self.wanted_samplers = wanted
        going, staying = plan_samplers([s.name for s in self.samplers if s not in self.leaving], wanted)
        for service in self.samplers:
            if service.name in going:
                self.leaving.append(service)
                service.terminate()
        for _ in range(wanted - len(staying)):
            self._add_sampler().start()
        self.view.note(f"scaled to {wanted} samplers")

    def _metrics_port(self, number: int) -> list[str]:
        # All services of this machine share one configuration, so each is told its own port.
        first = self.config.telemetry.metrics_port
        return ["--metrics-port", str(first + number if first else 0)]

    def _service(self, name: str, argv: list[str], env: dict[str, str], max_restarts: int = 0) -> Service:
        service = Service(name, argv, self.out / "logs" / f"{name}.log", env, max_restarts)
        self.services.append(service)
        return service

    def _resume_trainer(self) -> bool:
        """Let the trainer's next start go on from the last checkpoint; False when there is none."""
        if not (self.out / "checkpoints" / "latest").exists():
            return False
        if "--resume" not in self.trainer.argv:
            self.trainer.argv += ["--resume", str(self.out)]
        return True

    # -- watch ------------------------------------------------------------------------

    def _watch(self) -> None:
        """Until trainer and controller are done. Raises RunFailed, StalledError or Interrupted."""
        reports = Tail(self.client, self.keys.reports, budget_s=SERVER_S)
        verdicts = Tail(self.client, self.keys.verdicts, budget_s=SERVER_S)
        events = EventTail(self.client, self.keys, budget_s=SERVER_S)
        began = answered = self.progress_at = time.monotonic()
        while True:
            self.stop.check()
            self._keep_server()
            done = self.trainer.poll() == 0
            try:
                self._drain(reports, verdicts, events)
                self._scale()
                answered = time.monotonic()
            except RedisUnavailable:
                if time.monotonic() - answered > self.config.redis.reconnect_s:
                    raise
                continue
            if done:
                return
            self._check_services()
            self._check_progress()
            self._show_status(time.monotonic() - began)
            self._after_pass()
            time.sleep(POLL_S)

    def _check_progress(self) -> None:
        """Controller and trainer watch the run and each other; this is for the case that both hang."""
        limit, start_s = self.config.sync.stall_timeout_s, self.config.sampler.start_timeout_s
        if not self.recorder.rows:
            limit = max(limit, start_s)
        silent = time.monotonic() - self.progress_at
        if is_stalled(self.client, self.keys, silent, 2 * limit, start_s):
            states = (f"{s.name} {psutil.Process(s.pid).status()}" for s in self.services if s.running)
            raise StalledError(
                f"no report for {silent:.0f} s, and neither controller nor trainer said why; "
                f"processes: {', '.join(states)}; {describe_tickets(self.client, self.keys)}"
            )

    def _after_pass(self) -> None:
        """Called after every pass of the loop; a chaos run injects its faults here."""

    def _on_report(self, report: ReportHeader) -> None:
        """Called with every report, also those of steps that are trained again later."""

    def _keep_server(self) -> None:
        """Start a server of the run's own again when it died."""
        if self.server is None or self.server.returncode is None:
            return
        died = f"the Redis server ended ({describe_exit(self.server.returncode)})"
        if self.server_restarts >= RESTARTS:
            raise RunFailed(f"{died} {RESTARTS + 1} times; its log:\n{self.server.log_tail()}", EXIT_FAILED)
        self.server_restarts += 1
        self.server.restart()
        lost = "nothing is lost" if self.server.appendonly else "what was in flight is generated again"
        self.view.note(f"{died} and was started again; {lost}")

    def _drain(self, reports: Tail, verdicts: Tail, events: EventTail) -> None:
        self.statuses = read_statuses(self.client, self.keys, budget_s=SERVER_S)
        self.recorder.samplers.update(self.statuses)
        self.checks.update(budget_s=SERVER_S)
        self.recorder.check_counts = self.checks.counts()
        for event in events.read():
            if event.level != "info":
                self.view.note(f"{event.source}: {event.text}")
        # One at a time: the server may go away in between, and none that was read may be forgotten.
        while entries := reports.read(count=1, block_s=None):
            report = decode(Report, entries[0].fields).header
            if is_repeat(self.last_report, report):
                continue
            self.last_report, self.progress_at = report, time.monotonic()
            self._on_report(report)
            if report.event == "started":
                self.began = True
                write_atomic(self.out / CONFIG_FILE, dump_config(self.config))
                self.recorder.started(report.step)
            elif report.event == "step":
                self.recorder.step(report)
                self._note_reward_errors(report)
            # A verdict follows its report; reading it in between keeps each row with its own verdict.
            self._take_verdicts(verdicts)
        self._take_verdicts(verdicts)

    def _note_reward_errors(self, report: ReportHeader) -> None:
        text = str(report.metrics.get("reward/error") or "")
        if text and text not in self.reward_errors and len(self.reward_errors) < 5:
            self.reward_errors.add(text)
            count = int(float(report.metrics.get("reward/errors") or 0))
            self.view.note(f"step {report.step + 1}: {count} responses could not be scored, such as: {text}")

    def _take_verdicts(self, verdicts: Tail) -> None:
        for entry in verdicts.read(count=1, block_s=None):
            row = self.recorder.verdict(decode(Verdict, entry.fields).header)
            if row is not None:
                self.view.row(row)

    def _check_services(self) -> None:
        for service in self.services:
            code = service.poll()
            if code is None or (code == 0 and service is self.controller):
                continue
            if service in self.leaving:
                continue  # it was told to go; a dead one's tickets are claimed by others
            hint = where = ""
            if service is self.trainer:
                if code == 0:
                    continue
                where = " from the beginning"
                if self._resume_trainer():
                    where = " from the last checkpoint"
                    hint = f"\ngo on from the last checkpoint with: leeway run --resume {self.out}"
            if code in (EXIT_USAGE, EXIT_STALLED, EXIT_POISONED) or not service.restart():
                self._fail(service, code, hint)
            self.view.note(f"{service.name} ended ({describe_exit(code)}) and was started again{where}")

    def _fail(self, service: Service, code: int, hint: str = "") -> None:
        tail = service.log_tail()
        if code == EXIT_POISONED:
            for other in self.samplers:
                if other.restarts and other is not service:
                    hint += f"\nthe end of {other.log_path}, which was started again:\n{other.log_tail()}"
        message = (
            f"{service.name} ended ({describe_exit(code)}); the end of {service.log_path}:\n{tail}{hint}"
        )
        if code == EXIT_STALLED:
            raise StalledError(message)
        raise RunFailed(message, code if code in (EXIT_USAGE, EXIT_POISONED) else EXIT_FAILED)

    def _show_status(self, seconds: float) -> None:
        if self.recorder.rows:
            self.view.status(
                f"training; {len(self.statuses)} samplers, {sum(s.inflight for s in self.statuses)} in flight"
            )
        elif any(status.ready for status in self.statuses):
            self.view.status("first batch is generated and trained")
        else:
            self.view.status("starting the engines")
