"""A TCP proxy that passes on at most so many bytes per second from a server to its clients."""

from __future__ import annotations

import socket
import threading
import time

BLOCK = 16 << 10


class SlowLink:
    """Listens on `port` and connects to `target_port` on this machine. `bytes_per_s` may be changed."""

    def __init__(self, target_port: int, bytes_per_s: float) -> None:
        self.target_port, self.bytes_per_s = target_port, bytes_per_s
        self.passed = 0
        """Bytes that went to clients."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break all connections; new ones are accepted."""
        for each in self._sockets:
            with_shutdown(each)
        self._sockets.clear()

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self.target_port))
            except OSError:
                return
            self._sockets += [client, server]
            threading.Thread(target=self._pass, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, True), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, slowly: bool) -> None:
        try:
            while data := source.recv(BLOCK):
                if slowly and len(data) > 1000:  # answers to small commands pass at once
                    time.sleep(len(data) / self.bytes_per_s)
                    self.passed += len(data)
                sink.sendall(data)
        except OSError:
            pass
        with_shutdown(sink)


def with_shutdown(each: socket.socket) -> None:
    try:
        each.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
