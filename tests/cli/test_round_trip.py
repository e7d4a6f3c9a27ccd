"""`perdure export` and `import` give back equal threads: messages, branches, times."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langgraph.graph import START, MessagesState, StateGraph

from perdure.checkpointers import SQLiteCheckpointer
from perdure.cli.import_lines import JsonLinesReader
from perdure.cli.import_thread import ThreadImport
from perdure.memory.thread_export import build_thread_export
from tests.backends import BACKENDS

PAIRS = [("file", "sealed"), ("sealed", "postgres"), ("postgres-sealed", "file")]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
JSON = st.dictionaries(
    st.sampled_from(["model_name", "create_time", "canvas", "usage", "x"]),
    st.none() | st.integers(0, 99) | TEXT | st.lists(TEXT, max_size=2),
    max_size=2,
)
BLOCKS = st.sampled_from(
    [
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b", "annotations": [{"x": 1}]},
        {"type": "image_url", "image_url": {"url": "https://a.example/x.png"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}},
        {"type": "thinking", "thinking": "well", "signature": "s"},
        {"type": "tool_result", "tool_use_id": "c", "content": "2"},
        {"type": "image"},
    ]
)
CONTENT: Any = TEXT | st.lists(BLOCKS, max_size=3)
PLAIN = HumanMessage("")
MADE = HumanMessage("", response_metadata={"model_name": None})
SAME_TEXT = [  # three messages of one id and one text, two of them on branches
    *((0, 0, MADE), (0, 0, PLAIN), (0, 1, MADE), (0, 0, PLAIN), (2, 0, PLAIN), (2, 0, PLAIN)),
    (0, 3, PLAIN),
]
CALL = {"name": "depth", "args": {"m": 1}, "id": "call", "type": "tool_call"}
USAGE = {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}


@st.composite
def messages(draw: st.DrawFn) -> BaseMessage:
    """A message of any kind, with fields of any kind."""
    kind: Any = draw(
        st.sampled_from(
            [
                *(HumanMessage, AIMessage, AIMessage, SystemMessage, ToolMessage),
                *(ChatMessage, FunctionMessage, AIMessageChunk),
            ]
        )
    )
    fields: dict[str, Any] = {"content": draw(CONTENT)}
    if draw(st.booleans()):
        fields |= {"additional_kwargs": draw(JSON), "response_metadata": draw(JSON)}
    own: dict[Any, dict[str, Any]] = {
        ToolMessage: {"tool_call_id": "call", "status": "error", "artifact": {"rows": [1]}},
        ChatMessage: {"role": "critic"},
        FunctionMessage: {"name": "depth"},
        AIMessage: {"tool_calls": draw(st.sampled_from([[], [CALL]])), "usage_metadata": USAGE},
        HumanMessage: {"name": draw(st.sampled_from([None, "ann"]))},
    }
    return kind(**fields, **own.get(kind, {}))  # type: ignore[no-any-return]


def talked(saver: SQLiteCheckpointer, steps: list[tuple[int, int, BaseMessage]]) -> None:
    """A thread: each step follows a checkpoint, and says, edits or removes a message."""
    builder: Any = StateGraph(MessagesState)
    builder.add_node("say", lambda state: {})
    builder.add_edge(START, "say")
    graph = builder.compile(checkpointer=saver)
    config: Any = {"configurable": {"thread_id": "t"}}
    ends, numbers = [config], count()
    for back, edits, message in steps:
        at = ends[max(0, len(ends) - 1 - back)]
        there = graph.get_state(at).values.get("messages", [])
        update = message.model_copy(update={"id": f"m{next(numbers)}"})
        if there and edits:
            other = there[edits % len(there)].id
            update = RemoveMessage(other) if edits > 3 else update.model_copy(update={"id": other})
        ends.append(graph.update_state(at, {"messages": [update]}, as_node="say"))


def ways(saver: SQLiteCheckpointer) -> list[list[BaseMessage]]:
    """What was said on the way to the head, and to the end of each branch that goes elsewhere."""
    infos = saver.checkpoints("t", checkpoint_ns="")
    inner = {info.parent_id for info in infos}
    ends = [info for info in infos if info.is_branch and info.checkpoint_id not in inner]
    ends += [info for info in infos if info.is_head]
    found = []
    for info in reversed(ends):
        said = saver.history("t", checkpoint_id=info.checkpoint_id)
        found.append([*{item.value.id: item.value for item in said}.values()])
    out = found[:1]
    for way in found[1:]:
        if all(way == other or way != other[: len(way)] for other in found) and way not in out:
            out.append(way)
    return out


def taken(saver: SQLiteCheckpointer, line: dict[str, Any]) -> None:
    """Import a line of an export."""
    lines = JsonLinesReader("x")
    lines.add_conversation("1", json.loads(json.dumps(line)))
    for talk in lines.build_conversations():
        assert talk.problems == []
        if talk.nodes:
            ThreadImport(saver, talk.id, talk).store_new_messages()


@pytest.mark.parametrize(("source", "target"), PAIRS)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 0, 0, 1, 2, 5]),
            st.integers(-9, 5).map(lambda n: max(0, n)),
            messages(),
        ),
        min_size=1,
        max_size=9,
    )
)
@example(SAME_TEXT)
def test_a_thread_comes_back_equal(source: str, target: str, steps: Any) -> None:
    """Every message of every branch, field for field; exported again, the text is the same."""
    with (
        TemporaryDirectory() as old,
        TemporaryDirectory() as new,
        BACKENDS[source](Path(old)) as here,
        BACKENDS[target](Path(new)) as there,
    ):
        talked(here, steps)
        line = build_thread_export(here, "t")
        taken(there, line)
        if not line["messages"]:
            return

        assert ways(here) == ways(there)
        assert line == build_thread_export(there, "t")
        taken(there, line)
        assert line == build_thread_export(there, "t")
