"""A PgBouncer in front of the tests' server, in transaction mode, if PgBouncer is installed."""

from __future__ import annotations

import os
import pwd
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.programs import PGBOUNCER

_PORT = 6432


class PgBouncer:
    """A PgBouncer with few connections to a server.

    Args:
        dsn: Of the server.
        folder: Of its own.
        size: How many connections to the server it may have.
    """

    def __init__(self, dsn: str, folder: Path, size: int = 3) -> None:
        parts = conninfo_to_dict(dsn)
        self.dsn = make_conninfo(dsn, host=str(folder), port=_PORT)
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        host, port = parts["host"], parts.get("port", 5432)
        (folder / "pgbouncer.ini").write_text(
            f"[databases]\n{parts['dbname']} = host={host} port={port} user={parts['user']}\n"
            "[pgbouncer]\nlisten_addr =\nauth_type = any\npool_mode = transaction\n"
            f"listen_port = {_PORT}\nunix_socket_dir = {folder}\ndefault_pool_size = {size}\n"
            "server_login_retry = 1\n"
        )
        self.start()

    def start(self) -> None:
        """Start the process, and wait until it listens."""
        user = None
        if os.geteuid() == 0:  # it refuses to be root; the server of the tests makes this account
            user = "pgserver"
            account = pwd.getpwnam(user)
            os.chown(self._folder, account.pw_uid, account.pw_gid)
        self._process = subprocess.Popen(
            [PGBOUNCER.path(), "-q", str(self._folder / "pgbouncer.ini")],
            user=user,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(200):
            with suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(self._folder / f".s.PGSQL.{_PORT}"))
                return
            time.sleep(0.02)
        raise TimeoutError("PgBouncer does not listen")

    def kill(self) -> None:
        """Kill the process, which cuts all connections through it."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        for socket_name in (f".s.PGSQL.{_PORT}", f".s.PGSQL.{_PORT}.lock"):
            (self._folder / socket_name).unlink(missing_ok=True)
