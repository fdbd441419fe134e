"""Parts of a run that may hang or crash, tried in processes with a time limit.

Each is a module of the package that it tries; see `leeway.findings`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import IO

from leeway.findings import Finding, read_answers
from leeway_host.launch.commands import SERVICE_ENV
from leeway_host.launch.reasons import explain_exit
from leeway_host.preflight.site import Site

TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class TrialProcess:
    """`module` is run with the configuration on standard input, for at most `limit_s`."""

    check: str
    module: str
    limit_s: float

    def run(self, site: Site) -> list[Finding]:
        """The findings of the process, and one more if it ended early or was killed."""
        model = [] if site.model is None else ["--model", str(site.model.directory)]
        command = [sys.executable, "-m", self.module, "--parent", str(os.getpid()), *model]
        with (
            tempfile.TemporaryFile() as config,
            tempfile.TemporaryFile() as answers,
            tempfile.TemporaryFile() as log,
        ):
            config.write(site.config.model_dump_json().encode())
            config.seek(0)
            process = subprocess.Popen(
                command,
                stdin=config,
                stdout=answers,
                stderr=log,
                env={**site.environ, **SERVICE_ENV},
                start_new_session=True,
            )
            code = _wait(process, self.limit_s)
            findings, doing = read_answers(_read(answers))
            if code is None:
                text = f"no answer within {self.limit_s:g} s while {doing or 'starting'}; it was killed"
                findings.append(Finding("error", self.check, text, "it would also stop the run"))
            elif code:
                text = f"{doing or 'starting'} failed: {explain_exit(code, _read(log))}"
                findings.append(Finding("error", self.check, text, "the same would end the run"))
        return findings


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Exit status; None when the limit was exceeded and the process group was killed."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # nothing of the group is left
        process.wait()


def _read(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - TAIL_BYTES))
    return file.read().decode(errors="replace")
