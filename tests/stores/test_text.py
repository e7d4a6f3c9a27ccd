"""The analyzer, and the words near in spelling and in meaning."""

from __future__ import annotations

import sys
import tracemalloc
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.stores.text import (
    STOP_WORDS,
    _iter_words,
    compute_edit_distances,
    detect_language,
    ends_with_question,
    extract_query_words_with_stems,
    find_nearest_words,
    find_synonyms,
    is_misspellable,
    message_frequency,
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
def test_tokens_fold_case_accents_and_endings(text: str, expected: list[str]) -> None:
    """A document's words come folded, stemmed, in order and with repetitions."""
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
def test_query_drops_stop_words_and_repetitions(text: str, expected: list[str]) -> None:
    """A query keeps each telling word once, or all words if none tells."""
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
def test_the_words_that_rank(text: str, expected: dict[str, str]) -> None:
    """Stop words of the query's language go, of others they stay; each word has its stem there."""
    assert expected == extract_query_words_with_stems(text)


PIECES = (
    "die der und ist le la est pas que donde los Häuser étés mangées años ключи ключ الكتب 猫 の "
    "我的 running runs l'été don't 1,000"
)
FOREIGN = st.lists(st.sampled_from(PIECES.split())).map(" ".join)


@given(st.text() | FOREIGN)
def test_a_text_is_found_by_its_own_words(text: str) -> None:
    """Of each word of a query, whatever its language, a document of the same text has a token."""
    found = set(tokenize(text))

    assert [
        pair for pair in extract_query_words_with_stems(text).items() if found.isdisjoint(pair)
    ] == []


@given(FOREIGN, FOREIGN)
def test_no_word_is_lost_by_the_language_of_the_text(one: str, other: str) -> None:
    """A text keeps the tokens that each part of it has as English: words of any query meet them."""
    together = set(tokenize(f"{one} {other}"))

    assert set() == set(tokenize_query(one)) - together
    assert [
        pair for pair in extract_query_words_with_stems(one).items() if together.isdisjoint(pair)
    ] == []


@given(st.text())
def test_tokens_can_be_joined_by_spaces(text: str) -> None:
    """No token is empty or holds a space or a control character."""
    found = tokenize(text)

    assert found == " ".join(found).split()
    assert not [c for token in found for c in token if unicodedata.category(c) in ("Cc", "Zs")]


@given(st.text())
def test_a_text_holds_what_it_is_searched_by(text: str) -> None:
    """A document is found by its own text: the query's tokens are among the document's."""
    assert set() == set(tokenize_query(text)) - set(tokenize(text))


@given(st.text(alphabet="aAéÉ 猫犬'x1,0", max_size=30))
def test_composed_and_decomposed_are_one(text: str) -> None:
    """However a letter is encoded, and in either case, the tokens are the same."""
    assert tokenize(text) == tokenize(unicodedata.normalize("NFD", text))
    assert tokenize(text) == tokenize(text.upper())


@given(st.text(alphabet="abc' ,019", max_size=30))
def test_ascii_takes_the_same_way(text: str) -> None:
    """The short way for ASCII gives what the long way gives."""
    assert tokenize(text) == tokenize(text + " 猫")[:-1]


def test_part_of_a_chinese_word_is_found() -> None:
    """Two characters, or one, of a longer run are among the run's tokens."""
    document = set(tokenize("聊天记忆\uff1a管理对话中的消息"))

    assert set(tokenize_query("记忆")) <= document
    assert set(tokenize_query("对话")) <= document
    assert set(tokenize_query("管")) <= document
    assert not set(tokenize_query("记话")) <= document


def test_stemming_is_safe_in_threads() -> None:
    """Threads that stem new words at once do not disturb each other."""
    words = [f"{a}{b}{c}ings" for a in "bcdfgh" for b in "aiou" for c in ("rn", "mp", "nk", "lt")]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(tokenize, words))

    assert [[word.removesuffix("ings")] for word in words] == found


def test_stop_words_are_lower_case_words() -> None:
    """Each stop word is what the analyzer makes of a word before it stems it."""
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
def test_language(text: str, expected: str) -> None:
    """A text is in the language of its stop words; what English texts have too tells nothing."""
    assert expected == detect_language(text)


def test_stop_words_are_folded() -> None:
    """All languages' stop words are as words of texts are folded, or pairs of characters."""
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
def test_a_word_is_common_in_its_language(language: str, common: str, rare: str) -> None:
    """Of ordinary messages some have a common word, hardly any a rare one."""
    assert message_frequency(common, language) > 10 * message_frequency(rare, language)
    assert message_frequency("qqq", language) == 0.0


def test_a_long_word_is_not_compared_in_full() -> None:
    """A table of as many characters for each of its words would be 340 MB."""
    message_frequency("word")
    tracemalloc.start()
    assert message_frequency("y" * 20_000) == 0.0
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
def test_asks(text: str, expected: bool) -> None:
    """A text asks if it ends with a question mark of any script."""
    assert expected == ends_with_question(text)


def test_nearest_forgives_slips() -> None:
    """Swapped, dropped and changed letters lead to the word that was meant."""
    words = ["carolin", "receiv", "counsel", "mountain", "hike", "bike"]

    assert find_nearest_words("caroiln", words) == ["carolin"]
    assert find_nearest_words("reciev", words) == ["receiv"]
    assert find_nearest_words("montain", words) == ["mountain"]
    assert find_nearest_words("kountain", words) == ["mountain"]
    assert find_nearest_words("hiker", words) == ["hike"]
    assert find_nearest_words("zebra", words) == []
    assert find_nearest_words("zebra", []) == []


def test_nearest_orders_and_limits() -> None:
    """The nearest come first, ties by the alphabet, never the word itself, at most `limit`."""
    words = ["paints", "painty", "paint", "pant"]

    assert find_nearest_words("paints", words, limit=2) == ["paint", "painty"]
    assert find_nearest_words("paints", words) == ["paint"]


@given(st.text("abc", max_size=7), st.lists(st.text("abc", max_size=7), max_size=4))
def test_slips_is_a_symmetric_distance(one: str, others: list[str]) -> None:
    """Slips are counted alike from both sides, and none means equality."""
    found = compute_edit_distances(one, others).tolist()

    assert found == [int(compute_edit_distances(other, [one])[0]) for other in others]
    assert [one == other for other in others] == [count == 0 for count in found]


def test_misspellable() -> None:
    """Numbers, short words and pairs of characters are taken as they are."""
    assert [is_misspellable(token) for token in ("paint", "2023", "cat", "记忆")] == [
        True,
        False,
        False,
        False,
    ]


def test_kin_are_near_in_meaning() -> None:
    """Kin come nearest first, without the word itself, all in one form with the analyzer's."""
    kin = find_synonyms("buy")

    assert {"purchas", "bought", "sell"} <= {stem for stem, _ in kin}
    assert "buy" not in dict(kin)
    assert sorted((near for _, near in kin), reverse=True) == [near for _, near in kin]
    assert all(0.5 < near <= 1 for _, near in kin)
    assert find_synonyms("qwertyish") == []


def calls(function: Callable[[str], object], text: str) -> int:
    """How many calls a function makes, those of generators and of built-in functions included."""
    count = 0

    def seen(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
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
def test_what_a_text_costs_is_linear(function: Callable[[str], object], unit: str) -> None:
    """Eight times the text makes at most eight times the calls, and a few."""
    few, many = (calls(function, unit * (size // len(unit))) for size in (2_500, 20_000))

    assert many <= 8 * few + 50
