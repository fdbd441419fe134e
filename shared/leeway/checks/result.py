"""The result of a check: one number against one threshold, with the evidence."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Status = Literal["ok", "warn", "fail"]
ORDER: dict[Status, int] = {"ok": 0, "warn": 1, "fail": 2}


class CheckResult(BaseModel):
    """`name` is `check/measure`. A `value` beyond `threshold` fails; `evidence` is text for a person."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")
    name: str
    status: Status
    value: float | None = None
    threshold: float | None = None
    evidence: str
    step: int | None = None
    """The optimiser step it was measured at, if any."""
    version: int | None = None
    """The weight version it was measured under, if any."""

    @property
    def check(self) -> str:
        """The check this measure belongs to, such as `numerics`."""
        return self.name.split("/")[0]


def judge(
    name: str,
    value: float,
    evidence: str,
    *,
    fail: float | None,
    warn: float | None = None,
    step: int | None = None,
    version: int | None = None,
) -> CheckResult:
    """Judge a measure where larger is worse: fail above `fail`, warn above `warn` (None: never)."""
    status: Status = "ok"
    if fail is not None and not value <= fail:  # NaN fails
        status = "fail"
    elif warn is not None and not value <= warn:
        status = "warn"
    shown = fail if fail is not None else warn
    return CheckResult(
        name=name,
        status=status,
        value=float(value),
        threshold=shown,
        evidence=evidence,
        step=step,
        version=version,
    )


def worse(a: CheckResult, b: CheckResult) -> bool:
    """Whether `a` is strictly worse than `b`."""
    return ORDER[a.status] > ORDER[b.status]
