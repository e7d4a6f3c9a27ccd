"""Estimates of tokens for texts of all kinds, and for media by type and size."""

# ruff: noqa: RUF001 - letters of other alphabets are meant
from __future__ import annotations

import base64
import hashlib
import json
import uuid
import warnings
from importlib import import_module
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

from perdure.memory.short_term.token_estimates import estimate_text_tokens
from perdure.memory.short_term.tokens import count_tokens, token_counter
from perdure.memory.short_term.trim import trim

with warnings.catch_warnings():  # its way to read its files is deprecated in Python 3.11
    warnings.simplefilter("ignore", DeprecationWarning)
    O200K = import_module("bpe_openai").get_encoding("o200k_base")

RANDOM = Random(7)
ROWS = [(i, RANDOM.randrange(10**6), round(RANDOM.random() * 100, 4)) for i in range(60)]
UUIDS = [str(uuid.UUID(int=RANDOM.getrandbits(128))) for _ in range(30)]

TEXTS = {
    "prose": "The doctor called on Tuesday and moved the appointment to half past three. " * 5,
    "chat": "hey can you tell me what the weather will be like tomorrow? thanks! " * 5,
    "csv": "\n".join(f"{i};{amount};2024-01-{i % 28 + 1:02};{share}" for i, amount, share in ROWS),
    "tsv": "\n".join(f"{i}\t{amount}\topen\t{share}" for i, amount, share in ROWS),
    "json of numbers": json.dumps([[amount / 7, share] for _, amount, share in ROWS]),
    "json of records": json.dumps([{"id": i, "price": share, "ok": True} for i, _, share in ROWS]),
    "json of texts": json.dumps([{"title": "Report", "id": value} for value in UUIDS]),
    "uuids": " ".join(UUIDS),
    "hashes": "\n".join(hashlib.sha256(value.encode()).hexdigest() for value in UUIDS),
    "log": "\n".join(
        f"2026-01-02T03:04:{i:02}.123Z INFO worker[{amount}]: GET /api/v1/users/{amount} 200"
        for i, amount, _ in ROWS
    ),
    "addresses": "\n".join(f"10.{i}.{amount % 256}.{i * 3 % 256}" for i, amount, _ in ROWS),
    "python": "def f(x):\n    return [y for y in range(x) if y % 2 == 0]\n" * 8,
    "symbols": "x=[(a[i]-b[j])**2 for i,j in zip(p,q)];y={k:v for k,v in m.items()}\n" * 8,
    "html": '<div class="a b"><span>x</span></div>\n' * 20,
    "formula": r"\frac{\partial f}{\partial x} = \sum_{i=0}^{n} \alpha_i x^{i-1} " * 10,
    "table": "\n".join(f"| {i} | {share:.2f} | yes | a |" for i, _, share in ROWS),
    "emoji": "🎉🚀👍🏽😀🇩🇪" * 20,
    "emoji in text": "Great job 🎉🎉 see you 😀! " * 10,
    "joined emoji": "👨‍👩‍👧‍👦👩🏽‍💻" * 10,
    "German": "Die nächste Sitzung findet am Dienstag um drei Uhr statt. " * 5,
    "Chinese": "我们公司在2023年的净利润增长了百分之十二，主要来自海外市场的销售。" * 5,
    "Russian": "Следующая встреча состоится во вторник в три часа дня. " * 5,
    "Hindi": "अगली बैठक मंगलवार को दोपहर तीन बजे होगी। " * 5,
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_estimate_is_near_real_token_count(name: str) -> None:
    """The estimate for each kind of text is between 0.75 and 2.5 of the real number."""
    text = TEXTS[name]

    assert 0.75 <= estimate_text_tokens(text) / len(O200K.encode_ordinary(text)) <= 2.5


@given(st.text(max_size=200))
def test_text_estimate_is_between_quarter_and_two_tokens_per_byte(text: str) -> None:
    size = len(text.encode(errors="replace"))

    assert -(-size // 4) <= estimate_text_tokens(text) <= 2 * size


# -- media

SIZE = 300_000  # bytes
DATA = base64.b64encode(bytes(SIZE)).decode()

FILES: dict[str, dict[str, Any]] = {
    "langchain": {"type": "file", "base64": DATA, "mime_type": "application/pdf"},
    "langchain 0.3": {
        "type": "file",
        "source_type": "base64",
        "data": DATA,
        "mime_type": "application/pdf",
    },
    "chat completions": {
        "type": "file",
        "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{DATA}"},
    },
    "responses": {
        "type": "input_file",
        "filename": "a.pdf",
        "file_data": f"data:application/pdf;base64,{DATA}",
    },
    "anthropic": {
        "type": "document",
        "source": {"type": "base64", "media_type": "application/pdf", "data": DATA},
    },
    "google": {"type": "media", "mime_type": "application/pdf", "data": DATA},
    "google, bytes": {"type": "media", "mime_type": "application/pdf", "data": bytes(SIZE)},
    "google, untyped": {"inline_data": {"mime_type": "application/pdf", "data": bytes(SIZE)}},
    "bedrock": {"document": {"format": "pdf", "name": "a", "source": {"bytes": bytes(SIZE)}}},
}
IMAGES: dict[str, dict[str, Any]] = {
    "langchain": {"type": "image", "base64": DATA, "mime_type": "image/png"},
    "chat completions": {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{DATA}"},
    },
    "responses": {"type": "input_image", "image_url": f"data:image/png;base64,{DATA}"},
    "anthropic": {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": DATA},
    },
    "google": {"type": "media", "mime_type": "image/png", "data": DATA},
    "google, untyped": {"inline_data": {"mime_type": "image/png", "data": DATA}},
    "bedrock": {"image": {"format": "png", "source": {"bytes": bytes(SIZE)}}},
    "generated": {"type": "image_generation_call", "id": "ig_1", "result": DATA},
    "screenshot": {
        "type": "computer_screenshot",
        "image_url": f"data:image/png;base64,{DATA}",
    },
}
MP3 = 19 * 32  # seconds of 300 KB at 128 kbit/s, with 32 tokens each
SOUNDS: dict[str, tuple[dict[str, Any], int]] = {
    "langchain": ({"type": "audio", "base64": DATA, "mime_type": "audio/mpeg"}, MP3),
    "raw": ({"type": "audio", "base64": DATA, "mime_type": "audio/wav"}, 200),
    "chat completions": (
        {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}},
        200,
    ),
    "google": ({"type": "media", "mime_type": "audio/mpeg", "data": DATA}, MP3),
}


def count_block_tokens(block: dict[str, Any], message_class: Any = HumanMessage) -> int:
    """Return the tokens of a block, without those of its message."""
    return count_tokens([message_class([block])]) - count_tokens([message_class([])])


@pytest.mark.parametrize("form", FILES)
def test_file_counts_2000_tokens_per_50_kb_in_each_provider_form(form: str) -> None:
    assert 6 * 2_000 <= count_block_tokens(FILES[form]) <= 7 * 2_000


@pytest.mark.parametrize("form", IMAGES)
def test_image_counts_same_in_each_provider_form(form: str) -> None:
    """The size of its file says little about the tokens of an image."""
    assert count_block_tokens(IMAGES[form]) == 765


@pytest.mark.parametrize("form", SOUNDS)
def test_sound_counts_by_its_duration(form: str) -> None:
    """Raw sound has more bytes for a second than compressed sound."""
    block, expected = SOUNDS[form]

    assert abs(count_block_tokens(block) - expected) <= 32


def test_video_counts_by_its_duration() -> None:
    """300 KB of video are 2.4 seconds at 1 Mbit/s."""
    assert count_block_tokens({"type": "video", "base64": DATA, "mime_type": "video/mp4"}) == 720


def test_text_file_counts_as_text() -> None:
    """The bytes of a text file are its text, so the tokens of a document's page would be wrong."""
    text = base64.b64encode(b"word " * 1_000).decode()

    assert (
        1_250
        <= count_block_tokens({"type": "file", "base64": text, "mime_type": "text/plain"})
        <= 1_260
    )
    source = {"type": "text", "media_type": "text/plain", "data": "word " * 1_000}
    assert count_block_tokens({"type": "document", "source": source}) == 1_250


@pytest.mark.parametrize(
    "block",
    [
        {"type": "file", "file_id": "file-1"},
        {"type": "file", "url": "https://example.com/a.pdf"},
        {"type": "audio", "file_id": "file-1"},
        {"type": "video", "url": "https://example.com/a.mp4"},
    ],
)
def test_media_of_unknown_length_count_more_than_their_address(block: dict[str, Any]) -> None:
    """A file that is named by a URL or an id is sent to the model too."""
    assert count_block_tokens(block) >= 500


@pytest.mark.parametrize(
    "block",
    [
        {"type": "reasoning", "encrypted_content": DATA, "summary": []},
        {"type": "redacted_thinking", "data": DATA},
        {"type": "thinking", "thinking": "", "signature": DATA},
        {"type": "reasoning", "reasoning": "", "extras": {"signature": DATA}},
    ],
)
def test_encrypted_reasoning_is_not_counted_as_text(block: dict[str, Any]) -> None:
    """400,000 characters of encrypted reasoning have 12,500 tokens."""
    assert count_block_tokens(block, AIMessage) == 12_500


def test_summary_of_reasoning_is_counted_as_text() -> None:
    """The words of a summary count in addition to the encrypted part."""
    summary = [{"type": "summary_text", "text": "word " * 100}]
    block = {"type": "reasoning", "summary": summary, "encrypted_content": "x" * 320}

    assert count_block_tokens(block, AIMessage) == 125 + 10


def test_media_within_other_blocks_are_not_counted_as_text() -> None:
    """The screenshot or the PDF that a tool returned counts by its kind."""
    image = IMAGES["anthropic"]
    blocks: list[dict[str, Any]] = [
        {"type": "tool_result", "tool_use_id": "1", "content": [image]},
        {"type": "computer_call_output", "output": IMAGES["responses"]},
        {"type": "something", "payload": {"page": DATA}},
    ]

    assert [count_block_tokens(block) < 15_000 for block in blocks] == [True] * 3
    assert 765 <= count_block_tokens(blocks[0]) <= 800
    result = ToolMessage([image], tool_call_id="1")
    assert count_tokens([result]) - count_tokens([ToolMessage("", tool_call_id="1")]) == 765


@pytest.mark.parametrize(
    ("value", "tokens"),
    [
        (f"data:image/png;base64,{DATA}", 765),
        (f"data:audio/mpeg;base64,{DATA}", MP3),
        (DATA, 6 * 2_000),
        ("\n".join(DATA[start : start + 76] for start in range(0, len(DATA), 76)), 7 * 2_000),
        (bytes(SIZE), 6 * 2_000),
    ],
)
def test_data_in_block_of_unknown_type_is_counted_by_media_type(value: Any, tokens: int) -> None:
    """A tool of the provider may return data in its own format. Line breaks count a few bytes."""
    assert (
        tokens
        <= count_block_tokens({"type": "unknown", "output": {"values": [value]}})
        <= tokens + 40
    )


def test_text_that_is_nearly_base64_is_counted_as_text() -> None:
    """A text with one character that base64 does not have is counted quickly, as text."""
    text = "A" * 400_000 + "!"

    assert count_block_tokens({"type": "unknown", "output": text}) > 100_000


def test_spoken_answer_counts_more_than_its_transcript() -> None:
    """The sound of an answer is not in its content, but OpenAI's models hear it again."""
    spoken = AIMessage("", additional_kwargs={"audio": {"id": "a", "transcript": "word " * 40}})

    assert count_tokens([spoken]) - count_tokens([AIMessage("")]) == 3 * 50


def test_artifact_of_tool_message_is_not_counted() -> None:
    """Providers are not sent the artifact of a tool message."""
    plain = ToolMessage("done", tool_call_id="1")

    assert count_tokens([plain]) == count_tokens([plain.model_copy(update={"artifact": DATA})])


@pytest.mark.parametrize("counter", ["approximate", "gpt-4o"])
def test_300_kb_pdf_leaves_room_for_conversation_in_trim(counter: str) -> None:
    conversation = [
        HumanMessage("I am Ann."),
        AIMessage("Hello Ann!"),
        HumanMessage([{"type": "text", "text": "Sum up"}, FILES["langchain"]]),
        AIMessage("It is a lease."),
        HumanMessage("Who am I?"),
    ]

    assert conversation == trim(max_tokens=16_000, token_counter=counter)(conversation)


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "type",
                "base64",
                "data",
                "url",
                "file",
                "source",
                "image_url",
                "text",
                "summary",
                "extras",
                "mime_type",
                "id",
            ]
        ),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=20) | st.binary(max_size=20),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
            max_leaves=8,
        ),
    )
)
def test_random_block_is_counted_without_error(block: dict[str, Any]) -> None:
    assert token_counter().count_message_tokens(HumanMessage.model_construct(content=[block])) >= 4
