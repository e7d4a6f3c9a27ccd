"""What a process has open: a server that does not answer keeps nobody else waiting."""

import socket
import threading
from pathlib import Path

import pytest

from perdure.checkpointers import SQLiteCheckpointer
from perdure.checkpointers.postgres import PostgresCheckpointer
from perdure.errors import StorageError


def test_a_server_that_does_not_answer_keeps_no_file_waiting(tmp_path: Path) -> None:
    """A file is opened and closed while a connection to a server is waited for."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections, and says nothing
        dsn = f"postgresql://postgres@127.0.0.1:{silent.getsockname()[1]}/x"
        saver = PostgresCheckpointer(dsn, timeout_s=60)
        refused: list[BaseException] = []

        def opening() -> None:
            with pytest.raises(StorageError) as error:
                saver.database.connect()
            refused.append(error.value)

        thread = threading.Thread(target=opening, daemon=True)
        thread.start()
        connection, _ = silent.accept()  # it is at it

        opened = threading.Thread(target=lambda: SQLiteCheckpointer.open(tmp_path / "x.db").close())
        opened.start()
        opened.join(30)
        assert not opened.is_alive()
        assert thread.is_alive()

        connection.close()
        silent.close()
        thread.join(60)
        assert len(refused) == 1
