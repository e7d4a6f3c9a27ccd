"""`perdure export` and `import` restore equal threads, with messages, branches and times."""

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
from perdure.cli.importing.json_lines import JsonLinesReader
from perdure.cli.importing.thread_import import ThreadImport
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
    """Generate a message of any kind, with fields of any kind."""
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


def write_thread(saver: SQLiteCheckpointer, steps: list[tuple[int, int, BaseMessage]]) -> None:
    """Write a thread; each step follows a checkpoint and adds, edits or removes a message."""
    builder: Any = StateGraph(MessagesState)
    builder.add_node("say", lambda state: {})
    builder.add_edge(START, "say")
    graph = builder.compile(checkpointer=saver)
    config: Any = {"configurable": {"thread_id": "t"}}
    ends, numbers = [config], count()
    for steps_back, edits, message in steps:
        parent = ends[max(0, len(ends) - 1 - steps_back)]
        messages = graph.get_state(parent).values.get("messages", [])
        update = message.model_copy(update={"id": f"m{next(numbers)}"})
        if messages and edits:
            edited_id = messages[edits % len(messages)].id
            update = (
                RemoveMessage(edited_id)
                if edits > 3
                else update.model_copy(update={"id": edited_id})
            )
        ends.append(graph.update_state(parent, {"messages": [update]}, as_node="say"))


def read_branch_messages(saver: SQLiteCheckpointer) -> list[list[BaseMessage]]:
    """Return the messages up to the head, and up to the end of each branch that differs."""
    infos = saver.checkpoints("t", checkpoint_ns="")
    inner = {info.parent_id for info in infos}
    ends = [info for info in infos if info.is_branch and info.checkpoint_id not in inner]
    ends += [info for info in infos if info.is_head]
    paths = []
    for info in reversed(ends):
        items = saver.history("t", checkpoint_id=info.checkpoint_id)
        paths.append([*{item.value.id: item.value for item in items}.values()])
    distinct_paths = paths[:1]
    for path in paths[1:]:
        if (
            all(path == other or path != other[: len(path)] for other in paths)
            and path not in distinct_paths
        ):
            distinct_paths.append(path)
    return distinct_paths


def import_line(saver: SQLiteCheckpointer, line: dict[str, Any]) -> None:
    """Import a line of an export."""
    reader = JsonLinesReader("x")
    reader.add_conversation("1", json.loads(json.dumps(line)))
    for conversation in reader.build_conversations():
        assert conversation.problems == []
        if conversation.nodes:
            ThreadImport(saver, conversation.id, conversation).store_new_messages()


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
def test_exported_thread_is_imported_with_equal_messages_and_branches(
    source: str, target: str, steps: Any
) -> None:
    """Every message of every branch is equal field by field; a second export has the same text."""
    with (
        TemporaryDirectory() as old,
        TemporaryDirectory() as new,
        BACKENDS[source](Path(old)) as exported,
        BACKENDS[target](Path(new)) as imported,
    ):
        write_thread(exported, steps)
        line = build_thread_export(exported, "t")
        import_line(imported, line)
        if not line["messages"]:
            return

        assert read_branch_messages(exported) == read_branch_messages(imported)
        assert line == build_thread_export(imported, "t")
        import_line(imported, line)
        assert line == build_thread_export(imported, "t")
