"""A flipped bit anywhere in a file causes an error, or the results are those of the undamaged file.

Each flip is made in a copy of the same file, at a place that a fixed seed draws; `PERDURE_FLIPS`
sets how many are tried. Values that have neither a checksum nor a second copy are not compared: the
times of a thread, and the sizes that are counted from its rows (`ThreadInfo.items`, `size_bytes`).
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
FLIPS_PER_MISS = (
    200  # one of so many flips may remain unnoticed, because pages of SQLite have no checksum
)
THREADS = [f"thread {n}" for n in range(3)]
NAMESPACES = ["", "sub:1"]
Query = Callable[[SQLiteCheckpointer], Any]


def make_config(thread_id: str, ns: str | None = None, uid: str | None = None) -> Any:
    named = {"thread_id": thread_id, "checkpoint_ns": ns, "checkpoint_id": uid}
    return {"configurable": {name: part for name, part in named.items() if part is not None}}


def make_checkpoint_id(*place: object) -> str:
    """Return a checkpoint id that is the same in each run."""
    digits = f"{random.Random(repr(place)).getrandbits(128):032x}"
    return "-".join([digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]])


def fill_database(saver: SQLiteCheckpointer) -> None:
    """Put turns with parallel tasks in two namespaces of each thread, a fork, and a moved head."""
    for thread_id in THREADS:
        for ns in NAMESPACES:
            messages: list[Any] = []
            for step in range(5):
                person = HumanMessage(f"{step} asks in {thread_id}", id=f"h{step}")
                messages += [person, AIMessage(f"{step} " + "words " * 20, id=f"a{step}")]
                put_checkpoint_with_writes(saver, thread_id, ns, step, messages)
    put_checkpoint_with_writes(saver, THREADS[0], "", 5, messages[:4], parent=2)
    saver.rewind(THREADS[1], make_checkpoint_id(THREADS[1], "", 3))


def put_checkpoint_with_writes(
    saver: SQLiteCheckpointer,
    thread_id: str,
    ns: str,
    step: int,
    messages: list[Any],
    parent: int | None = None,
) -> None:
    """Put a checkpoint and the writes of its two tasks."""
    before = step - 1 if parent is None else parent
    checkpoint: Any = {
        "v": 4,
        "id": make_checkpoint_id(thread_id, ns, step),
        "ts": "2026-01-01T00:00:00+00:00",
        "channel_values": {"messages": list(messages), "note": "n" * 200},
        "channel_versions": {"messages": step + 1, "note": 1},
        "versions_seen": {"node": {"messages": step}},
        "updated_channels": None,
    }
    metadata: Any = {"source": "loop" if step else "input", "step": step, "even": step % 2 == 0}
    base = make_config(thread_id, ns, make_checkpoint_id(thread_id, ns, before) if step else None)
    config = saver.put(base, checkpoint, metadata, {"messages": step + 1, "note": 1})
    for task in range(2):
        saver.put_writes(config, [("messages", f"of {task}"), ("x", step)], f"task {task}", "~")


def build_queries() -> dict[str, Query]:
    """Return calls of the public methods that read, by name."""
    out: dict[str, Query] = {
        "threads": lambda s: [(t.thread_id, t.checkpoints, t.namespaces) for t in s.threads()],
        "prefix": lambda s: [t.thread_id for t in s.threads(prefix="thread ")],
        "list": lambda s: list(s.list(None)),
        "even": lambda s: list(s.list(None, filter={"even": True})),
        "input": lambda s: list(s.list(None, filter={"source": "input"})),
    }
    for thread_id in THREADS:
        out |= thread_queries(thread_id)
        for ns in NAMESPACES:
            out |= namespace_queries(thread_id, ns)
            for step in (0, 4):
                out |= checkpoint_queries(
                    thread_id, make_config(thread_id, ns, make_checkpoint_id(thread_id, ns, step))
                )
    return out


def thread_queries(t: str) -> dict[str, Query]:
    return {
        f"checkpoints of {t}": lambda s: s.checkpoints(t),
        f"even of {t}": lambda s: list(s.list(make_config(t), filter={"even": True})),
    }


def namespace_queries(t: str, ns: str) -> dict[str, Query]:
    return {
        f"head {t} {ns}": lambda s: s.get_tuple(make_config(t, ns)),
        f"history {t} {ns}": lambda s: s.history(t, checkpoint_ns=ns),
    }


def checkpoint_queries(t: str, config: Any) -> dict[str, Query]:
    return {
        f"get {config}": lambda s: s.get_tuple(config),
        f"before {config}": lambda s: list(s.list(make_config(t), before=config, limit=2)),
    }


def run_queries(path: Path, **options: Any) -> dict[str, Any]:
    """Return the result of each query as text, or the error that it raised."""
    out: dict[str, Any] = {}
    try:
        saver = SQLiteCheckpointer.open(path, **options)
    except Exception as exc:
        return dict.fromkeys(build_queries(), exc)
    with saver:
        for name, ask in build_queries().items():
            try:
                out[name] = repr(ask(saver))
            except Exception as exc:
                out[name] = exc
    return out


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"key": KEY}], ids=["plain", "sealed"])
def test_flipped_bit_is_reported_or_does_not_change_results(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No result differs from that of the whole file, and every error is one of perdure's."""
    chance = random.Random("a flipped bit")
    path, damaged = tmp_path / "x.db", tmp_path / "damaged.db"
    with monkeypatch.context() as patched:  # the same bytes each time
        clock = iter(range(1_700_000_000, 1_800_000_000))
        patched.setattr(time, "time", lambda: next(clock) + 0.25)
        patched.setattr(os, "urandom", chance.randbytes)
        with SQLiteCheckpointer.open(path, **options) as saver:
            fill_database(saver)
    whole_file = path.read_bytes()
    expected = run_queries(path, **options)
    assert not [error for error in expected.values() if isinstance(error, Exception)]

    noticed, missed = 0, []
    for _ in range(FLIPS):
        bit = chance.randrange(len(whole_file) * 8)
        flipped = bytearray(whole_file)
        flipped[bit // 8] ^= 1 << bit % 8
        for leftover in tmp_path.glob("damaged.db*"):
            leftover.unlink()
        damaged.write_bytes(flipped)
        results = run_queries(damaged, **options)
        differing = {name: results[name] for name in results if results[name] != expected[name]}
        noticed += bool(differing)
        wrong = [n for n, e in differing.items() if not isinstance(e, StorageError | WrongKey)]
        if wrong:
            missed.append((bit, wrong))

    assert noticed > FLIPS // 10
    assert len(missed) <= FLIPS // FLIPS_PER_MISS, missed
