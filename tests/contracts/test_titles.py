"""The title of a thread is stored in its row, and is erased with the message that it quotes."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.base import empty_checkpoint

from perdure.checkpointers import Retention, SQLiteCheckpointer
from perdure.checkpointers.import_metadata import read_thread_head_or_raise
from perdure.checkpointers.records import decrypt_listed_title_and_encoded_metadata
from perdure.storage.flow import fetch_rows
from tests.backends import KEY, Place
from tests.contracts.puts import config_at, put

QUESTION = HumanMessage("How do ponds freeze?", id="q1")
ANSWER = AIMessage("From above.", id="a1")
SECOND_QUESTION = HumanMessage("And rivers?", id="q2")


def values_with(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


def read_title(saver: SQLiteCheckpointer, thread: str = "t") -> str:
    """Read the title of a thread, and check that `heads` returns the same title."""
    title = read_thread_head_or_raise(saver, thread).title
    assert [head.title for head in saver.heads() if head.thread_id == thread] == [title]
    return title


def is_title_stored(saver: SQLiteCheckpointer) -> bool:
    """Return whether any thread's row has a title."""
    sql, seal = "SELECT thread_id, list_entry FROM threads", saver.parts.reader.seal
    rows = saver.database.read(lambda: fetch_rows(sql))
    titles = [decrypt_listed_title_and_encoded_metadata(seal, *row)[0] for row in rows]
    return any(title is not None for title in titles)


def test_title_is_the_first_human_message(saver: SQLiteCheckpointer) -> None:
    put(saver, {"n": 1}, uid="0")
    assert read_title(saver) == ""
    put(saver, values_with(ANSWER, QUESTION), config_at(uid="0"), uid="1")
    assert read_title(saver) == "How do ponds freeze?"
    put(saver, values_with(SECOND_QUESTION), config_at(uid="1"), uid="2")

    assert read_title(saver) == "How do ponds freeze?"
    assert is_title_stored(saver)


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("  long " * 40, ("long   " * 40)[:80]),
        ("cut \ud83d", "cut ?"),
        ("é" * 90, "é" * 80),
        ("", ""),
    ],
)
def test_title_is_cut_to_80_characters_and_cleaned(
    saver: SQLiteCheckpointer, text: str, title: str
) -> None:
    put(saver, values_with(HumanMessage(text, id="q")), uid="1")

    assert read_title(saver) == title.strip() if len(title) < 80 else title


def test_title_in_metadata_takes_precedence_and_is_kept(saver: SQLiteCheckpointer) -> None:
    """A later title replaces the title. A put without a title, by another program, does not."""
    put(saver, values_with(QUESTION), metadata={"title": "Ponds"}, uid="1")
    put(saver, values_with(QUESTION, ANSWER), config_at(uid="1"), metadata={}, uid="2")
    assert read_title(saver) == "Ponds"
    put(
        saver,
        values_with(QUESTION, ANSWER, SECOND_QUESTION),
        config_at(uid="2"),
        metadata={"title": "Water"},
        uid="3",
    )

    assert read_title(saver) == "Water"


def test_title_changes_with_its_edited_message(saver: SQLiteCheckpointer) -> None:
    put(saver, values_with(QUESTION), uid="1")
    put(saver, values_with(HumanMessage("[redacted]", id="q1")), config_at(uid="1"), uid="2")

    assert read_title(saver) == "[redacted]"


def test_messages_of_a_subgraph_give_no_title(saver: SQLiteCheckpointer) -> None:
    put(saver, values_with(SECOND_QUESTION), ns="sub", uid="s")
    put(saver, values_with(QUESTION), uid="1")

    assert read_title(saver) == "How do ponds freeze?"


def test_title_is_erased_with_its_message(saver: SQLiteCheckpointer) -> None:
    put(saver, values_with(QUESTION, SECOND_QUESTION), uid="1")
    saver.erase("t", ["q1"])
    assert not is_title_stored(saver)
    assert read_title(saver) == "And rivers?"
    put(saver, values_with(SECOND_QUESTION, ANSWER), config_at(uid="1"), uid="2")

    assert is_title_stored(saver)
    assert read_title(saver) == "And rivers?"


def test_title_stays_if_another_message_is_erased(saver: SQLiteCheckpointer) -> None:
    """This also holds if the state no longer contains the first message."""
    put(saver, values_with(QUESTION, ANSWER), uid="1")
    put(saver, values_with(SECOND_QUESTION), config_at(uid="1"), uid="2")
    saver.erase("t", ["a1"])
    assert is_title_stored(saver)
    put(saver, values_with(SECOND_QUESTION, ANSWER), config_at(uid="2"), uid="3")

    assert read_title(saver) == "How do ponds freeze?"


def test_message_without_content_gives_no_title(saver: SQLiteCheckpointer) -> None:
    put(saver, values_with(HumanMessage.model_construct(content=None, id="q")), uid="1")

    assert read_title(saver) == ""


def test_title_is_pruned_with_its_message(saver: SQLiteCheckpointer) -> None:
    put(saver, values_with(QUESTION), uid="1")
    put(saver, values_with(SECOND_QUESTION), config_at(uid="1"), uid="2")
    saver.retain(Retention(last=1, history=False))

    assert read_title(saver) == "And rivers?"


def test_title_in_metadata_stays_if_messages_are_erased(saver: SQLiteCheckpointer) -> None:
    put(saver, values_with(QUESTION), metadata={"title": "Ponds"}, uid="1")
    saver.erase("t", ["q1"])

    assert read_title(saver) == "Ponds"


def test_copied_thread_has_the_title_of_its_source(saver: SQLiteCheckpointer) -> None:
    put(saver, values_with(QUESTION), uid="1")
    put(saver, values_with(QUESTION, ANSWER), config_at(uid="1"), uid="2")
    saver.copy_thread("t", "whole")
    saver.copy_thread("t", "part", checkpoint_id="1")

    assert read_title(saver, "whole") == read_title(saver, "part") == "How do ponds freeze?"


def test_title_is_encrypted_with_a_key(place: Place) -> None:
    with place.saver(key=KEY) as saver:
        put(saver, values_with(QUESTION), uid="1")
        ((list_entry,),) = saver.database.read(lambda: fetch_rows("SELECT list_entry FROM threads"))
        assert read_title(saver) == "How do ponds freeze?"

    assert b"ponds" not in bytes(list_entry)


def test_title_stays_if_another_process_continues_the_thread(place: Place) -> None:
    """The other process does not take a later message for the first one."""
    with place.saver() as saver:
        put(saver, values_with(QUESTION), uid="1")
    with place.saver() as saver:
        put(saver, values_with(SECOND_QUESTION), config_at(uid="1"), uid="2")
        assert read_title(saver) == "How do ponds freeze?"


def test_shortened_title_in_metadata_is_erased_with_any_message(saver: SQLiteCheckpointer) -> None:
    """The first characters do not tell whether the title quoted the erased message."""
    text = "The secret of the patient: " + "a long message that is the title, too; " * 3
    question, metadata = HumanMessage(text, id="q"), {"title": text}
    put(saver, values_with(question, ANSWER), metadata=metadata, uid="1")
    saver.erase("t", ["q"])

    assert "secret" not in read_title(saver)
    assert not is_title_stored(saver)


def test_active_run_does_not_restore_an_erased_title(place: Place) -> None:
    """The run still has the erased message in memory when it puts its next checkpoint."""
    with place.saver() as saver, place.saver() as other:
        checkpoint: Any = empty_checkpoint()
        versions: Any = {"messages": 1, "n": 1}
        checkpoint |= {
            "id": "1",
            "channel_values": {**values_with(QUESTION, SECOND_QUESTION), "n": 1},
        }
        checkpoint["channel_versions"] = versions
        first = saver.put(config_at(), checkpoint, {"source": "input"}, versions)
        other.erase("t", ["q1"])
        later = checkpoint | {"id": "2", "channel_versions": {"messages": 1, "n": 2}}
        saver.put(first, later, {"source": "loop"}, {"n": 2})
        other.erase("t", ["q1"])

        assert read_title(other) == "And rivers?"


def test_title_is_removed_with_the_checkpoint_that_set_it(saver: SQLiteCheckpointer) -> None:
    """Examples are a copy up to an earlier checkpoint, and a thread whose run was deleted."""
    first = put(saver, values_with(QUESTION), metadata={"run_id": "r0"}, uid="1")
    metadata = {"run_id": "r1", "title": "About rivers"}
    put(saver, values_with(QUESTION, SECOND_QUESTION), first, metadata=metadata, uid="2")
    saver.copy_thread("t", "copy", checkpoint_id="1")
    saver.delete_for_runs(["r1"])

    assert read_title(saver, "copy") == "How do ponds freeze?"
    assert read_title(saver) == "How do ponds freeze?"
