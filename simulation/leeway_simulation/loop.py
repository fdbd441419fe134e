"""The sampler's event loop in virtual time: where it would wait for sockets, it gives its turn away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any

from leeway_simulation.scheduler import Killed, Process, Signal, Simulation

_numbers = count()


def count_from_zero() -> None:
    """Number tasks from 0 again, so that a history does not depend on those before it."""
    global _numbers
    _numbers = count()


class _Numbered:
    """Sets of tasks are walked in the same order in every replay: by number, not by address."""

    _number: int

    def __hash__(self) -> int:
        return self._number


class NumberedFuture(_Numbered, asyncio.Future):  # type: ignore[type-arg]
    """A future with a number."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = next(_numbers)
        super().__init__(*args, **kwargs)


class NumberedTask(_Numbered, asyncio.Task):  # type: ignore[type-arg]
    """A task with a number."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = next(_numbers)
        super().__init__(*args, **kwargs)


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop of one process. `asyncio.to_thread` runs on actors of the same process."""

    def __init__(self, simulation: Simulation, process: Process) -> None:
        super().__init__()
        self._simulation, self._process = simulation, process
        self._woken = Signal()
        self._wake_up = False
        self._selector: Any = self  # what BaseEventLoop waits with
        self.set_task_factory(_task)  # type: ignore[arg-type]  # it names arguments that vary by version
        self.set_exception_handler(lambda loop, context: None)

    def time(self) -> float:
        return self._simulation.now

    def create_future(self) -> Any:
        return NumberedFuture(loop=self)

    def select(self, timeout: float | None) -> list[Any]:
        """Wait until a callback is due or another actor has scheduled one."""
        if timeout != 0 and not self._wake_up:
            self._simulation.wait(timeout, self._woken)
        elif self._process.dead:
            raise Killed(str(self._process))
        self._wake_up = False
        return []

    def _process_events(self, events: list[Any]) -> None:
        return

    def _write_to_self(self) -> None:
        self._wake_up = True
        self._simulation.wake(self._woken)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> Any:
        future = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except Killed:
                raise
            except BaseException as error:  # noqa: BLE001 (as an executor does)
                self._answer(future, future.set_exception, error)
            else:
                self._answer(future, future.set_result, result)

        self._simulation.start(self._process, work)
        return future

    def _answer(self, future: Any, setter: Callable[[Any], None], value: Any) -> None:
        def settle() -> None:
            if not future.done():
                setter(value)

        if not self.is_closed():
            self.call_soon_threadsafe(settle)


def _task(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any) -> Any:
    return NumberedTask(work, loop=loop, **options)


def run_async(simulation: Simulation, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine to its end on a loop of the process that has the turn."""
    loop = VirtualLoop(simulation, simulation.process)
    try:
        loop.run_until_complete(work())
    finally:
        loop._ready.clear()  # type: ignore[attr-defined]  # what is left belongs to a process that has ended
        loop._scheduled.clear()  # type: ignore[attr-defined]
        loop.close()
