"""What can only fail late is tried before step 0, in seconds, and reported as one list.

    site.py      what the checks look at: configuration, directory, environment, model
    settings.py  keys and environment variables that nothing reads
    machine.py   /dev/shm, processes, cores, memory, clock, compiler, instruction set
    ports.py     ports of the configuration
    disk.py      a checkpoint written and read; free space and inodes against what a run writes
    server.py    Redis: reachable, policy, memory; permissions.py: commands of every service
    model.py     files and sizes of the model
    prompts.py   prompts through tokenizer and chat template            (a process)
    reward.py    one reward on one response                             (a process)
    trials.py    those processes, and those of trainer and sampler      (leeway_trainer.trial, ...)
    runner.py    all of it: a budget for each check, all findings       run_preflight, require_ready
    report.py    the list as text and as JSON

Checks are functions from a `Site` to findings; decisions are pure functions of what was read.
"""

from leeway_host.preflight.report import as_json, describe, exit_code
from leeway_host.preflight.runner import check_machine, require_ready, run_preflight
from leeway_host.preflight.site import Site

__all__ = [
    "Site",
    "as_json",
    "check_machine",
    "describe",
    "exit_code",
    "require_ready",
    "run_preflight",
]
