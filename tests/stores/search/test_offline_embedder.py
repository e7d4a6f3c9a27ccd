"""Tokens and vectors of the offline embedder, compared with values from independent code."""

from __future__ import annotations

import asyncio
import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import ConfigurationError
from perdure.stores.search import static_embedder
from perdure.stores.search.embedders import Embedder
from perdure.stores.search.static_embedder import StaticEmbedder, WordPieceTokenizer
from tests.layout import package_folder

WEIGHTS = package_folder("perdure.stores") / "weights"
TABLE, VOCABULARY = WEIGHTS / "static-en-256.npy", WEIGHTS / "static-en-256.vocab"

# computed by the `tokenizers` package from the tokenizer.json that the table was made with
GOLDEN_IDS: list[tuple[str, list[int]]] = [
    (
        "The unaffable gardener re-planted 3,000 tulips!",
        [999, 13480, 19964, 2471, 18788, 1131, 14, 7464, 20, 13, 1202, 9725, 14003, 1018, 2],
    ),
    (
        "Ünïcödé: naïve café, Straße, \u03a3\u038a\u03a3\u03a5\u03a6\u039f\u03a3, İstanbul",
        [
            *(26263, 27, 14746, 6671, 13, 1361, 26810, 13),
            *(176, 17202, 28736, 28738, 28739, 28733, 28736, 13, 8963),
        ],
    ),
    (
        "日本語と中文 mixed 混合English文字 한국어",
        [
            *(867, 879, 953, 669, 749, 864, 2819, 1, 795, 1397, 864, 1),
            *(472, 29009, 29024, 28994, 29017, 29023, 29002, 29011),
        ],
    ),
    (
        "don't_stop@me.now http://a.b/c?d=e&f=100%",
        [
            *(1126, 8, 59, 38, 1647, 33, 1036, 15, 1088, 7302, 27, 16, 16, 40, 15, 41, 16, 42),
            *(32, 43, 30, 44, 7, 45, 30, 1534, 6),
        ],
    ),
    ("a\x0bb c\x0cd\u200be f\xa0g\u2028h\ti", [10116, 2732, 1066, 45, 46, 47, 48]),
    ("[UNK] [PAD] is text here", [34, 3898, 1246, 36, 34, 10690, 36, 1006, 2796, 1185]),
    ("x" * 101 + " ends", [1, 3518]),
    ("\U0001f44d\U0001f3fd ok \U0001f468\u200d\U0001f469\u200d\U0001f467 fine", [1, 6932, 1, 1989]),
    ("e\u0301te\u0323 o\u0308\u0304", [2805, 1066, 54]),
    ("½ ² ① ㎏ ™ € £", [95, 85, 1, 1, 583, 577, 72]),
    ("豈更 𠀀 ไทย नमस्ते", [1, 1, 1, 1, 330, 28870, 28877, 28862]),
    ("\x00 \ufffd ", []),
]

SENTENCES = [
    "Melanie painted a lake at sunrise last year.",
    "When did Mel make a picture of the water?",
    "The invoice is due on the first of March.",
    "Her daughter plays the violin in an orchestra.",
    "Does anybody in the family make music?",
]
# computed in float64 from the original table and the ids of the `tokenizers` package
GOLDEN_COSINES = [
    (0, 1, 0.334979620),
    (0, 2, -0.017038803),
    (0, 3, 0.046217359),
    (0, 4, 0.106192917),
    (1, 2, 0.338039888),
    (1, 3, 0.114884507),
    (1, 4, 0.421858972),
    (2, 3, 0.137047350),
    (2, 4, 0.391159521),
    (3, 4, 0.397927725),
]

# scripts that were complete when the tables of `tokenizers` were made, with unusual characters
ALPHABET = "".join(
    chr(code)
    for low, high in (
        (0x01, 0x24F),
        (0x2B0, 0x377),
        (0x384, 0x38A),
        (0x391, 0x3A1),
        (0x3A3, 0x52F),
        (0x904, 0x94D),
        (0x1E00, 0x1EFF),
        (0x2000, 0x2064),
        (0x20A0, 0x20BD),
        (0x3001, 0x3029),
        (0x3041, 0x3096),
        (0x4E00, 0x4E80),
        (0xAC00, 0xAC80),
        (0xF900, 0xFA20),
        (0xFF01, 0xFF5E),
        (0x1F600, 0x1F640),
    )
    for code in range(low, high + 1)
)
TEXTS = st.lists(
    st.text(ALPHABET) | st.text("abcdefgh ÀÉß.,-'\t") | st.sampled_from(SENTENCES[0].split())
).map(" ".join)


def make_tokenizer() -> WordPieceTokenizer:
    return WordPieceTokenizer(VOCABULARY.read_text("utf-8").split("\n"))


@pytest.mark.parametrize(("text", "ids"), GOLDEN_IDS)
def test_token_ids_equal_those_of_original_tokenizer(text: str, ids: list[int]) -> None:
    """The texts cover case, accents, CJK, punctuation, control characters, long words and emoji."""
    tokeniser = make_tokenizer()

    assert ids == tokeniser.token_ids(text)
    assert ids == tokeniser.token_ids(text), "and again, now that the words are remembered"


@given(TEXTS)
def test_token_ids_of_any_text_equal_those_of_tokenizers_package(text: str) -> None:
    vocabulary = {
        token: token_id for token_id, token in enumerate(VOCABULARY.read_text("utf-8").split("\n"))
    }
    reference = tokenizers.Tokenizer(
        tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100)
    )
    reference.normalizer = tokenizers.normalizers.BertNormalizer()
    reference.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()

    assert reference.encode(text).ids == make_tokenizer().token_ids(text)


@given(TEXTS)
def test_used_tokenizer_returns_same_ids_as_new_one(text: str) -> None:
    """The memo of words does not change any result."""
    used = make_tokenizer()
    used.token_ids(text)

    assert make_tokenizer().token_ids(text) == used.token_ids(text)


def test_memo_of_words_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of new words does not grow the memo forever, and unlikely words do not enter it."""
    monkeypatch.setattr("perdure.stores.search.text._MEMO_SIZE", 10)
    tokeniser = make_tokenizer()
    tokeniser.token_ids(" ".join(f"word{i}" for i in range(101)))
    tokeniser.token_ids("a" * 50)

    assert len(tokeniser._memo) == 1


def test_cosines_equal_those_computed_in_float64() -> None:
    """The expected cosines come from other code. All vectors have length 1."""
    vectors = StaticEmbedder().embed(SENTENCES).astype(np.float64)

    assert [cosine for _, _, cosine in GOLDEN_COSINES] == pytest.approx(
        [vectors[a] @ vectors[b] for a, b, _ in GOLDEN_COSINES], abs=1e-6
    )
    assert pytest.approx(np.linalg.norm(vectors, axis=1), abs=1e-6) == [1.0] * 5


def test_vector_does_not_depend_on_other_texts_of_the_call() -> None:
    """A text has the same bits alone and among others. An empty list returns no rows."""
    embedder = StaticEmbedder()
    together = embedder.embed(SENTENCES)

    assert all(
        (embedder.embed([s])[0] == row).all() for s, row in zip(SENTENCES, together, strict=True)
    )
    assert ((5, 256), np.dtype(np.float32)) == (together.shape, together.dtype)
    assert embedder.embed([]).shape == (0, 256)


def test_text_without_known_tokens_has_zero_vector() -> None:
    """The vector of an empty text or of unknown characters is zero, never NaN."""
    vectors = StaticEmbedder().embed(["", "  ", "x" * 101, "\x00", "known"])

    assert pytest.approx(np.linalg.norm(vectors, axis=1), abs=1e-6) == [0.0, 0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "text",
    [
        "Wie heißt mein Hund?",
        "東京オリンピック",
        "Привет мир",
        "أختي ليلى تعمل طبيبة",
        "¿Qué día es?",
    ],
)
def test_text_in_another_language_has_zero_vector(text: str) -> None:
    """An English text that quotes such a text has a vector."""
    foreign, english = StaticEmbedder().embed([text, f"She is known to say to them: {text}"[:60]])

    assert not foreign.any()
    assert english.any()


@pytest.mark.parametrize(
    "text",
    ["Wann wurde Goethe geboren?", "xyzzy plugh", "thx", "Haha, stimmt.", "Jajaja, es verdad."],
)
def test_query_of_unknown_words_has_zero_vector(text: str) -> None:
    """Word pieces of two letters do not count in a query."""
    assert not StaticEmbedder().embed_query(text).any()


@pytest.mark.parametrize("text", [*SENTENCES, "sourdough", "1969", "a b"])
def test_query_has_same_vector_as_stored_text(text: str) -> None:
    """The texts have known words, long word pieces and numbers."""
    embedder = StaticEmbedder()

    assert (embedder.embed([text])[0] == embedder.embed_query(text)).all()
    assert embedder.embed_query(text).any()


def test_long_text_is_embedded_completely() -> None:
    """The last of 20,000 words counts as much as the first."""
    embedder = StaticEmbedder()
    short, long = embedder.embed(["lake violin", "lake " * 10_000 + "violin " * 10_000])

    assert short.tolist() == pytest.approx(long.tolist(), abs=1e-6)


def test_async_embed_returns_same_vectors() -> None:
    """The async method returns the same vectors for short and for long texts."""
    embedder = StaticEmbedder()
    for texts in (SENTENCES, [*SENTENCES, "lake " * 1000]):
        assert (embedder.embed(texts) == asyncio.run(embedder.aembed(texts))).all()


def test_threads_load_weights_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight threads that start at the same time read the weights once and get equal vectors."""
    reads = []
    read = static_embedder._read_vector_table_tokenizer_and_non_english_ids

    def count_and_read() -> tuple[object, ...]:
        reads.append(1)
        return read()

    monkeypatch.setattr(static_embedder, "_cached_weights", None)
    monkeypatch.setattr(
        static_embedder, "_read_vector_table_tokenizer_and_non_english_ids", count_and_read
    )
    with ThreadPoolExecutor(8) as pool:
        vectors = list(pool.map(StaticEmbedder().embed, [SENTENCES] * 32))

    assert reads == [1]
    assert all((vectors[0] == other).all() for other in vectors)


def test_weights_match_hashes_in_notice_and_model_name() -> None:
    """The model's name contains a hash of the files, so stored vectors remain identifiable."""
    hashes = [hashlib.sha256(file.read_bytes()).hexdigest() for file in (TABLE, VOCABULARY)]
    notice = (WEIGHTS / "NOTICE").read_text("utf-8")
    identity = hashlib.sha256("".join(hashes).encode()).hexdigest()[:12]

    assert hashes == re.findall(r"([0-9a-f]{64})  static", notice)
    assert f"perdure/static-en-256@{identity}" == StaticEmbedder().name
    assert isinstance(StaticEmbedder(), Embedder)


def test_weights_folder_is_small_and_contains_no_code() -> None:
    """The folder is part of every installation. It has at most 8 MB, no code and no pickle."""
    files = list(WEIGHTS.iterdir())

    assert {file.suffix for file in files} <= {".npy", ".npz", ".vocab", ".0", ""}
    assert sum(file.stat().st_size for file in files) <= 8 << 20
    assert np.load(TABLE, allow_pickle=False).dtype == np.int8


@pytest.mark.parametrize("damage", ["no folder", "no vocabulary", "cut short", "other shape"])
def test_damaged_or_missing_weights_raise_error_with_advice(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "weights"
    if damage != "no folder":
        folder.mkdir()
        table_bytes = TABLE.read_bytes()
        (folder / TABLE.name).write_bytes(
            table_bytes[:1000] if damage == "cut short" else table_bytes
        )
    if damage in ("cut short", "other shape"):
        (folder / VOCABULARY.name).write_text("a\nb", "utf-8")
    monkeypatch.setattr(static_embedder, "_cached_weights", None)
    monkeypatch.setattr(static_embedder, "files", lambda _: tmp_path)

    with pytest.raises(ConfigurationError, match="reinstall perdure"):
        StaticEmbedder().embed(["text"])
