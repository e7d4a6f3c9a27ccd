"""Running the program on a terminal."""

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


def on_terminal(
    monkeypatch: pytest.MonkeyPatch, *arguments: str, typed: str = "", color: bool = False
) -> str:
    """What the program sends to a terminal, results and notes alike.

    Args:
        monkeypatch: Puts the terminal in the place of the standard streams.
        arguments: As they are typed.
        typed: What somebody types then.
        color: Whether the colours are left in it.
    """
    above, below = os.openpty()
    tty.setraw(below)  # newlines come as they are sent
    got = bytearray()
    reader = Thread(target=_drain, args=(above, got))
    reader.start()
    os.write(above, typed.encode())
    with ExitStack() as stack, monkeypatch.context() as patched:
        stack.callback(get_console.cache_clear)
        patched.setattr("sys.argv", ["perdure", *arguments])
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            stream = stack.enter_context(open(os.dup(below), mode, encoding="utf-8", buffering=1))
            patched.setattr(f"sys.{name}", stream)
        os.close(below)
        get_console.cache_clear()
        with pytest.raises(SystemExit):
            main()
    reader.join()
    os.close(above)
    shown = got.decode().removeprefix(typed)
    return shown if color else COLOR.sub("", shown)


def _drain(above: int, got: bytearray) -> None:
    try:
        while part := os.read(above, 1 << 16):
            got.extend(part)
    except OSError:  # how a terminal ends on Linux
        return
