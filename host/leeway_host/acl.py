"""Users of a shared Redis server, one per service, each with the permissions that its service needs.

A sampler can take and answer tickets; it cannot write weights, verdicts, reports or state. A trainer cannot
write verdicts or tickets; a controller cannot write weights, rollouts or reports. This needs a server with
key permissions and selectors (Redis 7.0 or newer, any Valkey).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from leeway.streams import Keys

SERVICES = ("controller", "trainer", "sampler")
CONNECTION = (
    "+ping", "+hello", "+auth", "+multi", "+exec", "+discard", "+unwatch",
    "+client|setname", "+client|setinfo", "+info", "+scan", "+time",
)  # fmt: skip
STREAM = "+@stream"
HASH = "+@hash"


def build_acl(run: str = "*") -> dict[str, list[str]]:
    """ACL SETUSER rules for each service, without state and password. `run`: name of a run, or a glob."""
    keys = Keys(run)
    weights = (keys.weights, f"{keys.weights}:*")

    def read(*names: str) -> str:
        return f"(+@read {' '.join(f'%R~{name}' for name in names)})"

    def allow(commands: str, *names: str) -> str:
        return f"({commands} {' '.join(f'~{name}' for name in names)})"

    def write(commands: str, *names: str) -> str:
        return f"({commands} {' '.join(f'%W~{name}' for name in names)})"

    everything = read(keys.key("*"))
    own = {
        "controller": [
            everything,
            allow(STREAM, keys.tickets, keys.reports),
            write("+xgroup|create", keys.rollouts),
            write("+xadd", keys.verdicts, keys.events),
            allow(f"{HASH} +watch", keys.state),
            allow(HASH, keys.samplers, keys.incarnations, keys.fences, keys.checks),
        ],
        "trainer": [
            everything,
            allow(f"{STREAM} +@string {HASH} +del +unlink +expire +persist", *weights),
            allow(STREAM, keys.rollouts),
            write("+xadd", keys.reports, keys.events),
            allow(f"{HASH} +watch", keys.state),
            allow(HASH, keys.checks),
        ],
        "sampler": [
            read(*weights, keys.fences, keys.probe, keys.state),
            allow(STREAM, keys.tickets),
            write("+xadd", keys.rollouts, keys.events),
            allow(HASH, keys.samplers, keys.suspects, keys.incarnations),
        ],
    }
    reset = ["resetkeys", "resetchannels", "clearselectors", "-@all"]
    return {service: [*reset, *CONNECTION, *own[service]] for service in SERVICES}


def acl_file(passwords: Mapping[str, str], run: str = "*") -> str:
    """Lines for the server's aclfile: the users leeway-<service>."""
    return "".join(
        f"user leeway-{service} {' '.join(setuser_arguments(service, passwords[service], run))}\n"
        for service in SERVICES
    )


def setuser_arguments(service: str, password: str, run: str = "*") -> Sequence[str]:
    """Arguments of ACL SETUSER after the user's name."""
    return ["on", f">{password}", *build_acl(run)[service]]
