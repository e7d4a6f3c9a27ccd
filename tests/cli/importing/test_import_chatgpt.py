"""`perdure import` of ChatGPT's export: tools, documents, reports, branches and times."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from perdure.checkpointers import Retention, SQLiteCheckpointer
from perdure.cli.app import app
from perdure.stores import SQLiteStore
from tests.cli.commands import invoke, run, run_json
from tests.cli.exports import (
    CITE,
    START,
    ChatGPTConversation,
    add_deep_research,
    build_tool_conversation,
    build_zip,
    write_json,
)
from tests.cli.imported import (
    build_two_turns,
    import_and_count,
    import_as_earlier_version,
    read_current_messages,
    read_memory_texts,
    read_thread_texts,
    search_thread_texts,
)


def test_tool_calls_and_files_are_imported_as_text_and_not_remembered(tmp_path: Path) -> None:
    """Calls are a line or a code block, other parts are counted, and private glyphs are removed."""
    (tmp_path / "e.zip").write_bytes(
        build_zip({"conversations.json": [build_tool_conversation().json]})
    )
    result = invoke("import", "e.zip")
    code = "for day in range(2):\n    if day:\n        print(day)"

    assert result.stdout == "1 conversation: 14 new messages, 4 memories\n"
    assert result.stderr == (
        "left out: user_editable_context (1), model_editable_context (1), thoughts (1), "
        "reasoning_recap (1), bio (1), tether_browsing_display (1), web.run (1), "
        "canmore.create_textdoc (1), canmore.update_textdoc (1)\n"
    )
    assert read_thread_texts("tools") == [
        "human: [file: dates.pdf]\n[image: g.png]\nPlan my trip to Ghent, I am allergic to nuts",
        "ai: [memory: User is allergic to nuts.]",
        "ai: [web: ghent ferry times]",
        "ai: [quote: Ferries, https://a.example]",
        "ai: The ferry to Ghent leaves at nine. (Ferries of Ghent, https://ferry.example/ghent) "
        "It is slow.",
        "ai: [canvas: Packing list]\n# Bring\n\n- a coat",
        "ai: [canvas changed]\n- two coats",
        "ai: ",
        "tool: [image: A ferry at dawn]",
        "ai: ",
        "tool: 1",
        "ai: [error: it took long]",
        "human: Thank you",
        "ai: Walnuts are in it (Nuts, https://nuts.example), so mind:\n\n"
        "```python\ndef f():\n    return 1\n```",
    ]
    assert [text.split()[1] for text in read_memory_texts()] == [
        "The",
        "Walnuts",
        "Thank",
        "[file:",
    ]
    with SQLiteCheckpointer.open("x.db") as saver:
        items = [item.value for item in saver.history("tools")]
        (head, *_) = saver.checkpoints("tools")
    assert "a coat" in items[5].additional_kwargs["canvas"]
    assert [
        (call["name"], call["args"]) for item in (items[7], items[9]) for call in item.tool_calls
    ] == [
        ("dalle_text2im", {"input": "A ferry at dawn, in oils"}),
        ("python", {"input": code}),
    ]
    assert [(item.name, item.tool_call_id) for item in (items[8], items[10])] == [
        ("dalle_text2im", items[7].id),
        ("python", items[9].id),
    ]
    assert items[4].response_metadata["model_name"] == "gpt-5-thinking"
    assert [head.metadata[name] for name in ("title", "model", "gizmo_id")] == [
        "A trip to Ghent",
        "gpt-4o",
        "g-trip",
    ]


def test_canvas_documents_are_searchable_and_not_remembered(tmp_path: Path) -> None:
    """Text, code, changes and comments of a canvas become messages."""
    talk = ChatGPTConversation("canvas")
    code = {"name": "Tides", "type": "code/python", "content": "print('ebb')"}
    comment = {"comments": [{"pattern": "ebb", "comment": "say flood instead"}]}
    talk.add_message("user", "Write it")
    for tool, call in (("create", code), ("comment", comment)):
        talk.add_tool_call(f"canmore.{tool}_textdoc", json.dumps(call), f"Successfully {tool}d")
    truncated = ChatGPTConversation("cut")
    truncated.add_tool_call(
        "canmore.create_textdoc", '{"name": "Cut", "content": "the moonrise', "Error"
    )
    run(
        "import",
        str(
            write_json(
                tmp_path / "c.json", [talk.json, truncated.json, build_tool_conversation().json]
            )
        ),
    )

    assert read_thread_texts("canvas")[1:] == [
        "ai: [canvas: Tides]\n```python\nprint('ebb')\n```",
        "ai: [canvas comments]\nsay flood instead",
    ]
    assert search_thread_texts("ebb") == ["[canvas: Tides]"]
    assert search_thread_texts("moonrise") == ["[canvas]"]
    assert search_thread_texts("flood") == ["[canvas comments]"]
    assert search_thread_texts("coats")[0] == "[canvas changed]"
    assert not [text for text in read_memory_texts() if "coat" in text or "ebb" in text]


@pytest.mark.parametrize("in_text", [False, True])
def test_deep_research_report_is_imported_once_as_an_answer(in_text: bool, tmp_path: Path) -> None:
    """The report is the assistant's message with sources and time; a plan is not a report."""
    talk = build_two_turns()
    add_deep_research(talk, f"# Ferries\n\nOne leaves at nine.{CITE}", in_text=in_text)
    talk.add_turn("Thank you", "You are welcome")
    add_deep_research(talk, "", done=False)
    run("import", str(write_json(tmp_path / "c.json", [talk.json])))
    report = (
        "ai: # Ferries\n\nOne leaves at nine. (Ferries of Ghent, https://ferry.example/ghent)\n\n"
        "Sources:\n- Ferries of Ghent, https://ferry.example/ghent\n- Tides, https://tides.example"
    )

    assert read_thread_texts("trip")[5:] == [
        report,
        *("human: Thank you", "ai: You are welcome", "human: Research the ferries"),
    ]
    assert "# Ferries" in search_thread_texts("ferries leaves")
    with SQLiteStore.open("x.db") as store:
        (item,) = [i for i in store.search(("memories", "me"), limit=99) if "nine" in str(i.value)]
        assert item.provenance is not None
        assert item.provenance.at is not None
        assert item.provenance.at.timestamp() == START + 80 + 20 + 600 - 20


def test_import_adds_parts_that_an_earlier_version_left_out(tmp_path: Path) -> None:
    """Documents are added to their messages, and reports in their place, each once."""
    talk = build_tool_conversation()
    add_deep_research(talk, "One leaves at nine.")
    talk.add_turn("Thank you", "You are welcome")
    file = write_json(tmp_path / "c.json", [talk.json])
    import_as_earlier_version(file)
    before = read_current_messages("tools"), read_memory_texts()
    updated, again = run_json("import", str(file)), run_json("import", str(file))
    run("import", str(file), "--db", "fresh.db")
    talk.add_turn("And now?", "Nothing")
    grown = import_and_count(write_json(tmp_path / "c.json", [talk.json]))

    assert (updated["messages"], updated["updated"], updated["outdated"]) == (0, 3, 0)
    assert (again["updated"], again["unchanged"], again["memories"]) == (0, 1, 0)
    assert grown == (1, 2, 0)
    assert read_current_messages("tools")[:-2] != before[0]
    assert read_current_messages("tools")[:-2] == read_current_messages("tools", "fresh.db")
    new_memories = set(read_memory_texts()) - set(before[1])
    assert [text.partition("\n")[0] for text in new_memories] == ["assistant: One leaves at nine."]
    assert search_thread_texts("bring") == ["[canvas: Packing list]"]
    with SQLiteCheckpointer.open("x.db") as saver:
        assert not [item for item in saver.history("tools") if item.branch]


def test_import_counts_left_out_parts_that_cannot_be_added(tmp_path: Path) -> None:
    """The parts belong to a branch that the thread has left."""
    talk = build_two_turns()
    talk.add_tool_call("canmore.create_textdoc", '{"name": "List", "content": "a coat"}', "Success")
    add_deep_research(talk, "One leaves at nine.")
    talk.add_turn("Thank you", "You are welcome")
    file = write_json(tmp_path / "c.json", [talk.json])
    import_as_earlier_version(file)
    with SQLiteCheckpointer.open("x.db") as saver:
        saver.rewind("trip", saver.checkpoints("trip")[-1].checkpoint_id)
    before = read_current_messages("trip")
    result = invoke("import", str(file))

    assert result.exit_code == 0
    assert "2 messages that an earlier import skipped" in result.stderr
    assert read_current_messages("trip") == before


def test_times_in_milliseconds_are_recognised(tmp_path: Path) -> None:
    """The times of a conversation and of its messages may be in milliseconds."""
    talk = build_two_turns().json
    for node in talk["mapping"].values():
        if node["message"] is not None:
            node["message"]["create_time"] *= 1000
    talk = {**talk, "create_time": START * 1000, "update_time": START * 1000 + 80_000}
    run("import", str(write_json(tmp_path / "c.json", [talk])))
    with SQLiteCheckpointer.open("x.db") as saver:
        assert saver.thread("trip").active_at.timestamp() == START + 80
        assert saver.checkpoints("trip")[0].metadata["create_time"] == START
        assert saver.history("trip")[0].value.response_metadata["create_time"] == START + 20


def test_chatgpt_export_is_accepted_in_every_packaging(tmp_path: Path) -> None:
    """A ZIP, a split ZIP, a folder, files, one object and stdin give the same threads."""
    one, two = build_two_turns("one").json, build_two_turns("two", START + 9).json
    split = {"a/conversations-000.json": [one], "a/conversations-001.json": [two]}
    (tmp_path / "split.zip").write_bytes(
        build_zip({**split, "a/user.json": {}, "__MACOSX/a/._conversations.json": b"\x00"})
    )
    folder = tmp_path / "unpacked" / "within"
    folder.mkdir(parents=True)
    both = write_json(folder / "conversations.json", [one, two])
    (folder / "chat.html").write_text("<html>")
    apart = [str(write_json(tmp_path / f"{talk['id']}.json", talk)) for talk in (one, two)]
    (tmp_path / "odd name.dat").write_bytes(build_zip({"x.json": [one, two]}))
    argument_lists = [
        *(["split.zip"], ["unpacked"], [str(both)], apart, ["odd name.dat"]),
        [str(write_json(tmp_path / "indented.json", [one, two]))],
    ]
    for number, files in enumerate(argument_lists):
        assert import_and_count(*files, "--db", f"{number}.db") == (2, 8, 0)
    for data in (json.dumps([one, two]), build_zip(split)):
        piped = CliRunner().invoke(app, ["import", "-", "--db", "-.db", "--json"], input=data)
        assert json.loads(piped.stdout)["conversations"] == 2


def test_page_of_shared_link_is_imported_as_a_conversation(tmp_path: Path) -> None:
    """The messages are in a list, at any depth of the page's JSON."""
    talk = build_two_turns().json
    message_nodes = list(talk.pop("mapping").values())
    page = {"props": {"pageProps": {"serverResponse": {"data": talk}}}}
    talk["linear_conversation"] = message_nodes

    assert import_and_count(write_json(tmp_path / "share.json", page)) == (1, 4, 0)
    assert read_thread_texts("trip")[0] == "human: I am allergic to nuts"


def test_imported_threads_have_times_of_their_conversations(tmp_path: Path) -> None:
    """Lists and age rules use these times, and extraction uses the time of the import."""
    week = timedelta(days=7).total_seconds()
    talks = [
        build_two_turns(name, START + week * n).json for name, n in (("b", 2), ("c", 3), ("a", 1))
    ]
    before = datetime.now(UTC)
    run("import", str(write_json(tmp_path / "c.json", talks)), "--no-memories")
    with SQLiteCheckpointer.open("x.db") as saver:
        threads = saver.threads()
        days = (time.time() - START - week * 2.5) / 86400
        report = saver.retain(Retention(days=days))

        assert [thread.thread_id for thread in threads] == ["c", "b", "a"]
        assert [thread.active_at.timestamp() - START - 80 for thread in threads] == [
            *(week * 3, week * 2, week)
        ]
        assert len(saver.heads(active_since=before)) == 3
        assert report.threads == 2  # that only heads are left of
        assert len(saver.checkpoints("c")) > 1


def test_regenerated_answers_are_imported_as_branches(tmp_path: Path) -> None:
    """The branch that was shown last is the thread; growing exports add only new messages."""
    talk = build_two_turns()
    first = import_and_count(write_json(tmp_path / "c.json", [talk.json]))
    first_answer = talk.last_key
    talk.last_key = talk.mapping[first_answer]["parent"]
    second_answer = talk.add_message("assistant", "A rainy city that is")
    second = import_and_count(write_json(tmp_path / "c.json", [talk.json]))
    shown = read_thread_texts("trip")[-1]
    back = import_and_count(
        write_json(tmp_path / "c.json", [{**talk.json, "current_node": first_answer}])
    )

    assert (first, second, back) == ((1, 4, 0), (1, 1, 0), (1, 0, 1))
    assert shown == "ai: A rainy city that is"
    assert read_thread_texts("trip")[-1] == "ai: A fine city that is"
    with SQLiteCheckpointer.open("x.db") as saver:
        assert [item.value.id for item in saver.history("trip") if item.branch] == [second_answer]
