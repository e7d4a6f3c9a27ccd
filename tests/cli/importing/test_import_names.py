"""The thread of an imported conversation that has no id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perdure.checkpointers import SQLiteCheckpointer
from perdure.graphs import chat_graph
from tests.cli.commands import run
from tests.cli.exports import (
    write_jsonl,
)
from tests.cli.imported import (
    USER,
    build_training_line,
    import_and_count,
    read_all_thread_texts,
    read_memory_texts,
    read_thread_id,
    read_thread_texts,
)


def test_unrelated_files_of_same_name_become_separate_threads(tmp_path: Path) -> None:
    """No thread is a branch of another, with a message or a conversation per line."""
    conversations = (
        ("How deep is the pond?", "Two metres."),
        ("Who built the ferry?", "Nobody knows."),
    )
    files = []
    for folder, talk in zip(
        "abcd", (conversations[0], conversations[1], ("Hi", "Ho"), ("Hi", "Hey")), strict=True
    ):
        (tmp_path / folder).mkdir()
        form = build_training_line(*talk)
        values = [form] if folder in "ac" else form["messages"]
        files.append(write_jsonl(tmp_path / folder / "chat.jsonl", values))

    assert import_and_count(*files) == (4, 8, 0)
    assert import_and_count(*reversed(files)) == (4, 0, 4)
    assert read_all_thread_texts() == [
        *(["human: Hi", "ai: Hey"], ["human: Hi", "ai: Ho"]),
        *(["human: How deep is the pond?", "ai: Two metres."],),
        *(["human: Who built the ferry?", "ai: Nobody knows."],),
    ]


def test_grown_training_file_adds_only_new_messages(tmp_path: Path) -> None:
    """Lines are added at the top, one is longer, and one is repeated."""
    prompt = {"role": "system", "content": "You look things up."}
    talks = [build_training_line("Hi", f"Answer {n}") for n in range(20)]
    for talk in talks:
        talk["messages"].insert(0, prompt)
    first = import_and_count(write_jsonl(tmp_path / "t.jsonl", talks[5:]))
    longer = {"messages": [*talks[7]["messages"], {"role": "user", "content": "And then?"}]}
    grown = [*talks[:5], *talks[5:7], longer, *talks[8:], talks[3]]
    second, third = (import_and_count(write_jsonl(tmp_path / "t.jsonl", grown)) for _ in range(2))
    shorter = import_and_count(write_jsonl(tmp_path / "u.jsonl", talks[::-1]))

    assert (first, second, third) == ((15, 45, 0), (21, 19, 14), (21, 0, 21))
    assert shorter == (20, 0, 20)
    assert [len(talk) for talk in read_all_thread_texts()].count(4) == 1
    assert len(read_all_thread_texts()) == 21
    with SQLiteCheckpointer.open("x.db") as saver:
        for head in saver.heads(limit=1000):
            assert not [item for item in saver.history(head.thread_id) if item.branch]


def test_equal_lines_of_one_file_become_separate_threads(tmp_path: Path) -> None:
    """The same lines in another file, or in a repeated import, add no threads."""
    talk = build_training_line("Hi", "Ho")
    counts = [
        import_and_count(write_jsonl(tmp_path / "t.jsonl", [talk] * count)) for count in (2, 2, 3)
    ]
    counts.append(import_and_count(write_jsonl(tmp_path / "other.jsonl", [talk] * 2)))
    one = build_training_line("Hi")
    counts += [
        import_and_count(write_jsonl(tmp_path / "u.jsonl", [one, talk, one])) for _ in range(2)
    ]

    assert counts == [(2, 4, 0), (2, 0, 2), (3, 2, 2), (2, 0, 2), (3, 1, 2), (3, 0, 3)]
    assert read_all_thread_texts() == [["human: Hi"], *[["human: Hi", "ai: Ho"]] * 3]


def test_conversations_that_differ_late_are_recognised_again(tmp_path: Path) -> None:
    """The others are recognised after one of the threads was deleted, and a lone branch as well."""
    talks = [build_training_line(*map(str, range(30)), f"end {n}") for n in range(4)]
    first = import_and_count(write_jsonl(tmp_path / "t.jsonl", talks))
    with SQLiteCheckpointer.open("x.db") as saver:
        saver.delete_thread(read_thread_id(1))
    second = [import_and_count(write_jsonl(tmp_path / "t.jsonl", talks[::-1])) for _ in range(2)]
    odd = {"role": "robot", "content": "x"}
    branch = {"after": 0, "messages": [USER]}
    alone = [
        import_and_count(
            write_jsonl(tmp_path / "u.jsonl", [{"messages": [odd], "branches": [branch]}])
        )
        for _ in range(2)
    ]

    assert (first, second) == ((4, 124, 0), [(4, 31, 3), (4, 0, 4)])
    assert alone == [(1, 1, 0), (1, 0, 1)]


def test_equal_conversations_of_two_users_are_separate_threads(tmp_path: Path) -> None:
    """The users are named by lines of either form, or by the option --user."""
    whole = [build_training_line("Hi", "Ho", user_id=user) for user in ("ann", "bob")]
    loose = [{"user_id": user, **USER} for user in ("ann", "bob", "ann")]

    assert import_and_count(write_jsonl(tmp_path / "w.jsonl", whole)) == (2, 4, 0)
    assert import_and_count(write_jsonl(tmp_path / "l.jsonl", loose)) == (2, 3, 0)
    for user in ("ann", "zoe", "zoe"):
        run(
            "import",
            str(write_jsonl(tmp_path / "n.jsonl", [build_training_line("Hi", "Ho")])),
            "--user",
            user,
        )
    assert len(read_all_thread_texts()) == 5
    assert (len(read_memory_texts("ann")), len(read_memory_texts("zoe"))) == (2, 2)


def test_equal_conversations_of_different_times_are_separate_threads(tmp_path: Path) -> None:
    """The same greeting on two days is two threads if the messages have times."""
    talks = [
        {"messages": [{**USER, "created_at": f"2024-05-0{day}T10:00:00Z"}]} for day in (1, 2, 1)
    ]
    assert import_and_count(write_jsonl(tmp_path / "t.jsonl", talks[:2])) == (2, 2, 0)
    twice = write_jsonl(tmp_path / "u.jsonl", [talks[1], talks[0]])
    assert import_and_count(twice, twice) == (4, 0, 4)


def test_threads_named_by_an_earlier_version_are_recognised(tmp_path: Path) -> None:
    """Threads that were named by file and position are recognised by their first messages."""
    talks = [build_training_line("Hi", f"Answer {n}") for n in range(4)]
    former = [{"thread_id": f"chat-{n}", **talk} for n, talk in enumerate(talks, 1)]
    log = [
        {"thread_id": "log", **message}
        for message in build_training_line("Who?", "Me.")["messages"]
    ]
    merged = [
        {"thread_id": "two-1", **build_training_line(*counts)}
        for counts in (("A", "B"), ("C", "D"))
    ]
    import_and_count(write_jsonl(tmp_path / "old.jsonl", [*former, *log, *merged]))
    longer = build_training_line("Hi", "Answer 2", "More?", "No.")
    counts = [
        import_and_count(write_jsonl(tmp_path / "chat.jsonl", talks)),
        import_and_count(
            write_jsonl(
                tmp_path / "chat.jsonl", [build_training_line("New"), *talks[:2], longer, talks[3]]
            )
        ),
        import_and_count(
            write_jsonl(
                tmp_path / "log.jsonl", build_training_line("Who?", "Me.", "Why?")["messages"]
            )
        ),
        import_and_count(
            write_jsonl(
                tmp_path / "two.jsonl",
                [build_training_line("A", "B"), build_training_line("C", "D")],
            )
        ),
    ]

    assert counts == [(4, 0, 4), (5, 3, 3), (1, 1, 0), (2, 0, 2)]
    assert read_thread_texts("chat-3") == ["human: Hi", "ai: Answer 2", "human: More?", "ai: No."]
    assert read_thread_texts("log") == ["human: Who?", "ai: Me.", "human: Why?"]
    assert len(read_all_thread_texts()) == 4 + 1 + 1 + 1


def test_continued_thread_is_recognised_by_repeated_import(tmp_path: Path) -> None:
    """The head stays, and new messages of the file become a branch."""
    import_and_count(write_jsonl(tmp_path / "t.jsonl", [build_training_line("Hi", "Ho")]))
    name = read_thread_id()
    with SQLiteCheckpointer.open("x.db") as saver:
        graph: Any = chat_graph(checkpointer=saver)
        graph.invoke({"messages": [("user", "and here")]}, {"configurable": {"thread_id": name}})

    assert import_and_count(
        write_jsonl(tmp_path / "t.jsonl", [build_training_line("Hi", "Ho")])
    ) == (1, 0, 1)
    assert import_and_count(
        write_jsonl(tmp_path / "t.jsonl", [build_training_line("Hi", "Ho", "Why?")])
    ) == (1, 1, 0)
    assert read_thread_texts(name)[:3] == ["human: Hi", "ai: Ho", "human: and here"]
    assert len(read_all_thread_texts()) == 1
