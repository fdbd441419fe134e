"""`leeway run`: all services of a run as processes of this machine.

claim      the output directory belongs to this run alone; what it resumes      claims.py
preflight  try what can only fail late                                          leeway_host.preflight
prepare    check environment, ports and task; start or find the server          environment.py, server.py
           build or find the model                                              leeway_host.models
start      controller, trainer, samplers                                        commands.py, fleet.py
watch      every 0.2 s until the trainer is done:                               below
               keep the embedded server alive                                   server.py
               reports, verdicts, heartbeats -> metrics.jsonl, table            stream_follower.py
               restart what may be restarted, scale                             fleet.py
           ends early with: a signal, a service that fails, no progress, no server
stop       samplers drain, what is left is killed; summary.json is written in every case
"""

from __future__ import annotations

import os
import time
import traceback
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from leeway.checkpoints.find import find_checkpoint, roll_back
from leeway.config import RunConfig
from leeway.config.load import dump_config
from leeway.diagnose import describe_tickets, is_stalled
from leeway.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_STALLED, LeewayError, StalledError
from leeway.messages import ReportHeader
from leeway.streams import Keys, RedisUnavailable
from leeway_host.acl import OPERATOR
from leeway_host.launch.address import RunAddress, published
from leeway_host.launch.checks import CheckFile
from leeway_host.launch.claims import check_checkpoint, check_ports, claimed, only_export_is_left
from leeway_host.launch.commands import SERVICES_CONFIG, LaunchPlan
from leeway_host.launch.environment import require_environment
from leeway_host.launch.export import export_run
from leeway_host.launch.failures import SERVER, RunFailed, describe_error, find_reason
from leeway_host.launch.fleet import Fleet
from leeway_host.launch.interrupt import StopRequest
from leeway_host.launch.record import Recorder, write_atomic
from leeway_host.launch.server import RunServer, run_server
from leeway_host.launch.stream_follower import Follower
from leeway_host.launch.table import View, open_view
from leeway_host.preflight import require_ready

POLL_S = 0.2
SERVER_S = 1.0
"""Maximum wait for the server in one pass of the loop: in between, the launcher checks whether it died."""
FAILURE_GRACE_S = 2.0
"""Time between SIGTERM and SIGKILL for services of a run that failed."""


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    summary: dict[str, Any]
    out: Path
    exit_code: int


class LocalRun:
    """One run on this machine. `run()` returns a Result for every way a run can end, and leaves no process.

    `prepare_model`, `on_report` and `after_pass` are for subclasses, as is `min_restarts` (see Fleet).
    """

    min_restarts = 0

    def __init__(
        self,
        config: RunConfig,
        out: Path,
        *,
        resume: bool = False,
        resume_from: int | None = None,
        as_json: bool = False,
        preflight: bool = False,
    ) -> None:
        self.config, self.out, self.resume, self.as_json = config, out, resume, as_json
        self.preflight = preflight
        self.resume_from = resume_from
        """With `resume`: the step whose checkpoint the run continues from, instead of the latest."""
        self.run_id = f"{config.name}-{time.strftime('%Y%m%d%H%M%S')}-{os.getpid()}"
        self.keys = Keys(self.run_id)
        self.started = False
        """True once the trainer has loaded: from then on the directory contains results of this run."""

    def run(self) -> Result:
        """Prepare, start, watch, stop. Raises UsageError when the output directory cannot be used."""
        with claimed(self.out, self.resume), StopRequest() as self.stop, ExitStack() as stack:
            self.recorder = Recorder(self.out, self.config, self.run_id)
            self.view: View = open_view(self.config.trainer.steps, self.as_json)
            stack.callback(self.view.close)
            error = self._run_to_an_end(stack)
            # A resume that was rejected must not turn a good run's summary into a failed one.
            summary = self._finish(error, write=self.started or not self.resume)
        if error is None:
            return Result(summary, self.out, EXIT_OK if summary["status"] == "completed" else EXIT_FAILED)
        return Result(summary, self.out, error.exit_code if isinstance(error, LeewayError) else EXIT_FAILED)

    def _run_to_an_end(self, stack: ExitStack) -> Exception | None:
        """What ended the run; None if it is complete."""
        try:
            with ExitStack() as processes:
                self._run(stack, processes)
        except Exception as exc:  # noqa: BLE001 (a bug or a full disk must still end with a summary)
            return exc
        finally:
            self.stop.immediate = False
        return None

    def _finish(self, error: Exception | None, *, write: bool) -> dict[str, Any]:
        """The summary of a run that ended with `error`."""
        if error is None:
            return self.recorder.finish("completed", write=write)
        text = describe_error(error)
        if not isinstance(error, LeewayError) and self.config.telemetry.log_level == "DEBUG":
            text = "".join(traceback.format_exception(error))
        code = error.exit_code if isinstance(error, LeewayError) else EXIT_FAILED
        status = {EXIT_INTERRUPTED: "interrupted", EXIT_STALLED: "stalled"}.get(code, "failed")
        resumable = (self.out / "checkpoints" / "latest").exists()
        return self.recorder.finish(
            status, text, find_reason(error, self.out, resumable=resumable), write=write
        )

    def _run(self, stack: ExitStack, processes: ExitStack) -> None:
        """The life of a run. `processes` is closed first, `stack` after the summary was written."""
        from leeway.rewards import check_reward

        self.stop.immediate = True  # nothing runs yet that would need a drain
        require_environment(self.view.note)
        if self.resume and self.resume_from is not None:
            find_checkpoint(self.out, self.resume_from)  # before the preflight, which takes a while
        elif self.resume and self._is_complete():
            return
        if self.preflight:
            require_ready(self.config, self.out, self.prepare_model, self.view.note, self.view.status)
        check_ports(self.config)
        if not self.preflight:
            check_reward(self.config.task)
        if self.resume and self.resume_from is not None:
            roll_back(self.out, self.resume_from)
            if self._is_complete():
                return
        self.redis: RunServer = stack.enter_context(run_server(self.config, self.keys, self.view.note))
        self.checks = CheckFile(self.redis.client, self.keys, self.out)
        stack.callback(self.checks.close)
        stack.enter_context(
            published(self.out, RunAddress(self.run_id, self.redis.url_of(OPERATOR, OPERATOR)))
        )
        model = self.prepare_model()
        self.stop.immediate = False

        write_atomic(self.out / SERVICES_CONFIG, dump_config(self.config))
        plan = LaunchPlan(self.config, self.out, self.run_id, self.redis.url_of, model)
        self.fleet = Fleet(plan, self.view.note, resume=self.resume, min_restarts=self.min_restarts)
        processes.callback(self.fleet.stop, FAILURE_GRACE_S)
        self.fleet.start()
        if self.config.redis.url:
            self.view.note(f"run {self.run_id}; leeway resync {self.run_id} --redis URL requests new weights")
        self._watch()
        self.view.status("stopping")
        self.fleet.stop(self.config.sampler.drain_s + 10)

    def _is_complete(self) -> bool:
        """Whether the run to resume had done every step; what was left, its export, is made.

        Raises UsageError for a checkpoint that it cannot continue from.
        """
        check_checkpoint(self.out, self.config)
        if not only_export_is_left(self.out, self.config):
            return False
        self.view.note(f"every step is done; writing {self.out}/model from the last checkpoint")
        export_run(self.out)
        self.started = True
        return True

    def prepare_model(self) -> Path:
        """Directory of the model, built or fetched if necessary."""
        from leeway_host.models import prepare_model

        return prepare_model(
            self.config.model, task=self.config.task, seed=self.config.seed, progress=self.view.status
        )

    def _watch(self) -> None:
        """Return when the trainer is done. Raises a LeewayError for everything else that ends a run."""
        follower = Follower(
            self.redis.client,
            self.keys,
            self.recorder,
            self.view,
            self.checks,
            self._take_report,
            budget_s=SERVER_S,
        )
        answered_at = time.monotonic()
        while True:
            self.stop.check()
            self.redis.keep_alive()
            finished = self.fleet.finished  # before the streams are read, so that the last reports are in
            try:
                follower.update()
                self.fleet.scale(follower.wanted_samplers(self.fleet.wanted_samplers))
                answered_at = time.monotonic()
            except RedisUnavailable as exc:
                if time.monotonic() - answered_at > self.config.redis.reconnect_s:
                    raise RunFailed(str(exc), process=SERVER) from exc
                continue
            if finished:
                return
            self.fleet.restart_ended()
            self._check_progress(time.monotonic() - follower.progress_at)
            self.view.status(follower.describe())
            self.after_pass()
            time.sleep(POLL_S)

    def _take_report(self, report: ReportHeader) -> None:
        self.started = self.started or report.event == "started"
        self.on_report(report)

    def on_report(self, report: ReportHeader) -> None:
        """Called with every report, including those of steps that are trained again later."""

    def after_pass(self) -> None:
        """Called after every pass of the loop."""

    def _check_progress(self, silent_s: float) -> None:
        """StalledError after `silent_s` seconds without a report, if that is too long.

        Controller and trainer watch the run and each other; this covers the case that both hang.
        """
        limit, start_s = self.config.sync.stall_timeout_s, self.config.sampler.start_timeout_s
        if not self.recorder.steps:
            limit = max(limit, start_s)
        client = self.redis.client
        if is_stalled(client, self.keys, silent_s, 2 * limit, start_s):
            running = [service for service in self.fleet.services if service.running]
            states = ", ".join(f"{s.name} {psutil.Process(s.pid).status()}" for s in running)
            raise StalledError(
                f"no report for {silent_s:.0f} s, and neither controller nor trainer has said why; "
                f"processes: {states}; {describe_tickets(client, self.keys)}"
            )
