"""The text analyzer, and words that are near in spelling and in meaning."""

from __future__ import annotations

import sys
import tracemalloc
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.stores.search.text import (
    STOP_WORDS,
    _iter_words,
    compute_edit_distances,
    detect_language,
    ends_with_question,
    estimate_share_of_messages_with_word,
    extract_query_words_with_stems,
    find_nearest_words,
    find_synonyms,
    is_eligible_for_spelling_correction,
    stop_words,
    tokenize,
    tokenize_query,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Running, runs and the runner's", ["run", "run", "and", "the", "runner"]),
        ("Ünïcödé CAFÉ \uff26\uff55ll", ["unicod", "cafe", "full"]),
        ("Straße Smørrebrød Łódź", ["strass", "smorrebrod", "lodz"]),
        ("foo_bar-1 v2.3", ["foo", "bar", "1", "v2", "3"]),
        ("1,000 and 12,345,678 but 1,23", ["1000", "and", "12345678", "but", "1", "23"]),
        ("don't won't she'll O'Brien's", ["do", "will", "she", "obrien"]),
        ("l\u2019été d'août", ["ete", "aout"]),
        ("Привет, ёлка", ["привет", "елк"]),
        ("Мой синий йод, синего йода", ["мо", "син", "йод", "син", "йод"]),
        ("المعلمون معلمة", ["معلم", "معلم"]),
        (
            "Meine Häuser sind groß",
            ["mein", "hauser", "sind", "gross", "haus"],
        ),
        ("J'ai mangé des pommes", ["ai", "mang", "des", "pomm"]),
        ("die Straßen im Winter", ["die", "strassen", "im", "winter", "strass", "wint"]),
        ("हिन्दी में", ["हिन्दी", "में"]),
        ("聊天gpt模", ["聊", "聊天", "天", "gpt", "模"]),
        ("カタ と", ["カ", "カタ", "タ", "と"]),
        ("", []),
        ("!? — …", []),
    ],
)
def test_tokenize_folds_case_accents_and_endings(text: str, expected: list[str]) -> None:
    """The tokens of a document are in order and repeated."""
    assert expected == tokenize(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("What did the runners run?", ["runner", "run"]),
        ("who are you", ["who", "are", "you"]),
        ("聊天记忆", ["聊天", "天记", "记忆"]),
        ("猫", ["猫"]),
        ("run runs running", ["run"]),
        ("the 猫", ["猫"]),
        ("Don\u2019t", ["do"]),
    ],
)
def test_tokenize_query_drops_stop_words_and_repetitions(text: str, expected: list[str]) -> None:
    """A query of stop words only keeps them all."""
    assert expected == tokenize_query(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("What did the runners run?", {"runner": "runner", "run": "run"}),
        ("Wo sind die alten Häuser?", {"alten": "alt", "hauser": "haus"}),
        (
            "Was war die Note von Mathe und Chemie?",
            {"note": "not", "math": "math", "chemi": "chemi"},
        ),
        ("Où est le thé de mon chat ?", {"the": "the", "chat": "chat"}),
        ("¿Dónde están las llaves?", {"llave": "llav"}),
        ("Где лежат запасные ключи?", {"лежат": "лежат", "запасн": "запасн", "ключ": "ключ"}),
        ("ما هي مهنة ليلى؟", {"مهن": "مهن", "ليلي": "ليلي"}),
        ("我的狗叫什么名字\uff1f", {"狗叫": "狗叫", "名字": "名字"}),
        ("夏休みにはどこへ出かけますか\uff1f", {"夏休": "夏休", "出": "出"}),
        ("りんごを食べる", {"りん": "りん", "んご": "んご", "ごを": "ごを", "食": "食"}),
        ("什么的", {"什么": "什么", "么的": "么的"}),
        ("und dann war die", {"und": "und", "dann": "dann", "war": "war", "die": "die"}),
    ],
)
def test_query_words_drop_stop_words_of_their_language(text: str, expected: dict[str, str]) -> None:
    """Stop words of other languages stay. Each word has its stem in the query's language."""
    assert expected == extract_query_words_with_stems(text)


PIECES = (
    "die der und ist le la est pas que donde los Häuser étés mangées años ключи ключ الكتب 猫 の "
    "我的 running runs l'été don't 1,000"
)
FOREIGN = st.lists(st.sampled_from(PIECES.split())).map(" ".join)


@given(st.text() | FOREIGN)
def test_every_query_word_has_a_token_in_the_same_text(text: str) -> None:
    """Each query word or its stem is among the tokens of the same text, in every language."""
    tokens = set(tokenize(text))

    assert [
        pair for pair in extract_query_words_with_stems(text).items() if tokens.isdisjoint(pair)
    ] == []


@given(FOREIGN, FOREIGN)
def test_text_of_two_languages_keeps_tokens_of_both_parts(one: str, other: str) -> None:
    """Words of a query in either language are among the tokens."""
    together = set(tokenize(f"{one} {other}"))

    assert set() == set(tokenize_query(one)) - together
    assert [
        pair for pair in extract_query_words_with_stems(one).items() if together.isdisjoint(pair)
    ] == []


@given(st.text())
def test_no_token_is_empty_or_contains_a_space(text: str) -> None:
    """No token contains a control character either."""
    tokens = tokenize(text)

    assert tokens == " ".join(tokens).split()
    assert not [c for token in tokens for c in token if unicodedata.category(c) in ("Cc", "Zs")]


@given(st.text())
def test_tokens_of_query_are_among_tokens_of_same_text(text: str) -> None:
    """A document is found by its own text."""
    assert set() == set(tokenize_query(text)) - set(tokenize(text))


@given(st.text(alphabet="aAéÉ 猫犬'x1,0", max_size=30))
def test_tokens_do_not_depend_on_unicode_form_or_case(text: str) -> None:
    assert tokenize(text) == tokenize(unicodedata.normalize("NFD", text))
    assert tokenize(text) == tokenize(text.upper())


@given(st.text(alphabet="abc' ,019", max_size=30))
def test_ascii_fast_path_returns_same_tokens(text: str) -> None:
    assert tokenize(text) == tokenize(text + " 猫")[:-1]


def test_tokens_of_chinese_text_contain_its_characters_and_pairs() -> None:
    """A query of one or two adjacent characters finds the text."""
    document = set(tokenize("聊天记忆\uff1a管理对话中的消息"))

    assert set(tokenize_query("记忆")) <= document
    assert set(tokenize_query("对话")) <= document
    assert set(tokenize_query("管")) <= document
    assert not set(tokenize_query("记话")) <= document


def test_concurrent_stemming_gives_correct_stems() -> None:
    words = [f"{a}{b}{c}ings" for a in "bcdfgh" for b in "aiou" for c in ("rn", "mp", "nk", "lt")]
    with ThreadPoolExecutor(8) as pool:
        tokens = list(pool.map(tokenize, words))

    assert [[word.removesuffix("ings")] for word in words] == tokens


def test_english_stop_words_are_lower_case_ascii() -> None:
    """The analyzer compares them with words that are folded and not yet stemmed."""
    assert [word for word in STOP_WORDS if not (word.isascii() and word.islower())] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Wie heißt mein Hund?", "german"),
        ("Je ne mange plus de viande.", "french"),
        ("¿En qué ciudad resido?", "spanish"),
        ("Dove abita la sorella di Anna?", "italian"),
        ("Não gosto de café com leite", "portuguese"),
        ("Mijn zus woont in een klein huis", "dutch"),
        ("Нашу собаку зовут Бублик, iPhone", "other"),
        ("أختي ليلى تعمل طبيبة", "other"),
        ("東京オリンピック 2020", "other"),
        ("The man died in the war on a die", "english"),
        ("Her son comes by car, and the dog sits at the door", "english"),
        ("Café in Los Angeles", "english"),
        ("naïve 😀", "english"),
        ("Die Hard", "english"),
        ("sourdough", "english"),
        ("", "english"),
    ],
)
def test_language_is_detected_from_stop_words(text: str, expected: str) -> None:
    """Words that also occur in English texts do not count."""
    assert expected == detect_language(text)


def test_stop_words_of_all_languages_are_folded() -> None:
    """Stop words have the form in which the analyzer splits and folds texts."""
    names = ["german", "french", "spanish", "finnish", "other"]
    words = [word for name in names for word in stop_words(name)]

    assert [word for word in words if list(_iter_words(word)) != [word]] == []
    assert {"wann", "fur", "die"} <= stop_words("german")
    assert {"где", "هذا", "什么", "です"} <= stop_words("other")
    assert stop_words("english") == STOP_WORDS


@pytest.mark.parametrize(
    ("language", "common", "rare"),
    [
        ("english", "dai", "sourdough"),
        ("german", "tag", "zauberberg"),
        ("other", "ден", "виолончел"),
    ],
)
def test_message_frequency_is_high_for_common_words(language: str, common: str, rare: str) -> None:
    """The frequency is the share of ordinary messages with the word."""
    assert estimate_share_of_messages_with_word(
        common, language
    ) > 10 * estimate_share_of_messages_with_word(rare, language)
    assert estimate_share_of_messages_with_word("qqq", language) == 0.0


def test_message_frequency_of_long_word_needs_little_memory() -> None:
    """A comparison with full rows of as many characters would need 340 MB."""
    estimate_share_of_messages_with_word("word")
    tracemalloc.start()
    assert estimate_share_of_messages_with_word("y" * 20_000) == 0.0
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("How was it?", True),
        ('"Really?" ', True),
        ("本当\uff1f", True),
        ("Why? Because.", False),
        ("", False),
    ],
)
def test_text_that_ends_with_question_mark_is_a_question(text: str, expected: bool) -> None:
    """Question marks of all scripts count."""
    assert expected == ends_with_question(text)


def test_nearest_words_include_word_of_a_misspelling() -> None:
    """Swapped, missing and changed letters are recognised."""
    words = ["carolin", "receiv", "counsel", "mountain", "hike", "bike"]

    assert find_nearest_words("caroiln", words) == ["carolin"]
    assert find_nearest_words("reciev", words) == ["receiv"]
    assert find_nearest_words("montain", words) == ["mountain"]
    assert find_nearest_words("kountain", words) == ["mountain"]
    assert find_nearest_words("hiker", words) == ["hike"]
    assert find_nearest_words("zebra", words) == []
    assert find_nearest_words("zebra", []) == []


def test_nearest_words_are_ordered_by_distance_and_limited() -> None:
    """Ties are ordered alphabetically, and the word itself is left out."""
    words = ["paints", "painty", "paint", "pant"]

    assert find_nearest_words("paints", words, limit=2) == ["paint", "painty"]
    assert find_nearest_words("paints", words) == ["paint"]


@given(st.text("abc", max_size=7), st.lists(st.text("abc", max_size=7), max_size=4))
def test_edit_distance_is_symmetric_and_zero_for_equal_words(one: str, others: list[str]) -> None:
    distances = compute_edit_distances(one, others).tolist()

    assert distances == [int(compute_edit_distances(other, [one])[0]) for other in others]
    assert [one == other for other in others] == [count == 0 for count in distances]


def test_numbers_short_words_and_character_pairs_are_not_misspellable() -> None:
    assert [
        is_eligible_for_spelling_correction(token) for token in ("paint", "2023", "cat", "记忆")
    ] == [
        True,
        False,
        False,
        False,
    ]


def test_synonyms_are_ordered_by_similarity_without_the_word_itself() -> None:
    """Synonyms have the analyzer's form."""
    synonyms = find_synonyms("buy")

    assert {"purchas", "bought", "sell"} <= {stem for stem, _ in synonyms}
    assert "buy" not in dict(synonyms)
    assert sorted((near for _, near in synonyms), reverse=True) == [near for _, near in synonyms]
    assert all(0.5 < near <= 1 for _, near in synonyms)
    assert find_synonyms("qwertyish") == []


def count_calls(function: Callable[[str], object], text: str) -> int:
    """Return how many Python and built-in functions and generators a function calls."""
    count = 0

    def count_event(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(count_event)
    try:
        function(text)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    "function",
    [tokenize, tokenize_query, extract_query_words_with_stems, detect_language, ends_with_question],
)
@pytest.mark.parametrize(
    "unit",
    [
        "yesterday ",
        "don't 1,000 ",
        "caf\u00e9s? ",
        "\u804a\u5929",
        "die H\u00e4user ",
        "\u306e\u304b",
    ],
)
def test_cost_of_text_analysis_is_linear_in_length(
    function: Callable[[str], object], unit: str
) -> None:
    """Eight times the text needs at most eight times the calls, plus a constant."""
    few, many = (count_calls(function, unit * (size // len(unit))) for size in (2_500, 20_000))

    assert many <= 8 * few + 50
