"""The ports of a configuration: in range, different from each other, free."""

from __future__ import annotations

import errno
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from leeway.config import RunConfig
from leeway.findings import Finding
from leeway_host.launch.commands import CONTROLLER, FIRST_SAMPLER, TRAINER
from leeway_host.preflight.site import Site

CHECK = "ports"
LAST_PORT = 65535
ANY = "0.0.0.0"


@dataclass(frozen=True)
class Port:
    """A port that a service of the run will listen on. `setting`: what chose it."""

    setting: str
    service: str
    host: str
    number: int


def ports_of(config: RunConfig) -> list[Port]:
    """All ports that the configuration fixes; ports that services choose themselves are not among them."""
    samplers, found = config.sampler.replicas, []
    http, metrics = config.sampler.http_port, config.telemetry.metrics_port
    if http:
        found += [
            Port("sampler.http_port", f"sampler-{i}", config.sampler.http_host, http + i)
            for i in range(samplers)
        ]
    if metrics:
        services = {"controller": CONTROLLER, "trainer": TRAINER}
        services |= {f"sampler-{i}": FIRST_SAMPLER + i for i in range(samplers)}
        found += [
            Port("telemetry.metrics_port", name, ANY, metrics + offset) for name, offset in services.items()
        ]
    if config.weights.transport == "nccl":
        found.append(Port("weights.nccl_port", "trainer", ANY, config.weights.nccl_port))
    return found


def why_unusable(port: Port) -> str | None:
    """Why a server cannot listen on `port`; None if it can."""
    with socket.socket(socket.AF_INET6 if ":" in port.host else socket.AF_INET) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((port.host, port.number))
            sock.listen()
        except OSError as exc:
            return "another process uses it" if exc.errno == errno.EADDRINUSE else exc.strerror or str(exc)
    return None


def check_ports(site: Site) -> list[Finding]:
    return judge_ports(ports_of(site.config), why_unusable)


def judge_ports(ports: list[Port], why: Callable[[Port], str | None]) -> list[Finding]:
    """An error for every port that is out of range, used twice or not free."""
    found = []
    uses = Counter(port.number for port in ports)
    for port in ports:
        problem = None
        if port.number > LAST_PORT:
            problem = f"is above {LAST_PORT}"
        elif uses[port.number] > 1:
            others = [f"{p.setting} ({p.service})" for p in ports if p.number == port.number and p != port]
            problem = f"is also used by {', '.join(others)}"
        else:
            reason = why(port)
            problem = reason and f"on {port.host} cannot be used: {reason}"
        if problem:
            text = f"{port.setting}: port {port.number} of {port.service} {problem}"
            found.append(Finding("error", CHECK, text, f"choose another {port.setting}"))
    if not ports:
        return [Finding("ok", CHECK, "the configuration fixes no port")]
    numbers = ", ".join(str(port.number) for port in ports)
    return found or [Finding("ok", CHECK, f"free: {numbers}")]
