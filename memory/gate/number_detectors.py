"""Numbers of cards and of bank accounts in a text, each by its check digits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from perdure.memory.gate.plain_text import Found, OnPlain

CARD: Final = "card"
IBAN: Final = "iban"

_GAP: Final = r"(?: {1,3}| ?-{1,2} ?|[._/])"
_BEGINS: Final = re.compile(r"(?<!\d)(?:(?<!\d[.,])|(?<=\d{12},))[2-68]\d{3}")
_ENDS: Final = r"(?!\d|[A-Za-z](?![A-Za-z]))"  # a letter behind it is of a serial number
_FORMS: Final = tuple(
    re.compile(form + _ENDS)
    for form in (
        r"\d{13,19}+",
        rf"\d{{4}}(?:{_GAP}\d{{4}}){{3}}(?:{_GAP}\d{{1,3}})?",
        rf"\d{{4}}{_GAP}\d{{6}}{_GAP}\d{{4,5}}",
        rf"\d{{8}}{_GAP}\d{{8}}",
        r"\d{4}(?:(?P<gap>[ -])\d{2,7}+)(?:(?P=gap)\d{1,7}+){1,4}",
    )
)
# first digits and the lengths that go with them: https://en.wikipedia.org/wiki/Payment_card_number
_ISSUERS: Final = tuple(
    (re.compile(prefix), lengths)
    for prefix, lengths in (
        ("4", {13, 16, 19}),  # Visa
        ("5[1-5]|222[1-9]|22[3-9]|2[3-6]|27[01]|2720", {16}),  # Mastercard
        ("3[47]", {15}),  # American Express
        ("6011|64[4-9]|65", {16, 17, 18, 19}),  # Discover
        ("30[0-5]|3[689]", {14, 16, 19}),  # Diners Club
        ("352[89]|35[3-8]", {16, 17, 18, 19}),  # JCB
        ("62|81", {16, 17, 18, 19}),  # UnionPay
        ("50|5[6-9]|6[37]", {13, 14, 15, 16, 17, 18, 19}),  # Maestro
    )
)
_DOUBLED: Final = (0, 2, 4, 6, 8, 1, 3, 5, 7, 9)

_ENOUGH: Final = re.compile(r"[2-68](?:[ ._/-]{0,4}\d){12}")
_IBAN: Final = re.compile(
    r"[0-9]{2}(?<=[A-Za-z]{2}..)(?:(?<![A-Za-z0-9]....)|(?<=[Ii][Bb][Aa][Nn]....))"
    r"(?=[ ./_-]{0,2}[A-Za-z0-9]{4})"
)
_MOST_GAP: Final = 2  # signs between the groups of an IBAN
# lengths by country: https://www.swift.com/standards/data-standards/iban
_LENGTHS: Final = {
    country: length
    for length, countries in {
        15: "NO", 16: "BE", 18: "DK FI FO GL NL", 19: "MK SI", 20: "AT BA EE KZ LT LU XK",
        21: "CH HR LI LV", 22: "BG BH DE GB GE IE ME RS", 23: "AE GI IL",
        24: "AD CZ ES MD PK RO SA SE SK TN VG", 25: "PT", 26: "IS TR",
        27: "FR GR IT MC SM", 28: "AL AZ CY DO GT HU LB PL", 29: "BR", 31: "MT",
    }.items()
    for country in countries.split()
}  # fmt: skip


@OnPlain
def cards(text: str) -> Iterator[Found]:
    """Numbers of 13 to 19 digits, of an issuer that is known, with Luhn's check digit."""
    first = _ENOUGH.search(text)
    at = first.start() if first else len(text)
    while begins := _BEGINS.search(text, at):
        start = begins.start()
        length = _longest_card(text, start)
        at = start + (length or 4)
        if length:
            yield CARD, start, at


def _longest_card(text: str, start: int) -> int:
    """How many characters from there are a card's number, as one of the forms; 0: none are."""
    lengths = _lengths_of(text[start : start + 4])
    for form in _FORMS if lengths else ():
        match = form.match(text, start)
        length = _card_length(match[0], lengths) if match else 0
        if length:
            return length
    return 0


@lru_cache(1 << 10)
def _lengths_of(first: str) -> frozenset[int]:
    """How many digits a card has whose number begins so; none: it is no card's."""
    return frozenset(n for prefix, allowed in _ISSUERS if prefix.match(first) for n in allowed)


def _card_length(written: str, lengths: frozenset[int]) -> int:
    """How many characters of it are a card's number: all, or up to a gap; 0: none are."""
    digits = [int(char) for char in written if char.isdigit()]
    count = len(digits)
    for end in range(len(written), 0, -1):
        if end < len(written) and written[end].isdigit():
            count -= 1
        elif written[end - 1].isdigit() and count in lengths and _is_checked(digits[:count]):
            return end
    return 0


def _is_checked(digits: list[int]) -> bool:
    """Luhn's check: https://en.wikipedia.org/wiki/Luhn_algorithm."""
    values = digits[::-1]
    return (sum(values[::2]) + sum(_DOUBLED[value] for value in values[1::2])) % 10 == 0


@OnPlain
def ibans(text: str) -> Iterator[Found]:
    """Numbers of bank accounts: of their country's length, with the check digits of ISO 13616."""
    for match in _IBAN.finditer(text):
        start = match.start() - 2
        length = _LENGTHS.get(text[start : start + 2].upper(), 0)
        end = _end_of_iban(text, start, length)
        if end > start:
            yield IBAN, start, end


def _end_of_iban(text: str, start: int, length: int) -> int:
    """Where an IBAN ends that starts there; `start`: none does."""
    signs: list[str] = []
    gap = 0
    for at in range(start, min(len(text), start + 2 * length)):
        char = text[at]
        if char.isascii() and char.isalnum():
            gap = 0
            signs.append(char.upper())
            if len(signs) == length:
                ends = at + 1 == len(text) or not _goes_on(text[at + 1])
                return at + 1 if ends and _is_iban("".join(signs)) else start
        else:
            gap += 1
            if char not in " -./_" or gap > _MOST_GAP:
                break
    return start


def _goes_on(char: str) -> bool:
    return char.isascii() and char.isalnum()


def _is_iban(signs: str) -> bool:
    turned = "".join(str(int(sign, 36)) for sign in signs[4:] + signs[:4])
    return int(turned) % 97 == 1
