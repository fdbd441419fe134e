"""How `pytest -n` divides the tests: what one worker runs in one go, and what starts first.

A module is a unit of work, because its tests share engines, process groups and servers. Modules that are
long, or whose tests share nothing that is expensive, are divided further. The longest units start first, so
that no worker is left alone with one at the end; the quick ones fill the gaps.

Both functions depend on the test's id alone: every worker has to come to the same answer.
"""

from __future__ import annotations

import zlib

ALONE = ("tests/e2e/test_run.py", "tests/simulation/test_simulation.py")
"""Each test is its own unit."""
SLICES = {
    "tests/unit/checks/test_clean_and_faulty.py": 6,
    "tests/unit/corrections/test_random_batches.py": 2,
    "tests/unit/corrections/test_methods.py": 2,
    "tests/integration/trainer/test_crash_points.py": 2,
}
"""Number of units that a module's tests are divided into."""
VARIANTS = {"tests/integration/sampler/test_engine.py": ("tied", "untied")}
"""Parameters of a module's engine: one unit and one engine for each. Tests without one join the first."""
FIRST = (
    "tests/e2e/test_chaos.py",
    "tests/integration/sampler/test_engine.py",
    # Runs behind the first of these on the same worker, see pytest-xdist's LoadScopeScheduling.
    "tests/unit/controller/test_pods.py",
    "tests/static",
    "tests/e2e/test_run.py::test_a_whole_run",
    "tests/simulation",
    "tests/integration/sampler/test_serve.py",
    "tests/integration/trainer/test_methods.py",
    "tests/integration/trainer/test_two_ranks.py",
    "tests/integration/trainer/test_process.py",
    "tests/unit/shared/test_fuzz.py",
    "tests/integration/trainer",
    "tests/e2e",
    "tests/integration/lab",
    "tests/integration",
    "tests/unit/corrections",
    "tests/unit/checks",
    "tests/chart",
)
"""Beginnings of ids, in the order in which their units start; all others follow."""


def parameters(nodeid: str) -> str:
    """The text between the brackets of a parametrized test's id, or ""."""
    return nodeid.partition("[")[2].removesuffix("]")


def unit_of(nodeid: str) -> str:
    """Name of the unit of work that a test belongs to."""
    module = nodeid.partition("::")[0]
    parameter = parameters(nodeid)
    if module in ALONE or parameter == "minute":
        return nodeid
    if module in SLICES:
        return f"{module} {zlib.crc32(nodeid.encode()) % SLICES[module]}"
    if module in VARIANTS:
        first, *others = VARIANTS[module]
        return f"{module} {next((v for v in others if v in parameter.split('-')), first)}"
    return module


def start_order(nodeid: str) -> int:
    """Units with a lower number start earlier."""
    return next((i for i, beginning in enumerate(FIRST) if nodeid.startswith(beginning)), len(FIRST))
