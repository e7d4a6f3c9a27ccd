"""Which thread an imported conversation is that has no id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perdure.checkpointers import SQLiteCheckpointer
from perdure.graphs import chat_graph
from tests.cli.commands import run
from tests.cli.exports import (
    lines,
)
from tests.cli.imported import (
    USER,
    done,
    memories,
    only_thread,
    said,
    threads,
    turns,
)


def test_unrelated_files_of_one_name_are_threads_of_their_own(tmp_path: Path) -> None:
    """Neither is a branch of the other, whether they have a message or a conversation a line."""
    told = ("How deep is the pond?", "Two metres."), ("Who built the ferry?", "Nobody knows.")
    files = []
    for folder, talk in zip("abcd", (told[0], told[1], ("Hi", "Ho"), ("Hi", "Hey")), strict=True):
        (tmp_path / folder).mkdir()
        form = turns(*talk)
        values = [form] if folder in "ac" else form["messages"]
        files.append(lines(tmp_path / folder / "chat.jsonl", values))

    assert done(*files) == (4, 8, 0)
    assert done(*reversed(files)) == (4, 0, 4)
    assert threads() == [
        *(["human: Hi", "ai: Hey"], ["human: Hi", "ai: Ho"]),
        *(["human: How deep is the pond?", "ai: Two metres."],),
        *(["human: Who built the ferry?", "ai: Nobody knows."],),
    ]


def test_a_training_file_may_grow_anywhere(tmp_path: Path) -> None:
    """Lines come at the top, one goes on, one is repeated; each conversation is one thread."""
    prompt = {"role": "system", "content": "You look things up."}
    talks = [turns("Hi", f"Answer {n}") for n in range(20)]
    for talk in talks:
        talk["messages"].insert(0, prompt)
    first = done(lines(tmp_path / "t.jsonl", talks[5:]))
    longer = {"messages": [*talks[7]["messages"], {"role": "user", "content": "And then?"}]}
    grown = [*talks[:5], *talks[5:7], longer, *talks[8:], talks[3]]
    second, third = (done(lines(tmp_path / "t.jsonl", grown)) for _ in range(2))
    shorter = done(lines(tmp_path / "u.jsonl", talks[::-1]))

    assert (first, second, third) == ((15, 45, 0), (21, 19, 14), (21, 0, 21))
    assert shorter == (20, 0, 20)
    assert [len(talk) for talk in threads()].count(4) == 1
    assert len(threads()) == 21
    with SQLiteCheckpointer.open("x.db") as saver:
        for head in saver.heads(limit=1000):
            assert not [item for item in saver.history(head.thread_id) if item.branch]


def test_equal_lines_of_a_file_are_threads_of_their_own(tmp_path: Path) -> None:
    """The same lines in another file, or in the same again, are none."""
    talk = turns("Hi", "Ho")
    told = [done(lines(tmp_path / "t.jsonl", [talk] * count)) for count in (2, 2, 3)]
    told.append(done(lines(tmp_path / "other.jsonl", [talk] * 2)))
    one = turns("Hi")
    told += [done(lines(tmp_path / "u.jsonl", [one, talk, one])) for _ in range(2)]

    assert told == [(2, 4, 0), (2, 0, 2), (3, 2, 2), (2, 0, 2), (3, 1, 2), (3, 0, 3)]
    assert threads() == [["human: Hi"], *[["human: Hi", "ai: Ho"]] * 3]


def test_long_conversations_that_differ_late_are_found_again(tmp_path: Path) -> None:
    """Also after the thread of one of them was deleted, and if only a branch can be read."""
    talks = [turns(*map(str, range(30)), f"end {n}") for n in range(4)]
    first = done(lines(tmp_path / "t.jsonl", talks))
    with SQLiteCheckpointer.open("x.db") as saver:
        saver.delete_thread(only_thread(1))
    second = [done(lines(tmp_path / "t.jsonl", talks[::-1])) for _ in range(2)]
    odd = {"role": "robot", "content": "x"}
    branch = {"after": 0, "messages": [USER]}
    alone = [
        done(lines(tmp_path / "u.jsonl", [{"messages": [odd], "branches": [branch]}]))
        for _ in range(2)
    ]

    assert (first, second) == ((4, 124, 0), [(4, 31, 3), (4, 0, 4)])
    assert alone == [(1, 1, 0), (1, 0, 1)]


def test_two_users_do_not_share_a_thread(tmp_path: Path) -> None:
    """Neither those whom lines name, of either form, nor those for whom a file is imported."""
    whole = [turns("Hi", "Ho", user_id=user) for user in ("ann", "bob")]
    loose = [{"user_id": user, **USER} for user in ("ann", "bob", "ann")]

    assert done(lines(tmp_path / "w.jsonl", whole)) == (2, 4, 0)
    assert done(lines(tmp_path / "l.jsonl", loose)) == (2, 3, 0)
    for user in ("ann", "zoe", "zoe"):
        run("import", str(lines(tmp_path / "n.jsonl", [turns("Hi", "Ho")])), "--user", user)
    assert len(threads()) == 5
    assert (len(memories("ann")), len(memories("zoe"))) == (2, 2)


def test_times_tell_conversations_apart(tmp_path: Path) -> None:
    """Small talk of two days is two threads; what was said is dated."""
    talks = [
        {"messages": [{**USER, "created_at": f"2024-05-0{day}T10:00:00Z"}]} for day in (1, 2, 1)
    ]
    assert done(lines(tmp_path / "t.jsonl", talks[:2])) == (2, 2, 0)
    twice = lines(tmp_path / "u.jsonl", [talks[1], talks[0]])
    assert done(twice, twice) == (4, 0, 4)


def test_a_former_import_is_repeated_and_goes_on(tmp_path: Path) -> None:
    """Threads that were named by file and place are found by what was said first."""
    talks = [turns("Hi", f"Answer {n}") for n in range(4)]
    former = [{"thread_id": f"chat-{n}", **talk} for n, talk in enumerate(talks, 1)]
    log = [{"thread_id": "log", **message} for message in turns("Who?", "Me.")["messages"]]
    merged = [{"thread_id": "two-1", **turns(*told)} for told in (("A", "B"), ("C", "D"))]
    done(lines(tmp_path / "old.jsonl", [*former, *log, *merged]))
    longer = turns("Hi", "Answer 2", "More?", "No.")
    told = [
        done(lines(tmp_path / "chat.jsonl", talks)),
        done(lines(tmp_path / "chat.jsonl", [turns("New"), *talks[:2], longer, talks[3]])),
        done(lines(tmp_path / "log.jsonl", turns("Who?", "Me.", "Why?")["messages"])),
        done(lines(tmp_path / "two.jsonl", [turns("A", "B"), turns("C", "D")])),
    ]

    assert told == [(4, 0, 4), (5, 3, 3), (1, 1, 0), (2, 0, 2)]
    assert said("chat-3") == ["human: Hi", "ai: Answer 2", "human: More?", "ai: No."]
    assert said("log") == ["human: Who?", "ai: Me.", "human: Why?"]
    assert len(threads()) == 4 + 1 + 1 + 1


def test_a_thread_that_was_talked_on_is_found_again(tmp_path: Path) -> None:
    """It stays where it is, and what the file has in addition is a branch of it."""
    done(lines(tmp_path / "t.jsonl", [turns("Hi", "Ho")]))
    name = only_thread()
    with SQLiteCheckpointer.open("x.db") as saver:
        graph: Any = chat_graph(checkpointer=saver)
        graph.invoke({"messages": [("user", "and here")]}, {"configurable": {"thread_id": name}})

    assert done(lines(tmp_path / "t.jsonl", [turns("Hi", "Ho")])) == (1, 0, 1)
    assert done(lines(tmp_path / "t.jsonl", [turns("Hi", "Ho", "Why?")])) == (1, 1, 0)
    assert said(name)[:3] == ["human: Hi", "ai: Ho", "human: and here"]
    assert len(threads()) == 1
