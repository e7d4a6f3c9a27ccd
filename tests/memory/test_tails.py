"""Tails: what was said on other threads can be recalled before memories are formed of it."""

from __future__ import annotations

import asyncio
import logging
import operator
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage, SystemMessage
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.graph import START, StateGraph

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ConfigurationError
from perdure.memory.collection.collection import Collection
from perdure.memory.effects import arun, run
from perdure.memory.extraction import Extraction
from perdure.memory.forming import tails as tails_module
from perdure.memory.forming.tails import Tails
from perdure.memory.gate import Gate
from perdure.stores import Provenance, SQLiteStore
from tests.memory.threads import ANN, Graph, graph_of, kept, on, said_by, say, user

BO = ("memories", "bo")


class Talk:
    """A graph, its extraction, and what is not yet formed of it."""

    def __init__(self, saver: SQLiteCheckpointer, store: SQLiteStore) -> None:
        self.saver, self.store = saver, store
        self.graph: Graph = graph_of(saver, answers=False)
        self.extraction = Extraction(saver, store)

    def say(self, thread_id: str, *texts: str, name: str = "ann") -> None:
        say(self.graph, thread_id, *texts)
        self.extraction.note(thread_id, user(name))

    def tail(self, *namespaces: tuple[str, ...], config: Any = None, **options: Any) -> list[str]:
        tails = Tails(self.extraction, **options)
        return said_by(run(tails.waiting(namespaces or [ANN], config)))


@pytest.fixture
def talk(file_saver: SQLiteCheckpointer, tmp_path: Path) -> Iterator[Talk]:
    with SQLiteStore.open(tmp_path / "plain.db") as store:
        yield Talk(file_saver, store)


def placed(memory: Any) -> Provenance:
    """Where a memory comes from; what waits is said to be as new as the newest of it."""
    assert memory.provenance.at is not None
    source: Provenance = replace(memory.provenance, at=None)
    return source


def test_what_waits_is_there_and_in_no_store(talk: Talk) -> None:
    """What was said and is not formed yet comes as the memories it will be, oldest first."""
    talk.say("t", "I like tea.", "I like Ghent.")
    tails = run(Tails(talk.extraction).waiting([ANN]))
    before = [(each.key, each.value, placed(each)) for each in tails]
    assert kept(talk.store) == []
    talk.extraction.extract("t", user())
    after = [(each.key, each.value, placed(each)) for each in kept(talk.store)]

    assert sorted(before, key=lambda each: each[0]) == after
    assert [memory.text for memory in tails] == ["user: I like tea.", "user: I like Ghent."]
    assert talk.tail() == []


def test_only_what_is_not_formed_waits(talk: Talk) -> None:
    """What is formed is found in the store, so it is not among what waits."""
    talk.say("t", "I like tea.")
    talk.extraction.extract("t", user())
    talk.say("t", "I like Ghent.")

    assert talk.tail() == ["user: I like Ghent."]


def test_the_run_s_own_thread_is_left_out(talk: Talk) -> None:
    """The thread that asks is shown to its model anyway."""
    talk.say("t", "I like tea.")
    talk.say("u", "I like Ghent.")

    assert talk.tail(config=on("t")) == ["user: I like Ghent."]


def test_nobody_else_s_threads_are_looked_at(talk: Talk) -> None:
    """What waits belongs to a namespace, and is shown for that or a prefix of it only."""
    talk.say("t", "I like tea.")
    talk.say("u", "I like Ghent.", name="bo")

    assert talk.tail(ANN) == ["user: I like tea."]
    assert talk.tail(BO) == ["user: I like Ghent."]
    assert talk.tail(("memories",)) == ["user: I like tea.", "user: I like Ghent."]
    assert talk.tail(ANN, ("memories",)) == ["user: I like tea.", "user: I like Ghent."]
    assert talk.tail(("memories", "an")) == []


def test_the_newest_are_looked_at(talk: Talk) -> None:
    """Of many threads those where something was said last, and of them the newest messages."""
    for number in range(4):
        talk.say(f"t{number}", f"I like the number {number}.", f"I like {number} more.")

    assert talk.tail(threads=2) == [
        "user: I like the number 2.",
        "user: I like 2 more.",
        "user: I like the number 3.",
        "user: I like 3 more.",
    ]
    assert talk.tail(messages=3) == [
        "user: I like 2 more.",
        "user: I like the number 3.",
        "user: I like 3 more.",
    ]


def test_what_the_gate_will_not_keep_is_not_shown(talk: Talk) -> None:
    """Secrets are held back, contacts blotted out, and what was deleted stays away."""
    talk.say("t", "My password is hunter2-Swordfish!", "Mail ann@example.com", "I like tea.")

    tail = talk.tail()

    assert tail[-1] == "user: I like tea."
    assert "hunter2" not in str(tail)
    assert "ann@example.com" not in str(tail)


def test_a_thread_that_was_deleted_waits_for_nothing(talk: Talk) -> None:
    """A thread that is gone by now has no tail, and keeps no other from being shown."""
    talk.say("t", "I like tea.")
    talk.say("u", "I like Ghent.")
    talk.saver.delete_thread("u")

    assert talk.tail() == ["user: I like tea."]


def test_the_async_form_does_the_same(talk: Talk) -> None:
    """Awaited, what waits is the same."""
    talk.say("t", "I like tea.")

    assert said_by(asyncio.run(arun(Tails(talk.extraction).waiting([ANN])))) == talk.tail()


def broken(talk: Talk, thread_id: str, name: str = "ann") -> None:
    """A thread that waits, whose messages are none."""
    config: Any = {"configurable": {"thread_id": thread_id, "checkpoint_ns": ""}}
    checkpoint: Any = {
        **empty_checkpoint(),
        "channel_values": {"messages": [{"not": "a message"}]},
        "channel_versions": {"messages": 1},
    }
    talk.saver.put(config, checkpoint, {}, {"messages": 1})
    talk.extraction.note(thread_id, user(name))


def test_a_thread_that_cannot_be_read_keeps_no_other_from_being_shown(
    talk: Talk, caplog: pytest.LogCaptureFixture
) -> None:
    """It gives nothing, and the log says why, once; when it can be read, it is shown again."""
    talk.say("t", "I like tea.")
    broken(talk, "b")
    broken(talk, "c")
    tails = Tails(talk.extraction)
    with caplog.at_level(logging.WARNING, "perdure"):
        shown = [said_by(run(tails.waiting([ANN]))) for _ in range(3)]

    assert shown == [["user: I like tea."]] * 3
    assert sorted(each.getMessage()[:35] for each in caplog.records) == [
        "nothing is recalled of thread 'b', ",
        "nothing is recalled of thread 'c', ",
    ]
    assert "InvalidMessages" in caplog.text
    talk.saver.delete_thread("b")
    talk.say("b", "I like Ghent.")
    assert said_by(run(tails.waiting([ANN]))) == ["user: I like tea.", "user: I like Ghent."]


def test_what_a_developer_did_wrong_is_raised(talk: Talk) -> None:
    """A fault of the configuration is none of a thread's."""
    talk.say("t", "I like tea.")

    class Wrong(Gate):
        def judge(self, *given: Any, **options: Any) -> Any:
            raise ConfigurationError("no such model")

    with pytest.raises(ConfigurationError, match="no such model"):
        run(Tails(Extraction(talk.saver, talk.store, gate=Wrong())).waiting([ANN]))


def test_what_is_made_is_not_made_again_until_the_thread_changes(talk: Talk) -> None:
    """The gate is asked of each turn once, however often it is shown, and whatever comes after."""
    asked: list[str] = []
    gate = Gate([lambda candidate: asked.append(candidate.text)])
    extraction = Extraction(talk.saver, talk.store, gate=gate)
    tails = Tails(extraction)

    def shown() -> list[str]:
        return said_by(run(tails.waiting([ANN])))

    talk.say("t", "I like tea.")
    assert shown() == shown() == ["user: I like tea."]
    talk.say("t", "I like Ghent.")
    assert shown() == shown() == ["user: I like tea.", "user: I like Ghent."]
    assert asked == ["user: I like tea.", "user: I like Ghent."]
    talk.graph.invoke({"messages": [RemoveMessage("I like tea.")]}, on("t"))
    assert shown() == ["user: I like tea.", "user: I like Ghent."]
    talk.saver.erase("t", ["I like Ghent."])
    assert shown() == ["user: I like tea."], "nobody is shown what was erased"
    extraction.extract("t", user())
    assert shown() == []


def test_no_memory_is_dropped_however_little_is_remembered(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number of callers, on any number of threads, are each shown all of it."""
    monkeypatch.setattr(tails_module, "_REMEMBERED", 3)
    for thread in range(4):
        talk.say(f"t{thread}", *(f"Number {thread}{turn} is a fine one." for turn in range(5)))
    tails = Tails(talk.extraction)
    counts: list[int] = []

    def look() -> None:
        counts.extend(len(run(tails.waiting([ANN]))) for _ in range(5))

    lookers = [threading.Thread(target=look) for _ in range(4)]
    for looker in lookers:
        looker.start()
    for looker in lookers:
        looker.join()

    assert counts == [20] * 20


def test_of_a_long_thread_only_the_end_is_read(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it is, so many messages are read as can be shown, and they are the newest."""
    said = [
        HumanMessage(f"Number {number} is a fine one.", id=f"m{number}") for number in range(60)
    ]
    talk.graph.invoke({"messages": said[:40]}, on("t"))
    talk.extraction.extract("t", user())
    talk.graph.invoke({"messages": said[40:]}, on("t"))
    talk.extraction.note("t", user())
    read: list[int] = []
    history = talk.saver.history

    def counted(*given: Any, **options: Any) -> Any:
        items = history(*given, **options)
        read.append(len(items))
        return items

    monkeypatch.setattr(talk.saver, "history", counted)
    for most in (3, 20, 30):
        expected = [f"user: Number {number} is a fine one." for number in range(40, 60)]
        assert expected[-most:] == talk.tail(messages=most)

    assert read == [5, 22, 32]


def test_what_repeats_the_system_prompt_of_a_long_thread_is_not_shown(talk: Talk) -> None:
    """The gate knows what an assistant was shown, however long ago."""
    system = "You keep the opening hours of the museum: from nine to five, and on Sundays never."
    said = [
        SystemMessage(system, id="s"),
        *(HumanMessage(f"Hm {n}?", id=f"h{n}") for n in range(9)),
    ]
    echo = AIMessage("The opening hours of the museum: from nine to five, and on Sundays never.")
    talk.graph.invoke({"messages": [*said, echo, HumanMessage("I like tea.", id="t")]}, on("t"))
    talk.extraction.note("t", user())

    assert talk.tail(messages=2) == ["user: I like tea."]


def test_a_thread_that_was_forked_far_back_is_read_whole(talk: Talk) -> None:
    """Where the newest messages do not tell which of them are new, all of them do."""
    talk.say("t", "I like tea.", "I like Ghent.")
    old = talk.graph.get_state(on("t")).config
    talk.say("t", *(f"Number {number} is a fine one." for number in range(60)))
    talk.extraction.extract("t", user())
    talk.graph.invoke({"messages": [HumanMessage("I like boats.", id="b")]}, old)
    talk.extraction.note("t", user())

    assert talk.tail(messages=1) == ["user: I like boats."]
    assert talk.tail() == ["user: I like boats."]


def test_messages_without_ids_are_told_apart(talk: Talk) -> None:
    """Of a thread whose messages have no ids the whole is read, so each is what it will be."""

    class State(TypedDict):
        messages: Annotated[list[Any], operator.add]

    builder: StateGraph[Any, None, Any, Any] = StateGraph(State)
    builder.add_node("listen", lambda state: {})
    builder.add_edge(START, "listen")
    graph = builder.compile(checkpointer=talk.saver)
    for number, text in enumerate(("I like tea.", "I like Ghent.", "I like tea.", "I like tea.")):
        said = HumanMessage(text, additional_kwargs={"number": number})
        graph.invoke({"messages": [said]}, on("t"))
    talk.extraction.note("t", user())
    shown = [memory.key for memory in run(Tails(talk.extraction, messages=1).waiting([ANN]))]
    talk.extraction.extract("t", user())

    assert [each.key for each in kept(talk.store) if each.provenance.position == 3] == shown


def test_a_long_message_is_shown_by_its_beginning(talk: Talk) -> None:
    """Of a file that was pasted, the first pieces are shown until it is formed."""
    talk.say("t", " ".join(f"Sentence number {number} is here." for number in range(2_000)))

    shown = talk.tail()

    assert len(shown) == 3
    assert shown[0].startswith("user: Sentence number 0 is here.")
    assert sum(map(len, shown)) < 5_000


def test_what_there_is_no_room_for_is_shown_once_there_is(talk: Talk) -> None:
    """A full namespace is no verdict on what was said."""
    for number in range(2):
        talk.store.put(ANN, f"k{number}", {"text": f"old {number}", "kind": "fact"})
    tails = Tails(Extraction(talk.saver, talk.store, gate=Gate(max_items=2)))
    talk.say("t", "I like tea.")
    before = run(tails.waiting([ANN]))
    talk.store.delete(ANN, "k0")

    assert before == []
    assert said_by(run(tails.waiting([ANN]))) == ["user: I like tea."]


@pytest.mark.parametrize("options", [{"threads": 0}, {"messages": "many"}])
def test_numbers_that_cannot_be_are_refused(talk: Talk, options: Any) -> None:
    """Tails with a number that makes no sense are not made."""
    with pytest.raises(ConfigurationError, match="expected a whole number"):
        Tails(talk.extraction, **options)


def test_messages_say_when_they_were_said(talk: Talk) -> None:
    """A memory that waits holds from when it was said, so time cues find it."""
    at = {"create_time": "2024-05-01T10:00:00+00:00"}
    say(talk.graph, "t", HumanMessage("I like tea.", id="a", response_metadata=at))
    talk.extraction.note("t", user())
    [memory] = run(Tails(talk.extraction).waiting([ANN]))

    assert memory.valid_from is not None
    assert memory.valid_from.isoformat() == at["create_time"]


def test_what_is_deleted_meanwhile_does_not_come_back(talk: Talk) -> None:
    """A thread that was looked at before says no more what was deleted since."""
    talk.say("a", "I own a canoe called Nutshell", "I like figs")
    talk.say("b", "I own a canoe called Nutshell")
    talk.extraction.extract("b", user())
    tails = Tails(talk.extraction)
    before = said_by(run(tails.waiting([ANN])))
    facts = Collection(talk.store)
    [same] = [each for each in facts.list(config=user()) if "Nutshell" in each.text]
    facts.delete(same.key, config=user())
    after = said_by(run(tails.waiting([ANN])))

    assert [text for text in before if "Nutshell" in text]
    assert [text for text in after if "Nutshell" in text] == []
    assert [text for text in after if "figs" in text]
