"""A proxy before Postgres that cuts a connection at the N-th message of the client."""

from __future__ import annotations

import contextlib
import socket
import struct
import tempfile
import threading
from pathlib import Path
from typing import Any

from psycopg.conninfo import conninfo_to_dict, make_conninfo


class Proxy:
    """Hands on what clients say, until told to cut.

    `cut_at(n, answered)` cuts at the n-th message from now on: before the server hears it, or, with
    `answered=False`, once the server has it and before the client hears anything more.
    """

    def __init__(self, dsn: str) -> None:
        parts: dict[str, Any] = conninfo_to_dict(dsn)
        port = parts.get("port") or "5432"
        self._to = f"{parts['host']}/.s.PGSQL.{port}"
        self._folder = tempfile.TemporaryDirectory(prefix="cut")
        parts["host"] = self._folder.name
        self.dsn = make_conninfo(**parts)
        self.messages = 0
        self.cuts = 0
        self._left: int | None = None
        self._hear = True
        self._lock = threading.Lock()
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(Path(self._folder.name) / f".s.PGSQL.{port}"))
        self._listening.listen(50)
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_at(self, number: int | None, *, heard: bool = True) -> None:
        """Cut the connection that says the n-th message from now on; None: none."""
        with self._lock:
            self._left, self._hear = number, heard

    def close(self) -> None:
        """Accept no more."""
        self._listening.close()
        self._folder.cleanup()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._to)
            threading.Thread(target=self._answers, args=(server, client), daemon=True).start()
            threading.Thread(target=self._asked, args=(client, server), daemon=True).start()

    def _answers(self, server: socket.socket, client: socket.socket) -> None:
        try:
            while data := server.recv(1 << 16):
                client.sendall(data)
        except OSError:
            pass
        _shut(client, server)

    def _asked(self, client: socket.socket, server: socket.socket) -> None:
        """Hand on message by message; the first has no type (a start, or a request for TLS)."""
        begun = False
        try:
            while True:
                head = _exactly(client, 5 if begun else 4)
                (size,) = struct.unpack("!i", head[-4:])
                body = _exactly(client, size - 4)
                cut, hear = self._count() if begun else (False, True)
                if not cut or hear:
                    server.sendall(head + body)
                if cut:
                    break
                begun = begun or size != 8 or body[:2] != b"\x04\xd2"
        except (OSError, EOFError):
            pass
        _shut(client)
        _shut(server)

    def _count(self) -> tuple[bool, bool]:
        with self._lock:
            self.messages += 1
            if self._left is None:
                return False, True
            self._left -= 1
            if self._left:
                return False, True
            self._left = None
            self.cuts += 1
            return True, self._hear


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _shut(*socks: socket.socket) -> None:
    for sock in socks:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()
