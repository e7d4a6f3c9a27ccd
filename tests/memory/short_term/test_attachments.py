"""Attachments: their names and texts become part of the memory, and binary data does not."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage

from perdure import SQLiteCheckpointer
from perdure.memory import Extraction, recall
from perdure.memory.quotation import read_message_text, render_message
from perdure.stores import SQLiteStore
from tests.memory.extraction_threads import (
    ANN,
    build_graph,
    read_memory_texts,
    send_messages,
    user_config,
)

PNG = base64.b64encode(bytes(range(256)) * 3).decode()
SIGNED = "https://bucket.example/u/7f.png?X-Amz-Signature=5d41402abc4b2a76b9719d911017c592"
DATA = f"data:image/png;base64,{PNG}"
LETTER = "The tenant pays 900 euros on the first of each month."

BLOCKS: list[tuple[dict[str, Any], str]] = [
    # langchain's standard blocks
    ({"type": "image", "base64": PNG, "mime_type": "image/png"}, ""),
    ({"type": "image", "url": SIGNED, "extras": {"alt": "A red canoe"}}, "[image A red canoe]"),
    ({"type": "audio", "base64": PNG, "extras": {"transcript": "Call Eva"}}, "Call Eva"),
    ({"type": "video", "url": SIGNED, "title": "Our  trip\n"}, "[video Our trip]"),
    ({"type": "file", "base64": PNG, "extras": {"filename": "lease.pdf"}}, "[file lease.pdf]"),
    (
        {"type": "text-plain", "mime_type": "text/plain", "title": "lease.txt", "text": LETTER},
        f"[text-plain lease.txt]\n{LETTER}",
    ),
    ({"type": "non_standard", "value": {"type": "x", "caption": "Ghent"}}, "[non_standard Ghent]"),
    # langchain's earlier ones
    (
        {
            **{"type": "file", "source_type": "base64", "data": PNG},
            "metadata": {"filename": "a.pdf"},
        },
        "[file a.pdf]",
    ),
    ({"type": "file", "source_type": "text", "text": LETTER}, LETTER),
    # OpenAI's
    ({"type": "input_text", "text": "Which rent?"}, "Which rent?"),
    ({"type": "input_file", "filename": "rent.csv", "file_data": DATA}, "[file rent.csv]"),
    ({"type": "file", "file": {"filename": "b.pdf", "file_data": DATA}}, "[file b.pdf]"),
    ({"type": "image_url", "image_url": {"url": DATA}}, ""),
    ({"type": "image_url", "image_url": SIGNED}, ""),
    # Anthropic's
    (
        {
            **{"type": "document", "title": "Lease", "context": "Signed in May"},
            "source": {"type": "text", "media_type": "text/plain", "data": LETTER},
        },
        f"[document Lease, Signed in May]\n{LETTER}",
    ),
    (
        {
            **{"type": "document", "title": "Lease"},
            "source": {"type": "base64", "media_type": "application/pdf", "data": PNG},
        },
        "[document Lease]",
    ),
    (
        {
            "type": "document",
            "source": {"type": "content", "content": [{"type": "text", "text": LETTER}]},
        },
        LETTER,
    ),
    # blocks without a text of a person
    ({"type": "thinking", "thinking": "Hm", "signature": PNG}, ""),
    ({"type": "non_standard", "value": {"type": "reasoning", "text": "Hm"}}, ""),
    ({"type": "tool_use", "id": "c1", "name": "look", "input": {"title": "x"}}, ""),
    ({"type": "image_generation_call", "result": PNG, "name": "x"}, ""),
    # a name that is an address, or the file itself
    ({"type": "file", "name": SIGNED}, "[file https://bucket.example/u/7f.png]"),
    ({"type": "file", "name": DATA}, ""),
    ({"type": "file", "name": PNG}, ""),
]
RESULTS: list[tuple[dict[str, Any], str]] = [
    ({"type": "server_tool_result", "tool_call_id": "c", "output": "It is 20 °C"}, "It is 20 °C"),
    (
        {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "Rain"}]},
        "Rain",
    ),
    (
        {
            "type": "web_search_tool_result",
            "content": [{"title": "Ferries", "url": SIGNED, "encrypted_content": PNG}],
        },
        "[web_search_tool_result Ferries]",
    ),
    (
        {
            **{"type": "search_result", "title": "Ferries", "source": SIGNED},
            "content": [{"type": "text", "text": "The last one is at nine"}],
        },
        "[search_result Ferries]\nThe last one is at nine",
    ),
    ({"type": "bash_code_execution_tool_result", "content": {"stdout": "42\n"}}, "42"),
    ({"type": "tool_result", "content": PNG}, ""),
]


@pytest.mark.parametrize(("block", "expected_text"), BLOCKS, ids=[str(b)[:60] for b, _ in BLOCKS])
@pytest.mark.parametrize("kind", [HumanMessage, AIMessage])
def test_message_text_contains_names_and_texts_of_attachments(
    kind: Any, block: dict[str, Any], expected_text: str
) -> None:
    """Names in brackets and texts follow the text of the message.

    Bytes and signed addresses are left out.
    """
    message = kind([{"type": "text", "text": "Please read this."}, block])

    assert read_message_text(message) == "\n".join(
        filter(None, ("Please read this.", expected_text))
    )
    assert PNG not in render_message(message)
    assert "Signature" not in render_message(message)
    indented = expected_text.replace("\n", "\n    ")
    assert indented in render_message(message)


@pytest.mark.parametrize(("block", "expected_text"), RESULTS, ids=[str(b)[:60] for b, _ in RESULTS])
def test_tool_result_block_is_text_of_the_assistant_not_of_the_user(
    block: dict[str, Any], expected_text: str
) -> None:
    assert read_message_text(AIMessage([block])) == expected_text
    assert read_message_text(HumanMessage([block])) == ""
    assert expected_text.replace("\n", "\n    ") in render_message(AIMessage([block]))
    assert not expected_text or expected_text not in render_message(HumanMessage([block]))
    assert read_message_text(ToolMessage([block], tool_call_id="c")) == expected_text


def test_transcript_of_an_audio_answer_is_its_text() -> None:
    """OpenAI puts the transcript beside the content."""
    audio = {"id": "a", "data": PNG, "transcript": "It rains in Oslo", "expires_at": 1}

    assert (
        read_message_text(AIMessage("", additional_kwargs={"audio": audio})) == "It rains in Oslo"
    )


def test_data_url_within_a_text_is_removed() -> None:
    """The rest of the text stays unchanged, as when a picture was pasted into Markdown."""
    text = f"Look ![boat]({DATA} ) there"
    contents: list[Any] = [text, [text], [{"type": "text", "text": text}]]
    for content in contents:
        assert read_message_text(HumanMessage(content)) == "Look ![boat]( ) there"
    plain = "metadata:a/b,c and data:2024/05/01,d and the data: x, y " + "z" * 300
    assert read_message_text(HumanMessage(plain)) == plain


def test_deeply_nested_or_malformed_blocks_are_read_without_error() -> None:
    deep: dict[str, Any] = {"type": "x", "text": "end"}
    for _ in range(5_000):
        deep = {"type": "x", "content": [deep]}
    odd = {"type": ["x"], "name": 7, "title": None, "text": b"bytes", "content": [1, None, "x"]}

    assert read_message_text(HumanMessage([deep, odd, {}])) == ""
    for long in ("https://" * 50_000, "data:" * 50_000, "data:a/b;" * 50_000):
        assert (
            len(read_message_text(HumanMessage([{"type": "file", "name": long}]))) <= len(long) + 7
        )


# -- memories


@pytest.fixture
def extract_from_messages() -> Any:
    """A function that stores messages in a thread, extracts memories, and returns the store."""

    def extract(*messages: BaseMessage) -> SQLiteStore:
        with SQLiteCheckpointer.open(":memory:") as saver:
            send_messages(build_graph(saver, answers=False), "t", *messages)
            Extraction(saver, store).extract("t", user_config())
        return store

    with SQLiteStore.open(":memory:", index=None) as store:
        yield extract


def test_search_finds_attachments_by_name_and_by_text(extract_from_messages: Any) -> None:
    """A message without text gets a memory too, unless all it has is a picture without a name."""
    lease, picture = BLOCKS[5][0], {"type": "image", "base64": PNG, "mime_type": "image/png"}
    store = extract_from_messages(
        HumanMessage([{"type": "text", "text": "Keep this"}, lease], id="m1"),
        HumanMessage([{"type": "image", "url": SIGNED, "alt": "A red canoe"}], id="m2"),
        HumanMessage([picture], id="m3"),
    )

    assert sorted(read_memory_texts(store)) == [
        f"user: Keep this\n[text-plain lease.txt]\n{LETTER}",
        "user: [image A red canoe]",
    ]
    for query, word in (("How much does the tenant pay?", "900 euros"), ("canoe", "red canoe")):
        assert word in recall(query, store=store, config=user_config()).memories[0].text


def test_changed_file_name_of_an_attachment_renews_its_memory() -> None:
    with (
        SQLiteCheckpointer.open(":memory:") as saver,
        SQLiteStore.open(":memory:", index=None) as store,
    ):
        graph, extraction = build_graph(saver, answers=False), Extraction(saver, store)
        for name in ("lease.pdf", "lease-2.pdf"):
            content: Any = [{"type": "text", "text": "Keep this"}, {"type": "file", "name": name}]
            send_messages(graph, "t", HumanMessage(content, id="m1"))
            extraction.extract("t", user_config())

        assert read_memory_texts(store) == ["user: Keep this\n[file lease-2.pdf]"]
        assert len(store.history(ANN, store.search(ANN)[0].key)) == 2


# -- no binary data


binary = st.binary(min_size=60, max_size=300).map(lambda data: base64.b64encode(data).decode())
addresses = binary.map(lambda text: f"data:image/png;base64,{text}")
signed = binary.map(lambda text: f"https://host.example/a/b.png?sig={text}")
KEYS = """type data base64 url file_data image_url filename name title alt caption context text
source content output outputs value extras metadata file transcript result encrypted_content"""
KINDS = """image file audio text-plain document text image_url input_file input_image tool_result
server_tool_result non_standard base64 anything"""
keys, kinds = st.sampled_from(KEYS.split()), st.sampled_from(KINDS.split())
leaves = binary | addresses | signed | binary.map(str.encode) | st.integers() | st.none() | kinds
parts = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=5).flatmap(
            lambda part: kinds.map(lambda kind: {**part, "type": kind})
        )
    ),
    max_leaves=12,
)
blocks = st.dictionaries(keys, parts, max_size=6).flatmap(
    lambda part: kinds.filter(lambda kind: kind != "text").map(lambda kind: {**part, "type": kind})
)


def find_base64_texts(value: Any) -> list[str]:
    """Return the base64 texts in a part of a block."""
    if isinstance(value, bytes):
        return [value.decode()]
    if isinstance(value, str):
        return [value.rpartition("base64,")[2].rpartition("sig=")[2]] if len(value) > 70 else []
    if isinstance(value, dict):
        value = list(value.values())
    return (
        [text for part in value for text in find_base64_texts(part)]
        if isinstance(value, list)
        else []
    )


@given(st.lists(blocks, min_size=1, max_size=3), st.sampled_from([HumanMessage, AIMessage]))
def test_message_text_never_contains_bytes_of_a_file(content: list[Any], kind: Any) -> None:
    """No position of a file in the blocks of a message makes a difference."""
    rendered = read_message_text(kind(content)) + render_message(kind(content))

    assert not [text for text in find_base64_texts(content) if text[:24] in rendered]
    assert "sig=" not in rendered
    json.dumps(rendered)
