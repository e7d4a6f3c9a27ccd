"""Importing conversations: ChatGPT's export and JSONL, again and again, broken and mended."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.sqlite import SqliteSaver

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ImportFailed
from perdure.graphs import chat_graph
from tests.exports import CONVERSATIONS, EXPORT, conversation, imported, lines, run, written

BICYCLE, RAIN, BREAD = (found["conversation_id"] for found in CONVERSATIONS)
CALL = {"type": "function", "id": "call-1", "function": {"name": "depth", "arguments": '{"m": 1}'}}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.invalid/pond.png"}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "You look things up."},
    {"role": "user", "content": "How deep is the pond?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2 m", "tool_call_id": "call-1"},
    {"role": "assistant", "content": "Two metres."},
    {"role": "user", "content": [{"type": "text", "text": "This pond?"}, IMAGE]},
]


def said(db: Path, thread: str) -> list[str]:
    with SQLiteCheckpointer.open(db) as saver:
        items = [item for item in saver.history(thread) if not item.branch]
        return [f"{item.value.type}: {item.value.text}" for item in items]


def contents(db: Path) -> Any:
    """All there is to see of a database, but for when."""
    with SQLiteCheckpointer.open(db) as saver:
        threads = sorted(t.thread_id for t in saver.threads(limit=1000))
        return {
            t: (
                [(i.value, i.seen) for i in saver.history(t) if not i.branch],
                [(i.metadata["imported"], i.is_head, i.counts) for i in saver.checkpoints(t)],
            )
            for t in threads
        }


# -- ChatGPT's export


def test_an_export_is_imported_with_its_branches(tmp_path: Path) -> None:
    """Each thread's history is the branch shown last; other answers are branches in `show`."""
    db = tmp_path / "x.db"

    assert imported(db, EXPORT) == (3, 18, 0)
    assert said(db, BREAD)[2:] == [
        "human: And which flour?",
        "ai: Wholemeal rye wakes a starter fastest; white flour keeps it mild.",
        "human: Rye it is. Thank you \N{EN DASH} “danke”! 🍞",
        "ai: Happy baking!",
    ]
    assert said(db, RAIN) == [
        "human: [image_asset_pointer]\nAdd up the rain in this table.",
        "ai: sum([61, 44, 52])",
        "ai: [python] 157",
        "ai: It rained 157 mm in the three months shown.",
    ]
    assert said(db, BICYCLE)[2:] == ["human: Something grander?", "ai: The Emerald Express."]
    tree = run(db, "show", BREAD).stdout.splitlines()
    assert [line for line in tree if line.startswith("    ├── ")] != []
    assert len(re.findall(r"step 3", "\n".join(tree))) == 3
    assert tree[-1].endswith("step 5 (update), 6 messages ← head")


def test_a_second_import_changes_nothing(tmp_path: Path) -> None:
    """Stats, threads and checkpoints are the same after the file is imported again."""
    db = tmp_path / "x.db"
    imported(db, EXPORT)
    looks = (("stats", "--json"), ("threads", "--json"), ("show", BREAD, "--json"))
    before = [run(db, *look).stdout for look in looks]
    again = imported(db, EXPORT)
    after = [run(db, *look).stdout for look in looks]

    assert again == (3, 0, 3)
    assert before == after


def test_an_import_after_a_prune_brings_nothing_back(tmp_path: Path) -> None:
    """What was imported and then pruned counts as imported."""
    db = tmp_path / "x.db"
    imported(db, EXPORT)
    run(db, "prune", "--yes")
    before = contents(db)
    again = imported(db, EXPORT)

    assert again == (3, 0, 3)
    assert before == contents(db)


def test_a_growing_export_brings_only_what_is_new(tmp_path: Path) -> None:
    """Later messages are appended, a later branch is a fork, and the head follows the export."""
    db = tmp_path / "x.db"
    parents: dict[str, str | None] = {"u1": None, "a1": "u1", "u2": "a1", "a2": "u2"}
    stages = [
        (parents, "a2"),
        ({**parents, "u3": "a2", "a3": "u3"}, "a3"),
        ({**parents, "u3": "a2", "a3": "u3", "a1b": "u1"}, "a1b"),
    ]
    done = [imported(db, written(tmp_path / "c.json", [conversation(*s)])) for s in stages]

    assert done == [(1, 4, 0), (1, 2, 0), (1, 1, 0)]
    assert said(db, "c") == ["human: says u1", "human: says a1b"]


def test_a_growing_export_leaves_a_talk_that_went_on(tmp_path: Path) -> None:
    """A thread that was talked on stays where it was; the rest of the export is a branch."""
    db = tmp_path / "x.db"
    parents: dict[str, str | None] = {"u1": None, "a1": "u1"}
    imported(db, written(tmp_path / "c.json", [conversation(parents, "a1")]))
    run(db, "chat", "--thread", "c", "--message", "and now here")
    before = said(db, "c")
    grown = conversation({**parents, "u2": "a1"}, "u2")

    assert imported(db, written(tmp_path / "c.json", [grown])) == (1, 1, 0)
    assert before == said(db, "c")
    assert before[2] == "human: and now here"


def test_a_first_message_that_was_edited_is_a_branch(tmp_path: Path) -> None:
    """Two first messages are two branches: neither is in the other's history."""
    db = tmp_path / "x.db"
    edited = conversation({"u1": None, "a1": "u1", "u2": None, "a2": "u2"}, "a2")

    assert imported(db, written(tmp_path / "c.json", [edited])) == (1, 4, 0)
    assert said(db, "c") == ["human: says u2", "ai: says a2"]


def test_an_import_goes_on_where_it_broke_off(tmp_path: Path) -> None:
    """Conversations before a fault are kept and counted; the mended file brings the others."""
    db, whole = tmp_path / "x.db", tmp_path / "whole.db"
    text = EXPORT.read_text(encoding="utf-8")
    broken = tmp_path / "conversations.json"
    broken.write_text(text[: len(text) * 3 // 4], encoding="utf-8")
    result = run(db, "import", str(broken))
    kept = sorted(contents(db))
    done = imported(db, EXPORT)
    imported(whole, EXPORT)

    assert isinstance(result.exception, ImportFailed)
    assert re.search(r"conversations\.json', line \d+: .*\. 2 conv.*kept", str(result.exception))
    assert kept == sorted([BICYCLE, RAIN])
    assert done == (3, 8, 2)
    assert contents(whole) == contents(db)


@st.composite
def trees(draw: st.DrawFn) -> tuple[dict[str, str | None], str, frozenset[str]]:
    """Messages with their parents, the one shown last, and those that are empty."""
    count = draw(st.integers(1, 12))
    keys = [f"m{n}" for n in range(count)]
    parents = {
        key: draw(st.sampled_from([None, *keys[:n]])) if n else None for n, key in enumerate(keys)
    }
    return parents, draw(st.sampled_from(keys)), draw(st.frozensets(st.sampled_from(keys)))


@given(trees())
def test_any_tree_is_imported_with_every_branch(
    tree: tuple[dict[str, str | None], str, frozenset[str]],
) -> None:
    """The way to each message is its history, and the thread's own is the branch shown last."""
    parents, current, empty = tree

    def way(key: str | None) -> list[str]:
        said = [] if key is None or key in empty else [key]
        return [] if key is None else way(parents[key]) + said

    with tempfile.TemporaryDirectory() as folder:
        db = Path(folder) / "x.db"
        imported(db, written(Path(folder) / "c.json", [conversation(parents, current, empty)]))
        with SQLiteCheckpointer.open(db) as saver:
            infos = saver.checkpoints("c") if len(empty) < len(parents) else []
            found = {
                info.metadata["imported"]: [
                    item.value.id for item in saver.history("c", checkpoint_id=info.checkpoint_id)
                ]
                for info in infos
            }
            items = saver.history("c") if infos else []
            head = [item.value.id for item in items if not item.branch]
            branches = {item.value.id for item in items if item.branch}

    assert {key: way(key) for key in parents if key not in empty} == found
    assert way(current) == (head if way(current) else [])
    assert branches == {uid for told in found.values() for uid in told} - set(head)


# -- JSONL


def test_both_forms_of_jsonl_say_the_same(tmp_path: Path) -> None:
    """One message a line and one conversation a line give one thread, tool calls and all."""
    one, many = tmp_path / "one.db", tmp_path / "many.db"
    loose = [{"thread_id": "t", **message} for message in TALK]

    assert imported(one, lines(tmp_path / "1.jsonl", [{"thread_id": "t", "messages": TALK}])) == (
        imported(many, lines(tmp_path / "2.jsonl", loose))
    )
    assert contents(one) == contents(many)
    with SQLiteCheckpointer.open(one) as saver:
        talk = [item.value for item in saver.history("t")]
    assert [m.type for m in talk] == ["system", "human", "ai", "tool", "ai", "human"]
    assert talk[2].tool_calls[0]["args"] == {"m": 1}
    assert talk[3].tool_call_id == talk[2].tool_calls[0]["id"] == "call-1"


def test_jsonl_is_imported_once_and_grows(tmp_path: Path) -> None:
    """Again changes nothing, appended lines are new messages, and --prefix makes other threads."""
    db, file = tmp_path / "x.db", tmp_path / "log.jsonl"
    loose = [{"role": m["role"], "content": f"line {n}"} for n, m in enumerate(TALK[:2] * 2)]
    done = [imported(db, lines(file, loose[:count])) for count in (2, 2, 4)]
    done.append(imported(db, file, "--prefix", "old/"))

    assert done == [(1, 2, 0), (1, 0, 1), (1, 2, 0), (1, 4, 0)]
    assert said(db, "log") == said(db, "old/log") != []


def test_lines_of_several_threads_may_be_mixed(tmp_path: Path) -> None:
    """A log that many threads wrote to gives each of them its messages in order."""
    db = tmp_path / "x.db"
    mixed = [{"thread_id": t, "role": "user", "content": f"{t}{n}"} for n in range(3) for t in "ab"]
    imported(db, lines(tmp_path / "log.jsonl", mixed))

    assert said(db, "a") == ["human: a0", "human: a1", "human: a2"]
    assert said(db, "b") == ["human: b0", "human: b1", "human: b2"]


def test_what_is_exported_is_imported_the_same(tmp_path: Path) -> None:
    """Export and import give another database the same messages on the same threads."""
    one, other, file = tmp_path / "1.db", tmp_path / "2.db", tmp_path / "all.jsonl"
    imported(one, EXPORT)
    imported(one, lines(tmp_path / "t.jsonl", [{"thread_id": "t", "messages": TALK}]))
    run(one, "export", "--all", "--output", str(file))
    imported(other, file)

    expected, actual = contents(one), contents(other)
    assert {t: found[0] for t, found in expected.items()} == {t: f[0] for t, f in actual.items()}
    assert run(one, "export", "--all").stdout == file.read_text(encoding="utf-8")


def test_a_database_of_langgraphs_saver_is_taken_over(tmp_path: Path) -> None:
    """The command takes the file over with all its checkpoints, and again without change."""
    old, db = tmp_path / "old.sqlite", tmp_path / "x.db"
    with SqliteSaver.from_conn_string(str(old)) as saver:
        config: RunnableConfig = {"configurable": {"thread_id": "pond"}}
        graph: Any = chat_graph(checkpointer=saver)
        graph.invoke({"messages": [("user", "How deep is it?")]}, config)
        checkpoints = len(list(saver.list(config)))
    first = run(db, "import", str(old))
    again = run(db, "import", str(old), "--json")

    there = f"1 thread ({checkpoints} new checkpoints, 0 already there), 1 memory formed\n"
    assert there == first.stdout
    assert checkpoints == json.loads(again.stdout)["skipped"]
    assert said(db, "pond")[0] == "human: How deep is it?"
