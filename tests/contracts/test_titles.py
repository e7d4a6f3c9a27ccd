"""What a thread is called stands in its row, and goes with the message that it quotes."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.base import empty_checkpoint

from perdure.checkpointers import Retention, SQLiteCheckpointer
from perdure.checkpointers.titles import read_existing_head
from perdure.storage.flow import fetch_rows
from tests.backends import KEY, Place
from tests.contracts.puts import config_at, put

ASKED = HumanMessage("How do ponds freeze?", id="q1")
TOLD = AIMessage("From above.", id="a1")
MORE = HumanMessage("And rivers?", id="q2")


def said(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


def called(saver: SQLiteCheckpointer, thread: str = "t") -> str:
    """What it is called, by all that tell."""
    title = read_existing_head(saver, thread).title
    assert [head.title for head in saver.heads() if head.thread_id == thread] == [title]
    return title


def stored(saver: SQLiteCheckpointer) -> bool:
    """Whether the thread's row has a title."""
    sql = "SELECT count(*) FROM threads WHERE list_entry IS NOT NULL"
    ((titled,),) = saver.database.read(lambda: fetch_rows(sql))
    return bool(titled)


def test_the_first_message_of_a_human(saver: SQLiteCheckpointer) -> None:
    put(saver, {"n": 1}, uid="0")
    assert called(saver) == ""
    put(saver, said(TOLD, ASKED), config_at(uid="0"), uid="1")
    assert called(saver) == "How do ponds freeze?"
    put(saver, said(MORE), config_at(uid="1"), uid="2")

    assert called(saver) == "How do ponds freeze?"
    assert stored(saver)


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("  long " * 40, ("long   " * 40)[:80]),
        ("cut \ud83d", "cut ?"),
        ("é" * 90, "é" * 80),
        ("", ""),
    ],
)
def test_a_title_is_short_text(saver: SQLiteCheckpointer, text: str, title: str) -> None:
    put(saver, said(HumanMessage(text, id="q")), uid="1")

    assert called(saver) == title.strip() if len(title) < 80 else title


def test_metadata_comes_first_and_stays(saver: SQLiteCheckpointer) -> None:
    """A later title replaces it; a put without one, of another program, does not."""
    put(saver, said(ASKED), metadata={"title": "Ponds"}, uid="1")
    put(saver, said(ASKED, TOLD), config_at(uid="1"), metadata={}, uid="2")
    assert called(saver) == "Ponds"
    put(saver, said(ASKED, TOLD, MORE), config_at(uid="2"), metadata={"title": "Water"}, uid="3")

    assert called(saver) == "Water"


def test_a_message_that_says_something_else(saver: SQLiteCheckpointer) -> None:
    put(saver, said(ASKED), uid="1")
    put(saver, said(HumanMessage("[redacted]", id="q1")), config_at(uid="1"), uid="2")

    assert called(saver) == "[redacted]"


def test_a_subgraph_gives_none(saver: SQLiteCheckpointer) -> None:
    put(saver, said(MORE), ns="sub", uid="s")
    put(saver, said(ASKED), uid="1")

    assert called(saver) == "How do ponds freeze?"


def test_it_is_erased_with_its_message(saver: SQLiteCheckpointer) -> None:
    put(saver, said(ASKED, MORE), uid="1")
    saver.erase("t", ["q1"])
    assert not stored(saver)
    assert called(saver) == "And rivers?"
    put(saver, said(MORE, TOLD), config_at(uid="1"), uid="2")

    assert stored(saver)
    assert called(saver) == "And rivers?"


def test_it_outlives_what_else_is_erased(saver: SQLiteCheckpointer) -> None:
    """Also in a thread whose state has lost its first message."""
    put(saver, said(ASKED, TOLD), uid="1")
    put(saver, said(MORE), config_at(uid="1"), uid="2")
    saver.erase("t", ["a1"])
    assert stored(saver)
    put(saver, said(MORE, TOLD), config_at(uid="2"), uid="3")

    assert called(saver) == "How do ponds freeze?"


def test_a_message_that_is_none_gives_none(saver: SQLiteCheckpointer) -> None:
    put(saver, said(HumanMessage.model_construct(content=None, id="q")), uid="1")

    assert called(saver) == ""


def test_it_is_pruned_with_its_message(saver: SQLiteCheckpointer) -> None:
    put(saver, said(ASKED), uid="1")
    put(saver, said(MORE), config_at(uid="1"), uid="2")
    saver.retain(Retention(last=1, history=False))

    assert called(saver) == "And rivers?"


def test_a_title_of_the_metadata_outlives_messages(saver: SQLiteCheckpointer) -> None:
    put(saver, said(ASKED), metadata={"title": "Ponds"}, uid="1")
    saver.erase("t", ["q1"])

    assert called(saver) == "Ponds"


def test_a_copy_has_it(saver: SQLiteCheckpointer) -> None:
    put(saver, said(ASKED), uid="1")
    put(saver, said(ASKED, TOLD), config_at(uid="1"), uid="2")
    saver.copy_thread("t", "whole")
    saver.copy_thread("t", "part", checkpoint_id="1")

    assert called(saver, "whole") == called(saver, "part") == "How do ponds freeze?"


def test_it_is_sealed(place: Place) -> None:
    with place.saver(key=KEY) as saver:
        put(saver, said(ASKED), uid="1")
        ((title,),) = saver.database.read(lambda: fetch_rows("SELECT list_entry FROM threads"))
        assert called(saver) == "How do ponds freeze?"

    assert b"ponds" not in bytes(title)


def test_another_process_goes_on(place: Place) -> None:
    """It knows the title, and does not take a later message for the first."""
    with place.saver() as saver:
        put(saver, said(ASKED), uid="1")
    with place.saver() as saver:
        put(saver, said(MORE), config_at(uid="1"), uid="2")
        assert called(saver) == "How do ponds freeze?"


def test_a_cut_title_of_the_metadata_goes_with_a_message(saver: SQLiteCheckpointer) -> None:
    """Whether it quotes the message that is erased cannot be told of its first characters."""
    text = "The secret of the patient: " + "a long message that is the title, too; " * 3
    asked, metadata = HumanMessage(text, id="q"), {"title": text}
    put(saver, said(asked, TOLD), metadata=metadata, uid="1")
    saver.erase("t", ["q"])

    assert "secret" not in called(saver)
    assert not stored(saver)


def test_a_run_under_way_brings_no_erased_title_back(place: Place) -> None:
    """Its next put has the message, and stores the parent's list, which has not."""
    with place.saver() as saver, place.saver() as other:
        checkpoint: Any = empty_checkpoint()
        versions: Any = {"messages": 1, "n": 1}
        checkpoint |= {"id": "1", "channel_values": {**said(ASKED, MORE), "n": 1}}
        checkpoint["channel_versions"] = versions
        first = saver.put(config_at(), checkpoint, {"source": "input"}, versions)
        other.erase("t", ["q1"])
        later = checkpoint | {"id": "2", "channel_versions": {"messages": 1, "n": 2}}
        saver.put(first, later, {"source": "loop"}, {"n": 2})
        other.erase("t", ["q1"])

        assert called(other) == "And rivers?"


def test_a_part_of_a_thread_has_no_later_title(saver: SQLiteCheckpointer) -> None:
    """Neither a copy up to a checkpoint, nor a thread whose run with the title is deleted."""
    first = put(saver, said(ASKED), metadata={"run_id": "r0"}, uid="1")
    about = {"run_id": "r1", "title": "About rivers"}
    put(saver, said(ASKED, MORE), first, metadata=about, uid="2")
    saver.copy_thread("t", "copy", checkpoint_id="1")
    saver.delete_for_runs(["r1"])

    assert called(saver, "copy") == "How do ponds freeze?"
    assert called(saver) == "How do ponds freeze?"
