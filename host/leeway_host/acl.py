"""Users of the Redis server, one per service, each with the commands and keys that its service needs.

    controller   issues tickets, answers reports, fences samplers; also what an operator may do
    trainer      takes rollouts, publishes weights, writes reports
    sampler      takes and answers tickets, writes its own status
    operator     what a person does: `leeway status`, `resync`, `scale`, `doctor`

The server must know key permissions and selectors (Redis 7.0 or newer, any Valkey). docs/permissions.md has
the table of what each user is refused, and what the server's permissions cannot express.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Literal

from leeway.streams import Keys

SERVICES = ("controller", "trainer", "sampler")
"""Users of the run's processes."""
OPERATOR = "operator"
USERS = (*SERVICES, OPERATOR)
CONNECTION = (
    "+ping", "+hello", "+auth", "+multi", "+exec", "+discard", "+unwatch", "+time",
    "+client|setname",
)  # fmt: skip
"""What every user may do: it concerns no key."""
RESET = ("resetkeys", "resetchannels", "clearselectors", "-@all")
Access = Literal["R", "W", "RW"]
Rule = tuple[str, Access, tuple[str, ...]]
"""(commands, what they may do with the keys, keys)."""


def user_name(user: str) -> str:
    """The name of a user on the server."""
    return f"leeway-{user}"


def user_rules(run: str = "*", sampler: str = "*") -> dict[str, list[Rule]]:
    """User -> what it may do. `run`: name of a run, or a glob; `sampler`: whose status samplers may write."""
    keys = Keys(run)
    chunks, statuses = f"{keys.weights}:*", keys.sampler("*")
    operator: list[Rule] = [
        ("exists hget", "R", (keys.state,)),
        ("xlen xrange xpending", "R", (keys.tickets,)),
        ("xrevrange xrange xread", "R", (keys.reports, keys.verdicts, keys.events)),
        ("smembers", "R", (keys.samplers,)),
        ("mget", "R", (statuses,)),
        ("hgetall", "R", (keys.checks,)),
        ("hset", "W", (keys.requests,)),
        ("incr", "RW", (keys.probe,)),
    ]
    return {
        "controller": [
            (
                "xadd xlen xrange xpending xgroup|create xgroup|delconsumer xinfo|consumers",
                "RW",
                (keys.tickets,),
            ),
            ("xread", "R", (keys.rollouts,)),
            ("xgroup|create", "W", (keys.rollouts,)),
            (
                "xgroup|create xgroup|delconsumer xreadgroup xpending xclaim xautoclaim xack xrange xtrim "
                "xinfo|consumers",
                "RW",
                (keys.reports,),
            ),
            ("xread", "R", (keys.weights,)),
            ("xadd", "W", (keys.verdicts, keys.events)),
            ("xrange", "R", (keys.events,)),
            ("hget hmget hset hincrby watch", "RW", (keys.state,)),
            ("hexists hdel", "RW", (keys.requests,)),
            ("smembers srem", "RW", (keys.samplers,)),
            ("mget del", "RW", (statuses,)),
            ("hgetall hset hdel", "RW", (keys.fences,)),
            ("hgetall hdel", "RW", (keys.incarnations,)),
            ("hgetall hset", "RW", (keys.checks,)),
            *operator,  # people run `leeway status` and others in its pod
        ],
        "trainer": [
            (
                "xgroup|create xreadgroup xpending xclaim xrange xack xdel xinfo|stream",
                "RW",
                (keys.rollouts,),
            ),
            ("xadd xrevrange", "RW", (keys.rejected,)),
            ("xadd xlen xrange xdel", "RW", (keys.weights,)),
            ("sadd srem smembers", "RW", (keys.weight_streams,)),
            ("xadd xlen xrange unlink", "RW", (chunks,)),
            ("xread", "R", (keys.verdicts,)),
            ("xadd", "W", (keys.reports, keys.events)),
            ("xrange", "R", (keys.events,)),
            ("xlen xrange xpending", "R", (keys.tickets,)),
            ("hget hmget hset hincrby watch", "RW", (keys.state,)),
            ("hdel", "W", (keys.requests,)),
            ("smembers", "R", (keys.samplers,)),
            ("mget", "R", (statuses,)),
            ("hgetall hset", "RW", (keys.checks,)),
        ],
        "sampler": [
            ("xread xrange xlen", "R", (keys.weights, chunks)),
            (
                "xgroup|create xreadgroup xpending xclaim xautoclaim xack xdel xadd xrange",
                "RW",
                (keys.tickets,),
            ),
            ("xadd", "W", (keys.rollouts, keys.events)),
            ("sadd", "W", (keys.samplers,)),
            ("set del", "W", (keys.sampler(sampler),)),
            ("hgetall hsetnx hdel", "RW", (keys.suspects,)),
            ("hgetall hset hsetnx hdel", "RW", (keys.incarnations,)),
            ("hget", "R", (keys.state, keys.fences)),
            ("get", "R", (keys.probe,)),
        ],
        OPERATOR: operator,
    }


SERVER_WIDE = {"trainer": ("+info|memory",)}
"""Commands about the server as a whole: the trainer keeps some of its memory free."""


def build_acl(user: str, run: str = "*", sampler: str = "*") -> list[str]:
    """ACL SETUSER rules of a user, without state and password. Arguments: see `user_rules`."""
    return [
        *RESET,
        *CONNECTION,
        *SERVER_WIDE.get(user, ()),
        *(_selector(rule) for rule in user_rules(run, sampler)[user]),
    ]


def _selector(rule: Rule) -> str:
    commands, access, names = rule
    pattern = {"R": "%R~", "W": "%W~", "RW": "~"}[access]
    words = [f"+{command}" for command in commands.split()] + [f"{pattern}{name}" for name in names]
    return f"({' '.join(words)})"


def setuser_arguments(user: str, password: str, run: str = "*", sampler: str = "*") -> list[str]:
    """Arguments of ACL SETUSER after the user's name; the server keeps the password's digest only."""
    return ["on", f"#{sha256(password.encode()).hexdigest()}", *build_acl(user, run, sampler)]


def acl_file(passwords: Mapping[str, str], run: str = "*") -> str:
    """Lines for the server's aclfile: the users leeway-<user>, with passwords as they are given."""
    return "".join(
        f"user {user_name(user)} on >{password} {' '.join(build_acl(user, run))}\n"
        for user, password in passwords.items()
    )
