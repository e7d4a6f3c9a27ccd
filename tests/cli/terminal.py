"""A function that runs the program on a terminal."""

from __future__ import annotations

import os
import re
import tty
from contextlib import ExitStack
from threading import Thread

import pytest

from perdure.cli import main
from perdure.cli.output import get_console

COLOR = re.compile(r"\x1b\[[\d;]*m")


def run_on_terminal(
    monkeypatch: pytest.MonkeyPatch, *arguments: str, stdin: str = "", color: bool = False
) -> str:
    """Run the program on a terminal, and return what it prints to stdout and stderr.

    Args:
        monkeypatch: Replaces the standard streams by the terminal.
        arguments: The arguments of the command line.
        stdin: The text that a user types afterwards.
        color: Whether colour codes are kept in the returned text.
    """
    controller, terminal = os.openpty()
    tty.setraw(terminal)  # newlines come as they are sent
    output = bytearray()
    reader = Thread(target=_read_until_closed, args=(controller, output))
    reader.start()
    os.write(controller, stdin.encode())
    with ExitStack() as stack, monkeypatch.context() as patched:
        stack.callback(get_console.cache_clear)
        patched.setattr("sys.argv", ["perdure", *arguments])
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            stream = stack.enter_context(
                open(os.dup(terminal), mode, encoding="utf-8", buffering=1)
            )
            patched.setattr(f"sys.{name}", stream)
        os.close(terminal)
        get_console.cache_clear()
        with pytest.raises(SystemExit):
            main()
    reader.join()
    os.close(controller)
    text = output.decode().removeprefix(stdin)
    return text if color else COLOR.sub("", text)


def _read_until_closed(controller: int, output: bytearray) -> None:
    try:
        while chunk := os.read(controller, 1 << 16):
            output.extend(chunk)
    except OSError:  # how a terminal ends on Linux
        return
