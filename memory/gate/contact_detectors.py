"""Addresses and telephone numbers in a text.

What is written like a number to call, and not like a date, an id, a version or a price. A bare row
of digits is one only where it says so: "phone: 4155552671".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from perdure.memory.gate.plain_text import Found, OnPlain

EMAIL: Final = "e-mail"
PHONE: Final = "phone"

_EMAIL: Final = re.compile(
    r"(?<![\w.+%'-])(?!git@)[\w.+%'-]{1,64}+@(?:[^\W_](?:[\w-]{0,61}[^\W_])?\.){1,6}[^\W\d_]{2,24}"
    r"(?![\w@])"
)
_FREE: Final = r"(?<![\w+.,/:$€£¥#-])(?<![\d$€£¥#] )"
_ABROAD: Final = re.compile(
    rf"(?<![\w+])(?:\+[1-9]|{_FREE}00[1-9]\d?[ ./-])(?:[ ./()-]{{0,3}}+\d){{6,14}}(?!\d)"
)
_AT_HOME: Final = (
    # 415-555-2671, (415) 555-2671, 1 415 555 2671
    re.compile(
        _FREE
        + r"(?:1[ .-])?(?:\([2-9]\d{2}\) ?|[2-9]\d{2}[ .-])[2-9]\d{2}[ .-]\d{4}(?![\w-]|[.,]\d)"
    ),
    # 01 23 45 67 89
    re.compile(
        _FREE + r"0[1-9](?P<gap>[ .-])\d{2}(?:(?P=gap)\d{2}){3}(?!\w|[.,/-]\d|(?P=gap)\d{2}(?!\d))"
    ),
    # 0470/12.34.56
    re.compile(_FREE + r"0[1-9]\d{1,2}[/ ]\d{2,3}(?:\.\d{2}){2,3}(?!\w|[.,/-]\d)"),
    # 03-1234-5678, 138 1234 5678
    re.compile(_FREE + r"(?:0[1-9]|1[3-9]\d)(?P<gap>[ -])\d{4}(?P=gap)\d{4}(?!\w|[.,/-]\d)"),
    # 030 1234567, 0171/1234567, (020) 7946 0958, 07700 900123, 01701234567
    re.compile(
        _FREE + r"(?:\(0[1-9]\d{1,4}\)|0[1-9]\d{1,4}(?=[ /-]))[ /-]{1,3}\d{2,8}+"
        r"(?:[ /-]\d{2,8}+){0,3}(?!\w|[.,]\d)"
    ),
    re.compile(_FREE + r"0[1-9]\d{8,10}(?!\w|[.,/:-]\d)"),
    # 0032470123456
    re.compile(_FREE + r"00[1-9]\d{8,12}(?!\w|[.,/:-]\d)"),
)
_CALLED: Final = re.compile(
    r"(?<![^\W_])(?:(?:tele)?(?:phone|fon)|tel|mobile?|handy|cell(?:phone)?|fax|whatsapp|"
    r"(?:my|his|her|our|their|your) (?:(?:new|old|private|work|home) )?number|(?:ruf|mobil)nummer|"
    r"(?:meine|mijn|mon|mi) (?:neue |nieuwe |nouveau )?(?:nummer|numéro|número)|"
    r"(?:call|ring|text|reach) (?:me|us|him|her|them) (?:at|on|under)|电话|手机|電話|携帯)"
    r"(?:[ -]?(?:no|nr|number|nummer))?\W{0,3}(?:(?:is|ist|est|es|was)\W{1,3})?"
    r"(?P<number>\+?\(?\d(?:[ ./()-]{0,2}+\d){6,14})(?!\w|[.,:]\d)",
    re.IGNORECASE,
)
# one of which each match of that contains
_CALLS: Final = (
    *("phon", "fon", "tel", "mobil", "handy", "cell", "fax", "whatsapp", "number", "nummer"),
    *(
        " me ",
        " us ",
        " him ",
        " her ",
        " them ",
        "numéro",
        "número",
        "电话",
        "手机",
        "電話",
        "携帯",
    ),
)
_DATE: Final = re.compile(
    r"(?:19|20)\d\d([-./ ])(?:0?[1-9]|1[0-2])\1(?:0?[1-9]|[12]\d|3[01])(?!\d)"
    r"|(?:0?[1-9]|[12]\d|3[01])([-./ ])(?:0?[1-9]|[12]\d|3[01])\2(?:19|20)\d\d(?!\d)"
)
_YEARS: Final = re.compile(r"(?:(?:19|20)\d\d\D{0,3}+)+")
_NAMED_ID: Final = re.compile(
    r"(?:\b(?:id|nr|order|ticket|invoice|ref|reference|isbn|issn|case|account|customer|article|"
    r"part|serial|version|tracking|build|bestellung|rechnung|patient|member|student|employee|"
    r"policy|passport|client|user|room|ean|gtin|upc|sku|barcode|lotto|loto|lottery|"
    r"(?:kunden|bestell|artikel|rechnungs?|auftrags|vertrags|serien|konto|steuer|ausweis|"
    r"mitglieds?|patienten|versicherungs|matrikel|personal|sendungs|vorgangs|klant|order|factuur)"
    r"-?(?:nummer|nr))|#)\W{0,3}(?:(?:no|nr|number|id|is|ist)\W{1,3}){0,2}$",
    re.IGNORECASE,
)
_ENOUGH: Final = re.compile(r"\d(?:[^\w\n]{0,4}+\d){6}")  # or there is no number to call
_FEWEST: Final = 9  # digits of a number within a country, with the 0 before it
_BEFORE: Final = 40  # characters in front of a number that may say what it is
_MOST: Final = 13
_MOST_ABROAD: Final = 15  # with 00


@OnPlain
def emails(text: str) -> Iterator[Found]:
    """E-mail addresses."""
    if "@" in text:
        for match in _EMAIL.finditer(text):
            yield EMAIL, match.start(), match.end()


@OnPlain
def phones(text: str) -> Iterator[Found]:
    """Telephone numbers: international, in common national forms, or said to be one."""
    if not _ENOUGH.search(text):
        return
    for match in _ABROAD.finditer(text):
        yield PHONE, match.start(), match.end()
    lowered = text.lower()
    called = any(word in lowered for word in _CALLS)
    for match in _CALLED.finditer(text) if called else ():
        if not _is_date(match["number"]):
            yield PHONE, match.start("number"), match.end("number")
    for pattern in _AT_HOME:
        for match in pattern.finditer(text):
            if _is_phone(text, match):
                yield PHONE, match.start(), match.end()


def _is_phone(text: str, match: re.Match[str]) -> bool:
    digits = sum(map(str.isdigit, match[0]))
    most = _MOST_ABROAD if match[0].startswith("00") else _MOST
    if not _FEWEST <= digits <= most or _DATE.search(match[0]):
        return False
    return not _NAMED_ID.search(text[max(0, match.start() - _BEFORE) : match.start()])


def _is_date(number: str) -> bool:
    return bool(_DATE.match(number) or _YEARS.fullmatch(number))
