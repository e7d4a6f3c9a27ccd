"""Secrets in a text: keys of services, private keys, tokens, and passwords (`passwords`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from perdure.memory.gate.passwords import SECRET, passwords
from perdure.memory.gate.plain_text import Found, OnPlain

# with a text that each match contains, which is looked for first
_KEYS: Final = tuple(
    (needle, re.compile(rf"(?<![A-Za-z0-9]){pattern}"))
    for needle, pattern in (
        # OpenAI, Anthropic; the name of a package is no key
        ("sk-", r"(?<![_-])sk-(?=[A-Za-z_]{0,40}+\d)[A-Za-z0-9_]{16,300}+[A-Za-z0-9_-]*+"),
        ("sk-", r"sk-(?:proj|ant|svcacct|or)-(?=[A-Za-z_-]{0,60}+\d)[A-Za-z0-9_-]{16,300}+"),
        ("A", r"A(?:KIA|SIA|BIA|CCA)[A-Z0-9]{16}(?![A-Za-z0-9])"),  # AWS
        ("gh", r"gh[pousr]_[A-Za-z0-9]{30,255}+"),  # GitHub
        ("github_pat_", r"github_pat_[A-Za-z0-9_]{22,255}+"),
        ("glpat-", r"glpat-[A-Za-z0-9_-]{20,100}+"),  # GitLab
        ("xox", r"xox[abeoprs]-[A-Za-z0-9-]{10,250}+"),  # Slack
        (
            "hooks.slack.com/",
            r"(?<=hooks\.slack\.com/)(?:services|workflows|triggers)/[\w/-]{16,200}+",
        ),
        ("/api/webhooks/", r"(?<=/api/webhooks/)\d{15,25}/[\w-]{40,100}+"),  # Discord
        ("AIza", r"AIza[A-Za-z0-9_-]{35}"),  # Google
        ("k_", r"[sr]k_(?:live|test)_[A-Za-z0-9]{16,250}+"),  # Stripe
        ("npm_", r"npm_[A-Za-z0-9]{36}"),
        ("hf_", r"hf_[A-Za-z0-9]{30,100}+"),  # Hugging Face
        ("pypi-", r"pypi-[A-Za-z0-9_-]{50,300}+"),
        ("SG.", r"SG\.[A-Za-z0-9_-]{16,32}+\.[A-Za-z0-9_-]{16,64}+"),  # SendGrid
        ("eyJ", r"eyJ[A-Za-z0-9_-]{8,}+\.eyJ[A-Za-z0-9_-]{8,}+(?:\.[A-Za-z0-9_-]*+)?"),  # a JWT
    )
)
_PEM_BEGIN: Final = re.compile(r"-----BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY(?: BLOCK)?-----")
_PEM_END: Final = re.compile(r"-----END [A-Z0-9 ]{0,30}PRIVATE KEY(?: BLOCK)?-----")
_IN_URL: Final = re.compile(r"://[^\s/:@]{0,100}+:([^\s/]{1,200})@")
_OF_USER: Final = re.compile(
    r"(?<!\S)(?:-u|--user)[ =]{0,3}[\"']?[^\s:\"']{1,64}+:([^\s\"']{1,200}+)"
)
_HEADER: Final = re.compile(
    r"(?<![^\W_])(?:(?P<header>authorization)[\"'*_\\]{0,3}\s{0,3}[:=][\"'\s\\]{0,4}"
    r"(?:bearer|basic|token|digest)|bearer)\s{1,3}(?P<value>[A-Za-z0-9+/=._~-]{6,4096}+)",
    re.IGNORECASE,
)
_LONG: Final = re.compile(r"(?<![A-Za-z0-9_+/=.-])[A-Za-z0-9_+/=-]{32,256}(?![A-Za-z0-9_+/=-])")
_KEY: Final = 15  # characters of the shortest key of a service
_RANDOM: Final = 32
_CHANGES: Final = re.compile(r"[a-z]+|[A-Z]+|[0-9]+")
_BEFORE_DATA: Final = ("base64,", "/", "sha256-", "sha512-")


@OnPlain
def secrets(text: str) -> Iterator[Found]:
    """Keys and tokens by their form, private keys, passwords by what is said of them."""
    yield from _known(text)
    if _longest(text) >= _RANDOM:
        for match in _LONG.finditer(text):
            if _is_random(match[0]) and not _is_data(text, match.start()):
                yield SECRET, match.start(), match.end()


@OnPlain
def known_secrets(text: str) -> Iterator[Found]:
    """Those of `secrets` that no id of a message or a thread is mistaken for."""
    yield from _known(text)


def _known(text: str) -> Iterator[Found]:
    if _longest(text) >= _KEY:
        for needle, pattern in _KEYS:
            if needle in text:
                for match in pattern.finditer(text):
                    yield SECRET, match.start(), match.end()
    if "-----BEGIN" in text:
        yield from _private_keys(text)
    lowered = text.lower()
    yield from _credentials(text, lowered)
    yield from passwords(text, lowered)


def _credentials(text: str, lowered: str) -> Iterator[Found]:
    """What a program gives as its password, in an address, a command or a header."""
    for needle, pattern in (("://", _IN_URL), ("curl", _OF_USER)):
        if needle in lowered:
            for match in pattern.finditer(text):
                yield SECRET, match.start(1), match.end(1)
    if "bearer" in lowered or "authorization" in lowered:
        for match in _HEADER.finditer(text):
            if _is_drawn(match["value"], bool(match["header"])):
                yield SECRET, match.start("value"), match.end("value")


def _longest(text: str) -> int:
    return max(map(len, text.split()), default=0)


def _private_keys(text: str) -> Iterator[Found]:
    at = 0
    while begin := _PEM_BEGIN.search(text, at):
        end = _PEM_END.search(text, begin.end())
        at = end.end() if end else len(text)  # one that was cut off is still one
        yield SECRET, begin.start(), at


def _is_drawn(value: str, header: bool) -> bool:
    """Whether what follows "Bearer" is no word."""
    digits = any(map(str.isdigit, value))
    if not header:
        return digits and len(value) >= 12
    return digits or value.endswith("=") or not value[1:].islower()


def _is_data(text: str, start: int) -> bool:
    return text.endswith(_BEFORE_DATA, max(0, start - 8), start)


def _is_random(token: str) -> bool:
    """Whether a token is drawn by lot: it goes from small letters to capitals to digits and back.

    A number in hexadecimal, a UUID and names in code do not, nor do they have all three.
    """
    runs = _CHANGES.findall(token)
    kinds = [
        sum(map(str.isdigit, token)),
        sum(map(str.isupper, token)),
        sum(map(str.islower, token)),
    ]
    return min(kinds) >= 3 and len(runs) >= 0.45 * len(token)
