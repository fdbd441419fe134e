"""The real server, with the simulation's clock.

Commands are executed as they are, on one real connection per simulated connection, except for what depends
on the server's clock: ids of new entries, TIME, and the idle times that XAUTOCLAIM looks at. A blocking read
is sent without BLOCK and waits in virtual time (`network.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import hiredis
import redis
from redis.exceptions import RedisError

from leeway_simulation.patches import WALL_S
from leeway_simulation.scheduler import Process, Signal, Simulation

Command = tuple[Any, ...]
"""Its name, in upper case, and its arguments."""
Unit = list[Command]
"""Commands that a client sends in one go."""
Executed = Callable[[Process, Unit, list[Any]], None]
"""Told about every unit that was executed, with its replies."""
FAR_MS = 10**9
ANSWERS = {
    "INFO": b"# Memory\r\nused_memory:1000000\r\nmaxmemory:0\r\n",
}


def target(command: Command) -> tuple[str, str]:
    """Name and first argument of a command: XADD and the stream."""
    return command[0], text(command[1]) if len(command) > 1 else ""


def text(part: Any) -> str:
    """A part of a command as text."""
    return part.decode(errors="replace") if isinstance(part, bytes) else str(part)


class Session:
    """One connection to the real server; `watching`: it must not be given to another client as it is."""

    def __init__(self, url: str) -> None:
        self.client = redis.Redis.from_url(url, socket_timeout=60)
        self.connection: Any = self.client.connection_pool.get_connection()
        self.watching = False

    def execute(self, unit: Unit) -> list[Any]:
        """The replies, errors among them."""
        # Packed as redis-py would, one write for all.
        packed = b"".join(hiredis.pack_command(tuple(map(_plain, command))) for command in unit)
        self.connection.send_packed_command([packed], check_health=False)
        replies = []
        for _ in unit:
            try:
                replies.append(self.connection.read_response())
            except RedisError as error:
                replies.append(error)
        return replies


class Server:
    """The server of one simulation after the other; `begin` empties it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._free: list[Session] = []
        self.admin = Session(url)

    def begin(self, simulation: Simulation, executed: Executed) -> None:
        """Empty the server for a new history."""
        self.simulation, self._executed = simulation, executed
        self.written: dict[str, Signal] = defaultdict(Signal)
        """Wakes who waits for new entries of a stream."""
        self.offset_s = 0.0
        """How far the server's clock is off; a failover may lead to one that goes wrong."""
        self._newest_ms = 0
        self._delivered: dict[tuple[str, str], dict[bytes, float]] = {}
        self.admin.execute([("FLUSHALL",)])

    # -- connections -------------------------------------------------------------------------------------

    def open(self) -> Session:
        """A session that nobody else uses."""
        return self._free.pop() if self._free else Session(self.url)

    def close(self, session: Session) -> None:
        """The client is gone, and what it watched with it."""
        if session.watching:
            session.execute([("UNWATCH",)])
            session.watching = False
        self._free.append(session)

    # -- execution ---------------------------------------------------------------------------------------

    def execute(self, process: Process, session: Session, unit: Unit) -> list[Any]:
        """Execute a unit now, as the client `process`."""
        self._set_idle_times(unit)
        replies = session.execute([self._with_clock(command) for command in unit])
        if unit[0][0] == "WATCH":
            session.watching = True
        elif unit[-1][0] in ("EXEC", "UNWATCH", "DISCARD"):
            session.watching = False
        for at, command in enumerate(unit):
            name = command[0]
            if name in ("TIME", "INFO", "SCAN"):
                replies[at] = self._answer(name, replies[at])
            elif name in ("XREADGROUP", "XCLAIM", "XAUTOCLAIM"):
                self._note_delivery(command, _final(unit, replies, at))
            elif name == "XADD" and (waiting := self.written.get(text(command[1]))) is not None:
                self.simulation.wake(waiting)
        self._executed(process, unit, replies)
        return replies

    def now(self) -> float:
        """Unix time of the server's clock."""
        return WALL_S + self.simulation.now + self.offset_s

    def _with_clock(self, command: Command) -> Command:
        name = command[0]
        if name == "XADD":
            at = _id_place(command)
            if command[at] in ("*", b"*"):
                self._newest_ms = max(self._newest_ms, int(1000 * self.now()))
                return (*command[:at], f"{self._newest_ms}-*", *command[at + 1 :])
        if name == "SCAN":
            return (*command, "COUNT", "10000")
        return command

    def _answer(self, name: str, reply: Any) -> Any:
        if isinstance(reply, Exception):
            return reply
        if name == "TIME":
            seconds, rest = divmod(self.now(), 1)
            return [str(int(seconds)).encode(), str(int(1e6 * rest)).encode()]
        if name == "SCAN":  # in an order that a restart of the server does not change
            return [reply[0], sorted(reply[1])]
        return ANSWERS.get(name, reply)

    # -- idle times --------------------------------------------------------------------------------------

    def _note_delivery(self, command: Command, reply: Any) -> None:
        if not reply or isinstance(reply, Exception):
            return
        if command[0] == "XREADGROUP":
            for stream, entries in reply.items() if isinstance(reply, dict) else reply:
                self._deliver(text(stream), text(command[2]), [entry[0] for entry in entries])
        else:
            entries = reply if command[0] == "XCLAIM" else reply[1]
            ids = [entry if isinstance(entry, bytes) else entry[0] for entry in entries if entry]
            self._deliver(text(command[1]), text(command[2]), ids)

    def _deliver(self, stream: str, group: str, ids: Sequence[bytes]) -> None:
        known = self._delivered.setdefault((stream, group), {})
        known.update(dict.fromkeys(ids, self.simulation.now))

    def _set_idle_times(self, unit: Unit) -> None:
        """Before a look at idle times: what is idle in virtual time becomes so on the server."""
        for command in unit:
            least_s = _least_idle_s(command)
            if least_s is None:
                continue
            stream, group = text(command[1]), text(command[2])
            pending = self.admin.execute([("XPENDING", stream, group, "-", "+", 10000)])[0]
            if isinstance(pending, Exception) or not pending:
                continue
            known = self._delivered.get((stream, group), {})
            claims: Unit = []
            for entry_id, owner, _, _ in pending:
                idle = self.simulation.now - known.get(entry_id, 0.0) >= least_s
                idle_ms = FAR_MS if idle else 0
                claims.append(("XCLAIM", stream, group, owner, 0, entry_id, "IDLE", idle_ms, "JUSTID"))
            self.admin.execute(claims)

    # -- loss of data ------------------------------------------------------------------------------------

    def keys(self) -> list[bytes]:
        """All keys, sorted."""
        return sorted(self.admin.execute([("KEYS", "*")])[0])

    def lose(self, keys: Sequence[bytes]) -> None:
        """Delete keys behind everyone's back."""
        if keys:
            self.admin.execute([("DEL", *keys)])

    def snapshot(self) -> list[tuple[bytes, bytes]]:
        """What a replica has that stops to follow now."""
        keys = self.keys()
        dumps = self.admin.execute([("DUMP", key) for key in keys]) if keys else []
        return [(key, dump) for key, dump in zip(keys, dumps, strict=True) if dump]

    def restore(self, snapshot: Sequence[tuple[bytes, bytes]]) -> None:
        """The replica takes over: everything that was written since the snapshot is lost."""
        self.admin.execute([("FLUSHALL",), *(("RESTORE", key, 0, dump) for key, dump in snapshot)])


def _final(unit: Unit, replies: list[Any], at: int) -> Any:
    """The reply to a command of the unit; in a transaction, EXEC brings it."""
    if unit[0][0] != "MULTI" or not isinstance(replies[-1], list):
        return replies[at] if unit[0][0] != "MULTI" else None
    return replies[-1][at - 1]


def _least_idle_s(command: Command) -> float | None:
    """The idle time that a command asks for; None if it does not look at idle times."""
    if command[0] in ("XAUTOCLAIM", "XCLAIM"):
        return int(command[4]) / 1000 or None
    if command[0] == "XPENDING" and len(command) > 4 and text(command[3]).upper() == "IDLE":
        return int(command[4]) / 1000 or None
    return None


def _plain(value: Any) -> Any:
    """A value of a command as the encoder takes it."""
    return value if isinstance(value, str | bytes | int | float) else bytes(value)


def _id_place(command: Command) -> int:
    """Where in XADD the id is: after the key and a limit."""
    at = 2
    if text(command[at]).upper() == "MAXLEN":
        at += 3 if text(command[at + 1]) in ("~", "=") else 2
    return at
