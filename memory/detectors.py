"""Detectors of secrets, cards, bank accounts and contacts in a text.

A detector is a function: it takes a text and tells where in it something of a kind stands. The
forms that need no library are known here: named passwords, keys with a known prefix, private keys,
cards and accounts by their check digits, addresses, telephone numbers. With the extra `privacy`,
`service_keys` asks detect-secrets and `phone_numbers` asks phonenumbers.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from perdure.errors import ConfigurationError

Finding = tuple[str, int, int]
"""A kind, and where it stands: `text[start:end]`."""
Detector = Callable[[str], Iterable[Finding]]
"""Its kinds are `"secret"`, `"card"`, `"iban"`, `"e-mail"`, `"phone"`, or yours: those count as
secrets."""
CONTACTS: Final = frozenset({"e-mail", "phone"})
CARDS: Final = frozenset({"card", "iban"})

_PREFIXES: Final = (
    *("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "xoxa-", "xoxb-", "xoxe-"),
    *("xoxo-", "xoxp-", "xoxr-", "xoxs-", "AIza", "sk_live_", "sk_test_", "rk_live_", "rk_test_"),
    *("npm_", "hf_", "pypi-", "SG."),
)
# what a text contains in small letters if the pattern may match it
_PATTERNS: Final = (
    (
        [prefix.lower() for prefix in _PREFIXES],
        re.compile(
            rf"(?<![A-Za-z0-9])(?P<value>(?:{'|'.join(map(re.escape, _PREFIXES))})"
            r"(?=[A-Za-z_.-]{0,60}\d)[A-Za-z0-9_.-]{16,300}+)"
        ),
    ),
    (
        ["sk-", "akia", "asia", "eyj"],
        re.compile(
            r"(?<![A-Za-z0-9])(?P<value>sk-(?:[a-z]{2,10}\d{0,2}-){0,2}(?=[A-Za-z_]{0,40}\d)"
            r"\w{16,300}+[\w-]{0,300}+|A(?:KIA|SIA)[A-Z0-9]{16}(?![A-Za-z0-9])"
            r"|eyJ[\w-]{8,}+\.eyJ[\w-]{8,}+(?:\.[\w-]*+)?)",
            re.ASCII,
        ),
    ),
    (
        ["-----begin"],
        re.compile(
            r"(?P<value>-----BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY(?: BLOCK)?-----"
            r"(?:[^-]|-(?!----END))*+(?:-----END[A-Z0-9 ]{0,40}-----)?)"
        ),
    ),
    (["://"], re.compile(r"://[^\s/:@]{0,100}+:(?P<value>[^\s/]{1,200})@")),
    (
        ["bearer ", "basic "],
        re.compile(
            r"\b(?:bearer|basic) {1,3}(?P<value>(?=[^\s\"']{0,60}\d)[\w+/=.~-]{12,4096}+)",
            re.IGNORECASE,
        ),
    ),
    (
        ["seed", "recovery", "mnemonic"],
        re.compile(
            r"\b(?:seed|recovery|mnemonic)(?: phrase| words)?\W{0,3}(?:is )?"
            r"(?P<value>(?:[a-z]{3,8} ){11,23}[a-z]{3,8})(?![a-z])"
        ),
    ),
)
_NAMED: Final = re.compile(
    r"(?:(?P<password>passwor[dt]|passwd|passphrase|passcode|pwd|kennwort|wachtwoord|contrase(?:ñ|n\u0303?)a"
    r"|mot de passe|senha|пароль|密码|密碼|パスワード)"
    r"|(?<![^\W_])(?P<pin>pin(?:[ _-]?code)?|cvv2?|cvc2?|otp|(?:recovery|backup|security) code)"
    r"|(?:api|access|secret|private|auth|refresh)[ _-]?(?:key|token)|secret|token"
    r"|(?<![^\W_])(?:pass|pw)(?=[\"'*]{0,3} ?[:=]))"
    r"(?P<sign>[\"'`*_\\>]{0,4}\s{0,3}(?:[:=>]|[-=]>|\u2192)|(?:\s[\w.@'-]{1,30}){0,4}?\s(?:is|ist|es|est)"
    r"(?=\s)|是|(?=\s))[\"'`*_\\]{0,4}\s{0,10}[*\\]{0,3}"
    r"(?:(?P<quote>[\"'`])(?P<quoted>[^\n\"'`]{1,256}+)|(?<![\"'`])(?P<bare>[^\s\"'`<>]{1,256}+)|"
    r"(?<=[\"'`])(?P<within>[^\n\"'`]{1,256}+))",
    re.IGNORECASE,
)
_HINTS: Final = (
    *("passw", "passp", "passc", "pass:", "pass=", 'pass"', "_pass", "pwd", "pw:", "pw=", "kennw"),
    *(
        "wachtw",
        "contras",
        "mot de p",
        "senha",
        "парол",
        "密",
        "パス",
        "pin ",
        "pin:",
        "pin=",
        'pin"',
    ),
    *(
        "pin-",
        "pin_",
        "pincode",
        "cvv",
        "cvc",
        "otp",
        "y code",
        "p code",
        "pi key",
        "ss key",
        "te key",
        "th key",
        "_key",
        "-key",
    ),
    *("ikey", "sskey", "tkey", "token", "secret", "pin*"),
)
_NAMES: Final = re.compile(
    r"pass|pwd|kenn|wacht|contra|mot de|senha|парол|密|パス|pin|cvv|cvc|otp|recov|backup|secur|api"
    r"|access|secret|private|auth|refresh|token|pw",
    re.IGNORECASE,
)
_END: Final = re.compile(r"\s{0,3}(?:$|\n)|(?<=[.,;!?])\s")
_ENDS: Final = ".,;:!?)]}>*\\。"
_NO_VALUE: Final = re.compile(r"\W*|\[.*|\$.*|\{.*|null|none|true|false", re.IGNORECASE)
_LONG: Final = re.compile(r"(?<![\w+/=.-])[A-Za-z0-9_+/=-]{32,256}(?![\w+/=-])")
_RUNS: Final = re.compile(r"[a-z]+|[A-Z]+|[0-9]+")
_DIGITS: Final = re.compile(r"\d(?:[\W_]{0,4}+\d){6}")  # of a card or a telephone number
_CARD: Final = re.compile(
    r"(?<![\d.])(?:(?:[3-6]\d|2[2-7])\d{2}(?:[ ./_-]{0,2}\d{4}){3}"
    r"|3[47]\d{2}[ -]?\d{6}[ -]?\d{5})(?!\d|[A-Za-z]\b)"
)
_IBAN: Final = re.compile(r"(?<![A-Z0-9])[A-Z]{2}\d{2}(?:[ ./_-]{0,2}[A-Z0-9]){11,30}")
_EMAIL: Final = re.compile(
    r"(?<![\w.+%'-])(?!git@)[\w.+%'-]{1,64}+@(?:[^\W_](?:[\w-]{0,61}[^\W_])?\.){1,6}[^\W\d_]{2,24}"
    r"(?![\w@])"
)
_PHONE: Final = re.compile(
    r"(?<![\w+])(?:\+|00)[1-9](?:[ ./()-]{0,3}\d){6,14}(?!\d)"
    r"|(?<![\w.,:/$€£+-])(?<![\d$€£] )"
    r"(?:\(\d{2,5}\) ?|0\d{2,4}[ /-]{1,3}|[2-9]\d{2}[ .-](?=\d{3}[ .-]\d{4}\b))"
    r"\d{2,8}(?:[ .-]\d{2,8}){0,4}(?!\w)"
    r"|(?<![\w.,:/$€£+-])0[1-9](?:[ .]\d\d){4}(?![ .]?\d|\w)"
)
_CALLED: Final = re.compile(
    r"(?:phone|telefon|\btel|\bmobile|\bcell|\bfax|whatsapp|\b(?:my|his|her|our) number|手机|电话)"
    r"(?:nummer| number)?\W{1,3}(?:is\W|ist\W)?(?P<value>\d(?:[ ./-]?\d){8,12})(?!\w|[.:]\d)",
    re.IGNORECASE,
)
_SERVICES: Final = (
    *("artifactory", "aws", "azure_storage_key", "cloudant", "discord", "github_token"),
    *("gitlab_token", "ibm_cloud_iam", "mailchimp", "npm", "openai", "pypi_token", "sendgrid"),
    *("slack", "square_oauth", "stripe", "telegram_token", "twilio"),
)
_FORMS: Final = {"Cf": "", "Zs": " ", "Pd": "-", "Pi": '"', "Pf": '"'}


def secrets(text: str) -> Iterator[Finding]:
    """Passwords and PINs that are named, keys with a known prefix, private keys, credentials."""
    lowered = text.lower()
    for needles, pattern in _PATTERNS:
        if any(needle in lowered for needle in needles):
            for match in pattern.finditer(text):
                yield "secret", *match.span("value")
    at = 0
    for name in _NAMES.finditer(text) if any(each in lowered for each in _HINTS) else ():
        match = _NAMED.match(text, name.start()) if name.start() >= at else None
        if match and (value := _value(match)):
            at = match.end()
            start = max(map(match.start, ("quoted", "bare", "within")))
            yield "secret", start, start + len(value)


def _value(match: re.Match[str]) -> str | None:
    """The secret that follows its name; None: what follows is none.

    Behind ": " a password may be any word; behind "is" one that ends the sentence, or has a digit.
    """
    quoted = match["quoted"] or match["within"]
    value: str = quoted or match["bare"].rstrip(_ENDS)
    told = any(sign in match["sign"] for sign in ":=>\u2192是")
    if _NO_VALUE.fullmatch(value):
        return None
    if match["pin"]:
        return value if value.replace("-", "").isdecimal() and 3 <= len(value) <= 9 else None
    digits = any(map(str.isdigit, value))
    if match["password"] and told:
        return value if len(value) >= 3 else None
    if match["password"] and match["sign"].split() and value.isalpha():
        ends = _END.match(match.string, match.end())
        return value if len(match["sign"].split()) == 1 and ends and len(value) >= 4 else None
    least = 4 if match["password"] else 6 if told else 12
    return value if digits and len(value) >= least and not value.isdecimal() else None


def random_tokens(text: str) -> Iterator[Finding]:
    """Words of 32 characters and more that go from small letters to capitals to digits and back."""
    for match in _LONG.finditer(text) if len(text) >= 32 else ():
        token = match[0]
        counts = (sum(map(kind, token)) for kind in (str.isdigit, str.isupper, str.islower))
        if min(counts) >= 3 and len(_RUNS.findall(token)) >= 0.45 * len(token):
            yield "secret", match.start(), match.end()


def cards(text: str) -> Iterator[Finding]:
    """Numbers of payment cards, of 15 or 16 digits, by Luhn's check digit."""
    for match in _CARD.finditer(text) if _DIGITS.search(text) else ():
        digits = [int(char) for char in reversed(match[0]) if char.isdecimal()]
        doubled = (sum(divmod(2 * digit, 10)) for digit in digits[1::2])
        if (sum(digits[::2]) + sum(doubled)) % 10 == 0:
            yield "card", match.start(), match.end()


def ibans(text: str) -> Iterator[Finding]:
    """Numbers of bank accounts, by the check digits of ISO 13616."""
    for match in _IBAN.finditer(text):
        written = match[0]
        for end in range(len(written), 14, -1):
            whole = end == len(written) or not written[end].isalnum()
            if whole and written[end - 1].isalnum() and _is_iban(written[:end]):
                yield "iban", match.start(), match.start() + end
                break


def _is_iban(written: str) -> bool:
    signs = [char for char in written if char.isalnum()]
    if sum(map(str.isdecimal, signs)) < 10:
        return False
    return int("".join(str(int(char, 36)) for char in signs[4:] + signs[:4])) % 97 == 1


def emails(text: str) -> Iterator[Finding]:
    """E-mail addresses."""
    for match in _EMAIL.finditer(text) if "@" in text else ():
        yield "e-mail", match.start(), match.end()


def phones(text: str) -> Iterator[Finding]:
    """Telephone numbers of 9 to 15 digits: international ones, and common national forms."""
    if not _DIGITS.search(text):
        return
    for match in _PHONE.finditer(text):
        if match[0][0] == "+" or 9 <= sum(map(str.isdecimal, match[0])) <= 13:
            yield "phone", match.start(), match.end()
    for match in _CALLED.finditer(text):
        yield "phone", *match.span("value")


def phone_numbers(region: str) -> Detector:
    """A detector of the telephone numbers of a region, by phonenumbers, which knows all plans.

    Args:
        region: Two letters, like "US".

    Raises:
        ConfigurationError: The extra `privacy` is not installed, or there is no such region.
    """
    if find_spec("phonenumbers") is None:
        raise ConfigurationError(
            "phone_numbers needs phonenumbers; run: pip install 'perdure[privacy]'"
        )
    library: Any = import_module("phonenumbers")
    if region not in library.SUPPORTED_REGIONS:
        raise ConfigurationError(f"region is {region!r:.80}; expected two letters, like 'US'")

    def numbers(text: str) -> Iterator[Finding]:
        for match in library.PhoneNumberMatcher(text, region):
            yield "phone", match.start, match.end

    return numbers


def service_keys(text: str) -> Iterator[Finding]:
    """Keys of cloud services, by detect-secrets; nothing without the extra `privacy`."""
    for pattern in _service_patterns():
        for match in pattern.finditer(text):
            yield "secret", match.start(), match.end()


@lru_cache(1)
def _service_patterns() -> tuple[re.Pattern[str], ...]:
    if find_spec("detect_secrets") is None:
        return ()
    plugins = [import_module(f"detect_secrets.plugins.{name}") for name in _SERVICES]
    found = [
        pattern
        for plugin in plugins
        for each in vars(plugin).values()
        if isinstance(each, type) and each.__module__ == plugin.__name__
        for pattern in getattr(each, "denylist", ())
    ]
    return tuple(found)


DETECTORS: Final[tuple[Detector, ...]] = (
    *(secrets, random_tokens, cards, ibans, emails, phones, service_keys),
)
"""The detectors that are built in."""
OF_SENTENCES: Final[tuple[Detector, ...]] = (random_tokens, emails, phones)
"""Those of them that take an id for something else."""


def spans_of(text: str, detectors: Iterable[Detector]) -> list[Finding]:
    """What detectors find in a text, from left to right; findings that overlap become one.

    They see the text in one form: without unseen characters, and with the digits, spaces, dashes
    and quotes of ASCII.
    """
    plain, places = (text, None) if text.isascii() else _unified(text)
    found = [(start, end, kind) for each in detectors for kind, start, end in each(plain)]
    merged: list[Finding] = []
    for start, end, kind in sorted(found, key=lambda each: each[0]):
        if merged and start < merged[-1][2]:
            merged[-1] = merged[-1][0], merged[-1][1], max(end, merged[-1][2])
        else:
            merged.append((kind, start, end))
    if places is None:
        return merged
    return [(kind, places[start], places[end - 1] + 1) for kind, start, end in merged]


def redacted(text: str, spans: Sequence[Finding]) -> str:
    """A text with its findings, as of `spans_of`, redacted.

    >>> redacted("Ask ann@example.com.", spans_of("Ask ann@example.com.", DETECTORS))
    'Ask [e-mail].'
    """
    for kind, start, end in reversed(spans):
        text = f"{text[:start]}[{kind}]{text[end:]}"
    return text


def _unified(text: str) -> tuple[str, list[int]]:
    """A text in one form of its characters, and the place in the text of each."""
    plain: list[str] = []
    places: list[int] = []
    for place, char in enumerate(text):
        form = _form(char)
        plain.append(form)
        places += [place] * len(form)
    return "".join(plain), places


@lru_cache(1 << 14)
def _form(char: str) -> str:
    form = _FORMS.get(unicodedata.category(char))
    return unicodedata.normalize("NFKC", char) if form is None else form
