"""A flipped bit anywhere in a file: an error that says so, or the answers of the undamaged file.

Each flip is made in a copy of the same file, at a place that a fixed seed draws; `PERDURE_FLIPS`
sets how many are tried. What has neither checksum nor second copy is not asked for: the times of a
thread, and the sizes that are counted from what is there (`ThreadInfo.items`, `size_bytes`).
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import StorageError, WrongKey
from tests.backends import KEY

FLIPS = int(os.environ.get("PERDURE_FLIPS", "1000"))
MISSED = 200  # of so many flips one may be missed: pages of SQLite itself have no checksum
THREADS = [f"thread {n}" for n in range(3)]
NAMESPACES = ["", "sub:1"]
Ask = Callable[[SQLiteCheckpointer], Any]


def at(thread_id: str, ns: str | None = None, uid: str | None = None) -> Any:
    named = {"thread_id": thread_id, "checkpoint_ns": ns, "checkpoint_id": uid}
    return {"configurable": {name: part for name, part in named.items() if part is not None}}


def uid_of(*place: object) -> str:
    """A checkpoint id that is the same each time."""
    digits = f"{random.Random(repr(place)).getrandbits(128):032x}"
    return "-".join([digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]])


def fill(saver: SQLiteCheckpointer) -> None:
    """Turns with parallel tasks in two namespaces of each thread, a fork, a head that was moved."""
    for thread_id in THREADS:
        for ns in NAMESPACES:
            said: list[Any] = []
            for step in range(5):
                person = HumanMessage(f"{step} asks in {thread_id}", id=f"h{step}")
                said += [person, AIMessage(f"{step} " + "words " * 20, id=f"a{step}")]
                put(saver, thread_id, ns, step, said)
    put(saver, THREADS[0], "", 5, said[:4], parent=2)
    saver.rewind(THREADS[1], uid_of(THREADS[1], "", 3))


def put(
    saver: SQLiteCheckpointer,
    thread_id: str,
    ns: str,
    step: int,
    said: list[Any],
    parent: int | None = None,
) -> None:
    """A checkpoint, and what its two tasks wrote."""
    before = step - 1 if parent is None else parent
    checkpoint: Any = {
        "v": 4,
        "id": uid_of(thread_id, ns, step),
        "ts": "2026-01-01T00:00:00+00:00",
        "channel_values": {"messages": list(said), "note": "n" * 200},
        "channel_versions": {"messages": step + 1, "note": 1},
        "versions_seen": {"node": {"messages": step}},
        "updated_channels": None,
    }
    metadata: Any = {"source": "loop" if step else "input", "step": step, "even": step % 2 == 0}
    base = at(thread_id, ns, uid_of(thread_id, ns, before) if step else None)
    config = saver.put(base, checkpoint, metadata, {"messages": step + 1, "note": 1})
    for task in range(2):
        saver.put_writes(config, [("messages", f"of {task}"), ("x", step)], f"task {task}", "~")


def questions() -> dict[str, Ask]:
    """What a file can be asked through the public methods, by name."""
    out: dict[str, Ask] = {
        "threads": lambda s: [(t.thread_id, t.checkpoints, t.namespaces) for t in s.threads()],
        "prefix": lambda s: [t.thread_id for t in s.threads(prefix="thread ")],
        "list": lambda s: list(s.list(None)),
        "even": lambda s: list(s.list(None, filter={"even": True})),
        "input": lambda s: list(s.list(None, filter={"source": "input"})),
    }
    for thread_id in THREADS:
        out |= of_thread(thread_id)
        for ns in NAMESPACES:
            out |= of_namespace(thread_id, ns)
            for step in (0, 4):
                out |= of_checkpoint(thread_id, at(thread_id, ns, uid_of(thread_id, ns, step)))
    return out


def of_thread(t: str) -> dict[str, Ask]:
    return {
        f"checkpoints of {t}": lambda s: s.checkpoints(t),
        f"even of {t}": lambda s: list(s.list(at(t), filter={"even": True})),
    }


def of_namespace(t: str, ns: str) -> dict[str, Ask]:
    return {
        f"head {t} {ns}": lambda s: s.get_tuple(at(t, ns)),
        f"history {t} {ns}": lambda s: s.history(t, checkpoint_ns=ns),
    }


def of_checkpoint(t: str, one: Any) -> dict[str, Ask]:
    return {
        f"get {one}": lambda s: s.get_tuple(one),
        f"before {one}": lambda s: list(s.list(at(t), before=one, limit=2)),
    }


def asked(path: Path, **options: Any) -> dict[str, Any]:
    """The answer to each question as text, or the error that came instead."""
    out: dict[str, Any] = {}
    try:
        saver = SQLiteCheckpointer.open(path, **options)
    except Exception as exc:
        return dict.fromkeys(questions(), exc)
    with saver:
        for name, ask in questions().items():
            try:
                out[name] = repr(ask(saver))
            except Exception as exc:
                out[name] = exc
    return out


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"key": KEY}], ids=["plain", "sealed"])
def test_a_flipped_bit(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No answer of a damaged file differs from that of the whole one, and no error is untyped."""
    chance = random.Random("a flipped bit")
    path, damaged = tmp_path / "x.db", tmp_path / "damaged.db"
    with monkeypatch.context() as patched:  # the same bytes each time
        clock = iter(range(1_700_000_000, 1_800_000_000))
        patched.setattr(time, "time", lambda: next(clock) + 0.25)
        patched.setattr(os, "urandom", chance.randbytes)
        with SQLiteCheckpointer.open(path, **options) as saver:
            fill(saver)
    whole = path.read_bytes()
    expected = asked(path, **options)
    assert not [error for error in expected.values() if isinstance(error, Exception)]

    noticed, missed = 0, []
    for _ in range(FLIPS):
        bit = chance.randrange(len(whole) * 8)
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        for left in tmp_path.glob("damaged.db*"):
            left.unlink()
        damaged.write_bytes(flipped)
        found = asked(damaged, **options)
        other = {name: found[name] for name in found if found[name] != expected[name]}
        noticed += bool(other)
        wrong = [n for n, e in other.items() if not isinstance(e, StorageError | WrongKey)]
        if wrong:
            missed.append((bit, wrong))

    assert noticed > FLIPS // 10
    assert len(missed) <= FLIPS // MISSED, missed
