"""What is between a service and the server: connections on which everything can go wrong.

    a unit of commands -> [the faults planned for this call] -> Server.execute -> [again] -> replies

`SimulatedConnection` takes the place of redis-py's connection class. Clients, pools, pipelines and retries
are those of redis-py, as the services configure them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from enum import Enum
from typing import Any

import redis
from redis._parsers.base import BaseParser
from redis.exceptions import ExecAbortError, RedisError

from leeway_simulation.scheduler import Killed, Process, Simulation
from leeway_simulation.server import Command, Server, Session, Unit, text

LATENCY_S = 0.002
SLOW_CALLS = 0.05
"""Share of calls that take up to SLOW_S."""
SLOW_S = 0.3
FLAPS = 0.3
WRITES = {"XADD", "HSET", "HINCRBY", "HSETNX", "HDEL", "XACK", "XDEL", "EXEC", "UNLINK", "XGROUP", "XCLAIM"}

REPEATABLE = (WRITES | {"MULTI"}) - {"XGROUP", "HINCRBY", "HSETNX"}


class Fate(Enum):
    """What becomes of one call."""

    LOST_REQUEST = "lost request"
    """It never arrives, and the connection is closed."""
    LOST_REPLY = "lost reply"
    """It is executed, and the connection is closed."""
    HALF_SENT = "half sent"
    """A pipeline of which only the first commands arrive. A transaction that lacks its EXEC has no effect."""
    DUPLICATE = "duplicate"
    """It is executed twice, if it is a write; a read or a transaction that watches loses its reply."""
    DELAYED = "delayed"
    """It is executed after the client has given up and gone on; see `seconds`."""
    DELAYED_REPLY = "delayed reply"
    """It is executed, and the client has given up when the reply comes."""


class Network:
    """The network of one history. `before` and `after` are called around each call with its number."""

    def __init__(self, simulation: Simulation, server: Server) -> None:
        self.simulation, self.server = simulation, server
        self.calls = 0
        self.before: Callable[[int, Process, Unit], tuple[Fate, float] | None] = lambda *call: None
        self.after: Callable[[int, Process], None] = lambda number, process: None
        self.cut: dict[str, float] = {}
        """Names of processes -> virtual time until which they do not reach the server; "*": nobody does."""
        self.flaps: dict[str, float] = {}
        """Names of processes -> virtual time until which FLAPS of their calls are lost."""
        self.refusal: tuple[float, str] = (0.0, "")
        """Until when the server answers every write with this error."""
        self.connections: list[SimulatedConnection] = []
        self.happened: Counter[str] = Counter()

    def reaches(self, process: Process) -> bool:
        """Whether `process` reaches the server now."""
        until = max(self.cut.get(process.name, 0.0), self.cut.get("*", 0.0))
        return self.simulation.now >= until

    def close_all(self) -> None:
        """The server closes every connection."""
        for connection in self.connections:
            connection.broken = True

    def call(self, connection: SimulatedConnection, unit: Unit) -> list[Any]:
        """The replies to a unit. Raises redis.ConnectionError, redis.TimeoutError and Killed."""
        process, simulation = connection.process, self.simulation
        self.calls += 1
        fault = self.before(self.calls, process, unit)
        slow = simulation.rng.random() < SLOW_CALLS
        simulation.sleep(simulation.rng.random() * (SLOW_S if slow else LATENCY_S))
        if connection.broken:
            raise redis.ConnectionError("Connection closed by server.")
        if not self.reaches(process):
            simulation.sleep(connection.timeout_s)
            raise redis.TimeoutError("Timeout reading from socket")
        if fault is None and simulation.now < self.flaps.get(process.name, 0.0):
            fault = self._flap()
        replies = self._deliver(connection, unit, fault)
        self.after(self.calls, process)
        if process.dead:
            raise Killed(str(process))
        return replies

    def _flap(self) -> tuple[Fate, float] | None:
        if self.simulation.rng.random() >= FLAPS:
            return None
        return (Fate.LOST_REPLY if self.simulation.rng.random() < 0.5 else Fate.LOST_REQUEST), 0.0

    def _deliver(
        self, connection: SimulatedConnection, unit: Unit, fault: tuple[Fate, float] | None
    ) -> list[Any]:
        process, server, session = connection.process, self.server, connection.session
        fate, seconds = fault if fault is not None else (None, 0.0)
        refused = self._refused(unit)
        if refused is not None:
            return refused
        match fate:
            case None:
                return self._execute(process, session, unit)
            case Fate.LOST_REQUEST:
                raise redis.ConnectionError("Connection reset by peer")
            case Fate.HALF_SENT:
                if unit[0][0] == "MULTI":
                    raise redis.ConnectionError("Connection reset by peer")
                server.execute(process, session, unit[: max(1, len(unit) // 2)])
                raise redis.ConnectionError("Broken pipe")
            case Fate.LOST_REPLY:
                self._execute(process, session, unit)
                raise redis.ConnectionError("Connection reset by peer")
            case Fate.DUPLICATE:
                replies = self._execute(process, session, unit)
                if session.watching or not {command[0] for command in unit} <= REPEATABLE:
                    raise redis.ConnectionError("Connection reset by peer")
                return self._execute(process, session, unit) and replies
            case Fate.DELAYED_REPLY:
                self._execute(process, session, unit)
                self.simulation.sleep(connection.timeout_s)
                raise redis.TimeoutError("Timeout reading from socket")
            case Fate.DELAYED:
                connection.session = server.open()  # the old one belongs to what is under way
                late = without_block(unit)[0]
                self.simulation.at(
                    self.simulation.now + seconds, lambda: self._arrive(process, session, late)
                )
                self.simulation.sleep(connection.timeout_s)
                raise redis.TimeoutError("Timeout reading from socket")

    def _arrive(self, process: Process, session: Session, unit: Unit) -> None:
        """A request that its sender has given up, perhaps long ago."""
        self.server.execute(process, session, unit)
        self.server.close(session)

    def _refused(self, unit: Unit) -> list[Any] | None:
        """The answer of a server that cannot write now: it is full, or has become a replica."""
        until, error = self.refusal
        names = [command[0] for command in unit]
        if self.simulation.now >= until or not WRITES & set(names):
            return None
        answer: list[Any] = [parse_error(error) for _ in unit]
        if names[0] == "MULTI":
            answer[0], answer[-1] = b"OK", ExecAbortError("Transaction discarded because of previous errors.")
        return answer

    def _execute(self, process: Process, session: Session, unit: Unit) -> list[Any]:
        """Execute a unit; a blocking read waits in virtual time."""
        plain, block_s = without_block(unit)
        if block_s is None:
            return self.server.execute(process, session, plain)
        stream = text(plain[0][-2])
        deadline = self.simulation.now + block_s
        while True:
            replies = self.server.execute(process, session, plain)
            left = deadline - self.simulation.now
            if replies[0] or left <= 0:
                return replies
            self.simulation.wait(left, self.server.written[stream])
            if not self.reaches(process):
                self.simulation.sleep(1.0)
                raise redis.TimeoutError("Timeout reading from socket")


def without_block(unit: Unit) -> tuple[Unit, float | None]:
    """The unit without BLOCK, and the seconds it may block; None: it does not."""
    if len(unit) != 1 or unit[0][0] not in ("XREAD", "XREADGROUP"):
        return unit, None
    command: Command = unit[0]
    for at, part in enumerate(command):
        if text(part).upper() == "BLOCK":
            return [(*command[:at], *command[at + 2 :])], float(command[at + 1]) / 1000
        if text(part).upper() == "STREAMS":
            break
    return unit, None


def parse_error(message: str) -> RedisError:
    """The exception that redis-py makes of an error reply."""
    parser: Any = BaseParser
    found: RedisError = parser.parse_error(message)
    return found


class SimulatedConnection(redis.UnixDomainSocketConnection):
    """A connection of redis-py whose other end is the simulation's network."""

    network: Network
    """Set for each history."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.process = self.network.simulation.process
        self.timeout_s = float(self.socket_timeout or 5.0)
        self.opened = False
        self.broken = False
        self.session: Session
        self._replies: deque[Any] = deque()
        self.network.connections.append(self)

    @property
    def is_connected(self) -> bool:
        return self.opened

    def connect(self) -> None:
        if self.opened:
            return
        if self.process.dead:
            raise Killed(str(self.process))
        if not self.network.reaches(self.process):
            self.network.simulation.sleep(self.timeout_s)
            raise redis.ConnectionError("Error 110 connecting: timed out.")
        self.session = self.network.server.open()
        self.opened, self.broken = True, False
        self._heard()  # the handshake was answered

    def _heard(self) -> None:
        due = self.network.simulation.now + self.health_check_interval
        self.next_health_check = due  # type: ignore[assignment]

    def disconnect(self, *args: Any, **kwargs: Any) -> None:
        self._replies.clear()
        if self.opened:
            self.opened = False
            self.network.server.close(self.session)

    def can_read(self, timeout: float = 0) -> bool:
        return False

    def pack_command(self, *args: Any) -> Any:
        return [_split(args)]

    def pack_commands(self, commands: Any) -> Any:
        return [_split(command) for command in commands]

    def send_command(self, *args: Any, **kwargs: Any) -> None:
        self.send_packed_command([_split(args)], check_health=kwargs.get("check_health", True))

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        self.connect()
        if check_health:
            self.check_health()  # type: ignore[no-untyped-call]
        self._replies.extend(self.network.call(self, command))

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        if self.process.dead:
            raise Killed(str(self.process))
        if not self._replies:
            raise redis.ConnectionError("Connection closed by server.")
        reply = self._replies.popleft()
        self._heard()
        if isinstance(reply, RedisError):
            raise reply
        return reply


def _split(command: Any) -> Command:
    """`XGROUP CREATE` is two words on the wire."""
    first, *rest = command
    return (*text(first).upper().split(), *rest)
