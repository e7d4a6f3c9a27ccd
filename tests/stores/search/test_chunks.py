"""Long texts are split into chunks: no text is lost, and no chunk is longer than the limit."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import ConfigurationError
from perdure.stores.search.text import split_into_chunks

WORDS = st.lists(st.text("abcdé'-", min_size=1, max_size=12), min_size=1, max_size=400)
ENDS = st.sampled_from([" ", " ", " ", ". ", "? ", "\n", ".\n\n", "  "])
PROSE = st.lists(st.tuples(st.text("abcdé", min_size=1, max_size=12), ENDS), max_size=400).map(
    lambda parts: "".join(word + end for word, end in parts)
)
MIXED = st.text("ab .。\n中文字日本語のカナ한국어👍", max_size=600)


@given(PROSE, st.integers(1, 60), st.integers(0, 30))
def test_every_word_is_in_a_chunk(text: str, limit: int, overlap: int) -> None:
    """Words stay whole and in order, and a chunk has at most `limit` words."""
    words = text.split()
    pieces = split_into_chunks(text, limit, overlap)
    position = 0
    for piece in pieces:
        chunk_words = piece.split()
        start = next(
            i for i in range(position, -1, -1) if words[i : i + len(chunk_words)] == chunk_words
        )
        position = start + len(chunk_words)

        assert 1 <= len(chunk_words) <= limit

    assert len(words) == position


@given(MIXED, st.integers(1, 50))
def test_chunking_loses_no_character_in_any_script(text: str, limit: int) -> None:
    """Chunks are substrings that together cover the text, except for white space between them."""
    position = 0
    for piece in split_into_chunks(text, limit):
        blank = len(text[position:]) - len(text[position:].lstrip())
        start = text.rindex(piece, 0, position + blank + len(piece))
        position = max(position, start + len(piece))

    assert text[position:].strip() == ""


@given(PROSE, st.integers(1, 60))
def test_chunking_same_text_twice_gives_same_chunks(text: str, limit: int) -> None:
    assert split_into_chunks(text, limit) == split_into_chunks(text, limit)


def test_short_text_is_returned_as_one_unchanged_chunk() -> None:
    """White space is kept. A text without words has no chunks."""
    assert split_into_chunks("  one two.\n") == ["  one two.\n"]
    assert split_into_chunks("word " * 200) == ["word " * 200]
    assert split_into_chunks("") == []
    assert split_into_chunks(" \n" * 500) == []


def test_chunks_end_where_sentences_end() -> None:
    """A chunk ends with a sentence if one ends in the last quarter of the chunk."""
    text = " ".join(f"Sentence {i} says a thing of its own." for i in range(100))
    pieces = split_into_chunks(text, 50, 8)

    assert all(piece.startswith("Sentence") and piece.endswith("own.") for piece in pieces)


def test_neighbouring_chunks_overlap_by_twenty_words() -> None:
    """A phrase that crosses a border is whole in one chunk."""
    words = [f"w{i}" for i in range(1000)]
    pieces = [piece.split() for piece in split_into_chunks(" ".join(words))]

    assert [20] * (len(pieces) - 1) == [len(set(a) & set(b)) for a, b in itertools.pairwise(pieces)]
    assert min(map(len, pieces)) > 150, "alike in length: no tiny last one"


def test_text_in_script_without_spaces_is_split_by_characters() -> None:
    """A Chinese text becomes chunks of at most `limit` characters that overlap."""
    text = "天地玄黄宇宙洪荒" * 200
    pieces = split_into_chunks(text)

    assert max(map(len, pieces)) <= 200
    assert len(text) <= sum(map(len, pieces)) < 1.2 * len(text)


def test_long_text_without_spaces_is_split_into_chunks() -> None:
    """A URL or blob of 100,000 characters becomes more than one chunk."""
    pieces = split_into_chunks("x" * 100_000)

    assert max(map(len, pieces)) <= 200 * 32
    assert sum(map(len, pieces)) >= 100_000


@pytest.mark.parametrize(("limit", "overlap"), [(0, 0), (-1, 5), (10, -1)])
def test_split_refuses_impossible_limit_or_overlap(limit: int, overlap: int) -> None:
    """The limit must be at least one word, and the overlap must not be negative."""
    with pytest.raises(ConfigurationError, match="expected a limit of at least"):
        split_into_chunks("text", limit, overlap)
