"""A proxy in front of Postgres that cuts a connection at the N-th message of a client."""

from __future__ import annotations

import contextlib
import socket
import struct
import tempfile
import threading
from pathlib import Path
from typing import Any

from psycopg.conninfo import conninfo_to_dict, make_conninfo


class CuttingProxy:
    """Forwards messages of clients to the server, and cuts a connection on request."""

    def __init__(self, dsn: str) -> None:
        parts: dict[str, Any] = conninfo_to_dict(dsn)
        port = parts.get("port") or "5432"
        self._server_socket_path = f"{parts['host']}/.s.PGSQL.{port}"
        self._folder = tempfile.TemporaryDirectory(prefix="cut")
        parts["host"] = self._folder.name
        self.dsn = make_conninfo(**parts)
        self.messages = 0
        self.cuts = 0
        self._remaining: int | None = None
        self._delivers = True
        self._lock = threading.Lock()
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(Path(self._folder.name) / f".s.PGSQL.{port}"))
        self._listening.listen(50)
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_at(self, number: int | None, *, delivered: bool = True) -> None:
        """Cut the connection that sends the `number`-th message from now on, or none if it is None.

        The server receives that message only if `delivered` is true. The client never receives the
        answer.
        """
        with self._lock:
            self._remaining, self._delivers = number, delivered

    def close(self) -> None:
        """Accept no more connections."""
        self._listening.close()
        self._folder.cleanup()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._server_socket_path)
            threading.Thread(
                target=self._forward_answers, args=(server, client), daemon=True
            ).start()
            threading.Thread(
                target=self._forward_requests, args=(client, server), daemon=True
            ).start()

    def _forward_answers(self, server: socket.socket, client: socket.socket) -> None:
        try:
            while data := server.recv(1 << 16):
                client.sendall(data)
        except OSError:
            pass
        _shut_down(client, server)

    def _forward_requests(self, client: socket.socket, server: socket.socket) -> None:
        """Forward message by message.

        The first message, a start or a request for TLS, has no type.
        """
        started = False
        try:
            while True:
                head = _receive_exactly(client, 5 if started else 4)
                (size,) = struct.unpack("!i", head[-4:])
                body = _receive_exactly(client, size - 4)
                cut, delivers = self._count_message() if started else (False, True)
                if not cut or delivers:
                    server.sendall(head + body)
                if cut:
                    break
                started = started or size != 8 or body[:2] != b"\x04\xd2"
        except (OSError, EOFError):
            pass
        _shut_down(client)
        _shut_down(server)

    def _count_message(self) -> tuple[bool, bool]:
        with self._lock:
            self.messages += 1
            if self._remaining is None:
                return False, True
            self._remaining -= 1
            if self._remaining:
                return False, True
            self._remaining = None
            self.cuts += 1
            return True, self._delivers


def _receive_exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _shut_down(*socks: socket.socket) -> None:
    for sock in socks:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()
