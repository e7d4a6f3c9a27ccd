"""Likeness: what two texts may differ in and still say the same, and what they may not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.memory.likeness import alike, digest, same

WORDS = st.sampled_from(
    [
        *(
            "Ann",
            "Bo",
            "likes",
            "liked",
            "tea",
            "Teas",
            "not",
            "2",
            "in",
            "from",
            "A",
            "茶",
            "喜欢",
        ),
        *("is", "has", "been", "to", "of", "a", "Ann's", "going", "A-", "5*", "?", "👎"),
    ]
)
SENTENCES = st.lists(WORDS, max_size=8).map(" ".join)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("Ann likes tea.", "  ann   LIKES tea!"),
        ("“Ann likes tea”", '"Ann likes tea"'),
        ("Ann likes ｔｅａ", "Ann likes tea"),  # noqa: RUF001
        ("我喜欢茶。", "我喜欢茶"),
        ("well-known", "well known"),
        ("ann lives in Ghent.", "Ann lives in Ghent"),
        ("**Ann** likes *tea*", "Ann likes tea"),
        ("40 m²", "40 m2"),
        ("H₂O", "H2O"),
        ("10⁶ cells", "10^6 cells"),
        ("Ann likes tea - and milk", "Ann likes tea, and milk"),
    ],
)
def test_capitals_punctuation_and_spaces_make_no_difference(a: str, b: str) -> None:
    """Texts that differ in these only are the same, and have the same digest."""
    assert same(a, b)
    assert digest(a) == digest(b)
    assert alike(a, b) == 1.0


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("10.5", "105"),
        ("-5", "5"),
        ("C++", "C#"),
        ("👍", "👎"),
        ("5%", "5"),
        ("10:30", "10 30"),
        ("an A-", "an A"),
        ("an A- grade", "an A grade"),
        ("AB-.", "AB."),
        (".NET", "net"),
        ("5²", "52"),
        ("10⁶", "106"),
        ("10⁻⁶", "10⁶"),
        ("rated 5*", "rated 5"),
        (".5", "5"),
        ("meat?", "meat"),
        ("tea ❌", "tea"),
        ("tea 🚫", "tea"),
        ("nice 👎", "nice"),
    ],
)
def test_signs_that_mean_something_make_one(a: str, b: str) -> None:
    """A decimal point, a minus, a sign of a name, a thumb."""
    assert not same(f"It is {a}", f"It is {b}")
    assert digest(f"It is {a}") != digest(f"It is {b}")
    assert alike(f"It is {a}", f"It is {b}") < 0.9


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("Ann likes green tea.", "ann likes green teas"),
        ("User prefers dark mode", "The user prefers the dark mode."),
        ("She doesn't like tea", "She does not like tea"),
        ("He cannot swim", "he can not swim!"),
        ("Ann is moving to Oslo", "Ann moves to Oslo"),
        ("1,000 visitors came", "1000 visitors came"),
        ("I like tea ❤️", "I really like tea"),
        ("我喜欢喝绿色的茶", "我喜欢喝绿色茶。"),
        ("アンは緑茶が好き", "アンは緑茶が好きです。"),
        ("I am Ann", "I'm Ann"),
        ("Ann's a nurse", "Ann is a nurse"),
        ("Ann's been to Rome", "Ann has been to Rome"),
        ("Favourite colour: blue", "favourite colour is blue"),
        ("Ann likes to swim", "Ann likes swimming"),
        ("Ann has been working at Acme", "Ann is working at Acme"),
        ("Ann fed all of the cats", "Ann fed all the cats"),
        ("Ann does like tea", "Ann likes tea"),
        ("I like it", "I like it 😊"),
    ],
)
def test_function_words_and_endings_make_texts_alike(a: str, b: str) -> None:
    """What only puts the same otherwise is a near duplicate, in both directions."""
    assert alike(a, b) >= 0.9
    assert alike(a, b) == alike(b, a)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("Ann loves Bo", "Bo loves Ann"),
        ("Ann likes tea", "Ann does not like tea"),
        ("Ann likes tea", "Ann doesn't like tea"),
        ("Ann can swim", "Ann can't swim"),
        ("Ann has 2 cats", "Ann has 3 cats"),
        ("Ann has two cats", "Ann has three cats"),
        ("born on 2024-03-01", "born on 2024-03-02"),
        ("They meet on Mondays", "They meet on Tuesdays"),
        ("My sister is called Ann", "My sister is called Bea"),
        ("Mark likes tea", "Marks likes tea"),
        ("Ann lives in Oslo", "Ann lived in Oslo"),
        ("Ann is a nurse", "Ann was a nurse"),
        ("Ann moved to Oslo from Rome", "Ann moved from Oslo to Rome"),
        ("He loves her", "She loves him"),
        ("She takes vitamin A", "She takes vitamins"),
        ("It costs $5", "It costs €5"),
        ("Does Ann like tea?", "Ann likes tea"),
        ("我喜欢茶", "我不喜欢茶"),
        ("Мария любит чай", "Мария не любит чай"),
        ("Anna mag Tee", "Anna mag Tee nicht"),
        ("letter to Ann", "letter of Ann"),
        ("a gift of Ann", "a gift to Ann"),
        ("Ann is the boss", "Ann has the boss"),
        ("Ann has been in Rome", "Ann is in Rome"),
        ("Ann has to work", "Ann has work"),
        ("Ann's brother lives in Rome", "Ann's brothers live in Rome"),
        ("Ann's son", "Ann's sons"),
        ("my sister", "my sisters"),
        ("Ann needs glasses", "Ann needs a glass"),
        ("Ann has a younger son", "Ann has younger sons"),
        ("I like it", "I like it 👎"),
        ("tea", "tea ❌"),
    ],
)
def test_what_carries_meaning_makes_texts_unalike(a: str, b: str) -> None:
    """Negations, numbers, dates, names, tenses, directions, who does what to whom."""
    assert alike(a, b) <= 0.5
    assert alike(b, a) <= 0.5


def test_one_more_word_is_news_in_a_long_text_too() -> None:
    """A text that says something more is no duplicate, however much it repeats."""
    long = "She has told me at length about the garden behind the old house by the river where " * 3

    assert alike(long, f"{long} roses grow") < 0.9


def test_a_text_of_marks_alone_is_gone_over_once() -> None:
    """Marks on a letter are put in order, which of a megabyte of them would take an hour."""
    text = "a" + "\u0301\u0316" * (1 << 19)

    assert same(text, text)


@given(SENTENCES, SENTENCES)
def test_likeness_is_symmetric_and_between_0_and_1(a: str, b: str) -> None:
    """Whatever two texts are; what is the same is wholly alike."""
    assert alike(a, b) == alike(b, a)
    assert 0 <= alike(a, b) <= 1
    assert same(a, b) == (alike(a, b) == 1 and digest(a) == digest(b))


@given(st.text())
def test_any_text_has_a_digest_and_is_the_same_as_itself(text: str) -> None:
    """No text breaks it; upper case and lower case of English are one."""
    assert same(text, text)
    assert alike(text, text) == 1
    assert len(digest(text)) == 32
