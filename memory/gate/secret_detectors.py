"""Secrets in a text: keys of services, private keys, tokens, passwords that are named as such."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

SECRET: Final = "secret"
Found = tuple[str, int, int]
"""What it is, where it begins, where it ends."""

# with a text that each match contains, which is looked for first
_KEYS: Final = tuple(
    (needle, re.compile(rf"(?<![A-Za-z0-9_-]){pattern}"))
    for needle, pattern in (
        ("sk-", r"sk-(?=[a-zA-Z_-]{0,40}+\d)[A-Za-z0-9_-]{20,300}+"),  # OpenAI, Anthropic
        ("sk-", r"sk-(?:proj|ant|svcacct|or)-[A-Za-z0-9_-]{16,300}+"),
        ("A", r"A(?:KIA|SIA|BIA|CCA)[A-Z0-9]{16}(?![A-Za-z0-9])"),  # AWS
        ("gh", r"gh[pousr]_[A-Za-z0-9]{30,255}+"),  # GitHub
        ("github_pat_", r"github_pat_[A-Za-z0-9_]{22,255}+"),
        ("glpat-", r"glpat-[A-Za-z0-9_-]{20,100}+"),  # GitLab
        ("xox", r"xox[abeoprs]-[A-Za-z0-9-]{10,250}+"),  # Slack
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
_IN_URL: Final = re.compile(r"://[^\s/:@]{1,100}+:([^\s/@]{1,200}+)@")

_NAMES: Final = (
    *("passw", "passph", "passc", "pwd", "kennwort", "contrase", "mot de passe", "token", "secret"),
    *("pin ", "pin:", "pin=", "pin-", "key:", "key=", "key is", "key ="),
)
_GIVEN: Final = (
    r"(?P<sign>\s{0,3}(?:is|was|are|ist|lautet|es|est)?\s{0,3}[:=]|\s{1,3}(?:is|ist|lautet|es|est))"
)
_NAMED: Final = re.compile(
    r"(?<![^\W_])(?:(?P<password>pass(?:wor[dt]|wd|phrase|code)|pwd|kennwort|contrase(?:ñ|n)a|"
    r"mot de passe)|(?P<pin>pin(?:[ -]?(?:code|number))?)|"
    r"(?P<key>(?:api|access|auth|client|private|secret|bearer)[ _-]?(?:key|token|secret)|"
    r"token|secret))"
    rf"{_GIVEN}\s{{0,3}}[\"'`]?(?P<value>[^\s\"'`]{{3,256}}+)",
    re.IGNORECASE,
)
# what "the password is …" goes on with when it does not tell the password
_OTHERWISE: Final = """
    a an the my your our his her its their this that these those not no never too very so more one
    less now still also only just always and or but if in on at of for to from by with as required
    needed necessary wrong right correct incorrect invalid valid weak strong expired missing
    stored saved kept hidden secret safe secure insecure encrypted hashed protected changed reset
    set unset sent shared known unknown lost forgotten long short old new same different empty
    optional mandatory case-sensitive visible there here what where when why how something
    somewhere written being going working broken hard easy difficult impossible
    nicht kein falsch richtig abgelaufen zu sehr noch im auf ein eine der die das
"""
_NO_PASSWORD: Final = frozenset(_OTHERWISE.split())
_LONG: Final = re.compile(r"(?<![A-Za-z0-9_+/=.-])[A-Za-z0-9_+/=-]{32,256}(?![A-Za-z0-9_+/=-])")
_KEY: Final = 15  # characters of the shortest key of a service
_RANDOM: Final = 32
_CHANGES: Final = re.compile(r"[a-z]+|[A-Z]+|[0-9]+")
_BEFORE_DATA: Final = ("base64,", "/", "sha256-", "sha512-")


def secrets(text: str) -> Iterator[Found]:
    """Keys and tokens by their form, private keys, passwords by what is said of them."""
    yield from known_secrets(text)
    if _longest(text) >= _RANDOM:
        for match in _LONG.finditer(text):
            if _is_random(match[0]) and not text[: match.start()].endswith(_BEFORE_DATA):
                yield SECRET, match.start(), match.end()


def known_secrets(text: str) -> Iterator[Found]:
    """Those of `secrets` that no id of a message or a thread is mistaken for."""
    if _longest(text) >= _KEY:
        for needle, pattern in _KEYS:
            if needle in text:
                for match in pattern.finditer(text):
                    yield SECRET, match.start(), match.end()
    if "-----BEGIN" in text:
        yield from _private_keys(text)
    if "://" in text:
        for match in _IN_URL.finditer(text):
            yield SECRET, match.start(1), match.end(1)
    lowered = text.lower()
    for name in _NAMES:
        if name in lowered:
            yield from _named(text)
            break


def _longest(text: str) -> int:
    return max(map(len, text.split()), default=0)


def _private_keys(text: str) -> Iterator[Found]:
    at = 0
    while begin := _PEM_BEGIN.search(text, at):
        end = _PEM_END.search(text, begin.end())
        at = end.end() if end else len(text)  # one that was cut off is still one
        yield SECRET, begin.start(), at


def _named(text: str) -> Iterator[Found]:
    for match in _NAMED.finditer(text):
        value = match["value"].rstrip(".,;:!?)")
        if _tells(match, value):
            start = match.start("value")
            yield SECRET, start, start + len(value)


def _tells(match: re.Match[str], value: str) -> bool:
    """Whether what follows the name of a secret is the secret."""
    digits = any(map(str.isdigit, value))
    if match["pin"]:
        return value.isdigit() and len(value) <= 12
    if match["key"]:
        return len(value) >= 8 and digits
    if not match["sign"].strip().endswith((":", "=")):
        return value.lower() not in _NO_PASSWORD
    return digits or value.lower() not in _NO_PASSWORD


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
