"""Standard output and error that never fail or block a run: the terminal or the reader of a pipe may go away.

A run takes hours and must not end, or wait, because of who reads what it prints.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
import time
from typing import BinaryIO, cast

WAIT_S = 5.0
"""How long a write waits for a reader that does not read (a full pipe, a terminal stopped by Ctrl-S)."""
GONE = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO, errno.ECONNRESET)
"""Errors of a pipe without a reader and of a terminal that has been closed: nobody will read again."""
CHUNK = select.PIPE_BUF
"""A pipe that polls as writable takes this many bytes without blocking."""


class LastingRaw(io.RawIOBase):
    """Writes to a file descriptor; what cannot be written is dropped.

    Once nobody can read it any more, the descriptor is pointed at /dev/null. A reader that does not read
    costs `wait_s` once; further output is dropped until it reads again.
    """

    def __init__(self, descriptor: int, wait_s: float = WAIT_S) -> None:
        self.descriptor, self.wait_s = descriptor, wait_s
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._stuck = False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.descriptor

    def isatty(self) -> bool:
        return os.isatty(self.descriptor)

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        """Write or drop `data`; always reports all of it as written."""
        left = memoryview(data).cast("B")
        deadline = time.monotonic() + (0.0 if self._stuck else self.wait_s)
        try:
            while left:
                ready = self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
                self._stuck = not ready
                if self._stuck:
                    break
                try:
                    left = left[os.write(self.descriptor, left[:CHUNK]) :]
                except BlockingIOError:  # non-blocking, because another process of the terminal made it so
                    self._stuck = time.monotonic() > deadline
                    if self._stuck:
                        break
                    time.sleep(0.01)
        except OSError as error:  # any other, such as a full disk, may pass
            if error.errno in GONE:
                self._discard()
        return len(memoryview(data).cast("B"))

    def _discard(self) -> None:
        """Child processes and the interpreter's last flush write to /dev/null from now on."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.descriptor)
        os.close(null)


def open_standard_files() -> None:
    """Open /dev/null in place of a standard file that is closed, and escape what the locale cannot encode.

    Otherwise the next file that is opened (a lock, a log) would become standard output, and prints would go
    there.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor, which is this one
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(descriptor, "w", encoding="utf-8", closefd=False))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def keep_output() -> None:
    """From now on, printing neither fails nor blocks; see LastingRaw. For commands that run long."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper) or isinstance(_raw(stream), LastingRaw):
            continue  # replaced by a test or an embedding program
        try:
            descriptor = stream.fileno()
        except (OSError, ValueError):
            continue
        stream.flush()
        raw = LastingRaw(descriptor)
        lasting = io.TextIOWrapper(
            cast(BinaryIO, io.BufferedWriter(cast(io.RawIOBase, raw))),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=True,
        )
        setattr(sys, name, lasting)


def _raw(stream: io.TextIOWrapper) -> object:
    return getattr(stream.buffer, "raw", None)
