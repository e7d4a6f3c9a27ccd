"""Databases that are shared within a process do not wait for each other's connections."""

import socket
import threading
from pathlib import Path

import pytest

from perdure.checkpointers import SQLiteCheckpointer
from perdure.checkpointers.postgres import PostgresCheckpointer
from perdure.errors import StorageError


def test_file_can_be_opened_while_a_server_does_not_answer(tmp_path: Path) -> None:
    """Another thread waits for a connection to the server meanwhile."""
    with socket.create_server(
        ("127.0.0.1", 0)
    ) as silent_server:  # it accepts connections and sends nothing
        dsn = f"postgresql://postgres@127.0.0.1:{silent_server.getsockname()[1]}/x"
        saver = PostgresCheckpointer(dsn, timeout_s=60)
        errors: list[BaseException] = []

        def open_saver() -> None:
            with pytest.raises(StorageError) as error:
                saver.database.connect()
            errors.append(error.value)

        thread = threading.Thread(target=open_saver, daemon=True)
        thread.start()
        connection, _ = silent_server.accept()  # the thread is connecting

        file_thread = threading.Thread(
            target=lambda: SQLiteCheckpointer.open(tmp_path / "x.db").close()
        )
        file_thread.start()
        file_thread.join(30)
        assert not file_thread.is_alive()
        assert thread.is_alive()

        connection.close()
        silent_server.close()
        thread.join(60)
        assert len(errors) == 1
