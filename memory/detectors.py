"""Detectors of secrets, cards, bank accounts and contacts in a text.

A detector is a function: it takes a text and tells where in it something of a kind stands. The
forms that need no library are known here: named passwords, keys with a known prefix, private keys,
cards and accounts by their check digits, addresses, telephone numbers. With the extra `privacy`,
`service_keys` asks detect-secrets and `phone_numbers` asks phonenumbers. `Sensitive` decides what
is done about the findings.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, Literal

from perdure.errors import ConfigurationError
from perdure.memory.options import choice
from perdure.memory.records import KEEP, Action, Candidate, Verdict

Finding = tuple[str, int, int]
"""A kind, and where it stands: `text[start:end]`."""
Detector = Callable[[str], Iterable[Finding]]
"""Its kinds are `"secret"`, `"card"`, `"iban"`, `"e-mail"`, `"phone"`, or yours: those count as
secrets."""
CONTACTS: Final = frozenset({"e-mail", "phone"})
CARDS: Final = frozenset({"card", "iban"})

Treatment = Literal["keep", "redact", "quarantine", "refuse"]
"""What is done about a secret or a contact."""

_KINDS: Final = {
    "secret": "a password, key or other secret",
    "card": "the number of a payment card",
    "iban": "the number of a bank account",
    "e-mail": "an e-mail address",
    "phone": "a telephone number",
}
_PREFIXES: Final = (
    "ghp_|gho_|ghu_|ghs_|ghr_|github_pat_|glpat-|xoxa-|xoxb-|xoxe-|xoxo-|xoxp-|xoxr-|xoxs-|AIza"
    "|sk_live_|sk_test_|rk_live_|rk_test_|npm_|hf_|pypi-|SG."
)
# a text matches only if, in small letters, it contains one of the words before the pattern
_PATTERNS: Final = tuple(
    (needles.lower().split("|"), re.compile(pattern))
    for needles, pattern in (
        (
            f"{_PREFIXES}|sk-|akia|asia|eyj",
            rf"(?a)(?<![A-Za-z0-9])(?P<value>(?:{_PREFIXES.replace('.', '[.]')})"
            r"(?=[A-Za-z_.-]{0,60}\d)[\w.-]{16,300}+"
            r"|sk-(?:[a-z]{2,10}\d{0,2}-){0,2}(?=[A-Za-z_]{0,40}\d)\w{16,300}+[\w-]{0,300}+"
            r"|A(?:KIA|SIA)[A-Z0-9]{16}\b|eyJ[\w-]{8,}+\.eyJ[\w-]{8,}+(?:\.[\w-]*+)?)",
        ),
        (
            "-----begin",
            r"(?P<value>-----BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY(?: BLOCK)?-----"
            r"(?:[^-]|-(?!----END))*+(?:-----END[A-Z0-9 ]{0,40}-----)?)",
        ),
        ("://", r"://[^\s/:@]{0,100}+:(?P<value>[^\s/]{1,200})@"),
        (
            "bearer |basic ",
            r"(?i)\b(?:bearer|basic) {1,3}(?P<value>(?=[^\s\"']{0,60}\d)[\w+/=.~-]{12,4096}+)",
        ),
        (
            "seed|recovery|mnemonic",
            r"\b(?:seed|recovery|mnemonic)(?: phrase| words)?\W{0,3}(?:is )?"
            r"(?P<value>(?:[a-z]{3,8} ){11,23}[a-z]{3,8})(?![a-z])",
        ),
    )
)
_NAMED: Final = re.compile(
    r"(?=(?:(?P<password>passwor[dt]|passwd|passphrase|passcode|pwd|kennwort|wachtwoord"
    r"|contrase(?:ñ|n\u0303?)a|mot de passe|senha|пароль|密码|密碼|パスワード)"
    r"|(?<![^\W_])(?P<pin>pin(?:[ _-]?code)?|cvv2?|cvc2?|otp|(?:recovery|backup|security) code)"
    r"|(?:api|access|secret|private|auth|refresh)[ _-]?(?:key|token)|secret|token"
    r"|(?<![^\W_])(?:pass|pw)(?=[\"'*]{0,3} ?[:=]))"
    r"(?P<sign>[\"'`*_\\>]{0,4}\s{0,3}(?:[:=>]|[-=]>|\u2192)"
    r"|(?:\s[\w.@'-]{1,30}){0,4}?\s(?:is|ist|es|est)(?=\s)|是|(?=\s))[\"'`*_\\]{0,4}\s{0,10}[*\\]{0,3}"
    r"(?:(?P<quote>[\"'`])(?P<quoted>[^\n\"'`]{1,256}+)|(?<![\"'`])(?P<bare>[^\s\"'`<>]{1,256}+)|"
    r"(?<=[\"'`])(?P<within>[^\n\"'`]{1,256}+)))",
    re.IGNORECASE,
)
_HINT_WORDS: Final = (
    'passw|passp|passc|pass:|pass=|pass"|_pass|pwd|pw:|pw=|kennw|wachtw|contras|mot de p|senha'
    '|парол|密|パス|pin |pin:|pin=|pin"|pin-|pin_|pin*|pincode|cvv|cvc|otp|y code|p code|pi key'
    "|ss key|te key|th key|_key|-key|ikey|sskey|tkey|token|secret"
)
_HINTS: Final = tuple(_HINT_WORDS.split("|"))
_END: Final = re.compile(r"[^\w\s]{0,4}\s{0,3}(?:$|\n)|[.,;!?]\s")
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
_SERVICES: Final = (  # plugins of detect-secrets
    "artifactory aws azure_storage_key cloudant discord github_token gitlab_token ibm_cloud_iam "
    "mailchimp npm openai pypi_token sendgrid slack square_oauth stripe telegram_token twilio"
)
_SHORTEST_KEY: Final = 20
_FORMS: Final = {"Cf": "", "Zs": " ", "Pd": "-", "Pi": '"', "Pf": '"'}


def secrets(text: str) -> Iterator[Finding]:
    """Passwords and PINs that are named, keys with a known prefix, private keys, credentials."""
    lowered = text.lower()
    for needles, pattern in _PATTERNS:
        if any(map(lowered.__contains__, needles)):
            for match in pattern.finditer(text):
                yield "secret", *match.span("value")
    at = 0
    for named in _NAMED.finditer(text) if any(map(lowered.__contains__, _HINTS)) else ():
        start = max(map(named.start, ("quoted", "bare", "within")))
        if named.start() >= at and (value := _value(named, start)):
            at = start + len(value)
            yield "secret", start, at


def _value(named: re.Match[str], start: int) -> str | None:
    """The secret that follows its name; None: what follows is none.

    Behind ": " a password may be any word; behind "is" one that ends the sentence, or has a digit.
    """
    value: str = named["quoted"] or named["within"] or named["bare"].rstrip(_ENDS)
    told = any(sign in named["sign"] for sign in ":=>\u2192是")
    if _NO_VALUE.fullmatch(value):
        return None
    if named["pin"]:
        return value if value.replace("-", "").isdecimal() and 3 <= len(value) <= 9 else None
    least = 3 if told else 4
    if not named["password"]:
        least = 6 if told else 12
    elif not told and value.isalpha():
        is_last = _END.match(named.string, start + len(value))
        return (
            value if len(named["sign"].split()) == 1 and is_last and len(value) >= least else None
        )
    elif told:
        return value if len(value) >= least else None
    mixed = any(map(str.isdigit, value)) and not value.isdecimal()
    return value if mixed and len(value) >= least else None


def random_tokens(text: str) -> Iterator[Finding]:
    """Words of 32 characters and more that go from small letters to capitals to digits and back."""
    for match in _LONG.finditer(text) if len(text) >= 32 else ():
        token = match[0]
        counts = (sum(map(kind, token)) for kind in (str.isdigit, str.isupper, str.islower))
        if min(counts) >= 3 and len(_RUNS.findall(token)) >= 0.45 * len(token):
            yield "secret", match.start(), match.end()


def cards(text: str) -> Iterator[Finding]:
    """Payment cards of 15 or 16 digits, by Luhn's check, and bank accounts, by ISO 13616's."""
    for match in _CARD.finditer(text) if _DIGITS.search(text) else ():
        digits = [int(char) for char in reversed(match[0]) if char.isdecimal()]
        doubled = (sum(divmod(2 * digit, 10)) for digit in digits[1::2])
        if (sum(digits[::2]) + sum(doubled)) % 10 == 0:
            yield "card", match.start(), match.end()
    for match in _IBAN.finditer(text):
        ends = (end.end() for end in reversed([*re.finditer(r"[A-Z0-9]\b", match[0])]))
        length = next((end for end in ends if _is_iban(match[0][:end])), 0)
        if length:
            yield "iban", match.start(), match.start() + length


def _is_iban(written: str) -> bool:
    signs = [char for char in written if char.isalnum()]
    if len(signs) < 15 or sum(map(str.isdecimal, signs)) < 10:
        return False
    return int("".join(str(int(char, 36)) for char in signs[4:] + signs[:4])) % 97 == 1


def emails(text: str) -> Iterator[Finding]:
    """E-mail addresses."""
    for match in _EMAIL.finditer(text) if "@" in text else ():
        yield "e-mail", match.start(), match.end()


def phones(text: str) -> Iterator[Finding]:
    """Telephone numbers: international ones, and common national forms."""
    if _DIGITS.search(text):
        for match in _PHONE.finditer(text):
            if match[0][0] == "+" or 9 <= sum(map(str.isdecimal, match[0])) <= 13:
                yield "phone", match.start(), match.end()
        for match in _CALLED.finditer(text):
            yield "phone", *match.span("value")


def phone_numbers(region: str) -> Detector:
    """A detector of the telephone numbers of a region like "US", by phonenumbers.

    Raises:
        ConfigurationError: The extra `privacy` is not installed, or there is no such region.
    """
    if find_spec("phonenumbers") is None:
        raise ConfigurationError(
            "phone_numbers needs phonenumbers; run: pip install 'perdure[privacy]'"
        )
    library: Any = import_module("phonenumbers")
    choice("region", region, sorted(library.SUPPORTED_REGIONS))

    def numbers(text: str) -> Iterator[Finding]:
        for match in library.PhoneNumberMatcher(text, region):
            yield "phone", match.start, match.end

    return numbers


def service_keys(text: str) -> Iterator[Finding]:
    """Keys of cloud services, by detect-secrets; nothing without the extra `privacy`."""
    longest = max(map(len, text.split()), default=0)
    for pattern in _service_patterns() if longest >= _SHORTEST_KEY else ():
        for match in pattern.finditer(text):
            yield "secret", match.start(), match.end()


@lru_cache(1)
def _service_patterns() -> tuple[re.Pattern[str], ...]:
    if find_spec("detect_secrets") is None:
        return ()
    plugins = [import_module(f"detect_secrets.plugins.{name}") for name in _SERVICES.split()]
    found = [
        pattern
        for plugin in plugins
        for each in vars(plugin).values()
        if isinstance(each, type) and each.__module__ == plugin.__name__
        for pattern in getattr(each, "denylist", ())
    ]
    return tuple(found)


DETECTORS: Final[tuple[Detector, ...]] = (
    *(secrets, random_tokens, cards, emails, phones, service_keys),
)
"""The detectors that are built in."""
_OF_SENTENCES: Final = (random_tokens, emails, phones)  # they take an id for something else


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
    parts, at = [], 0
    for kind, start, end in spans:
        parts += [text[at:start], f"[{kind}]"]
        at = end
    return "".join([*parts, text[at:]])


@dataclass(frozen=True, slots=True)
class Sensitive:
    """What is done about secrets and contacts, and the functions that find them; see `Gate`."""

    secrets: Treatment
    cards: Treatment
    contacts: Treatment
    detectors: Sequence[Detector]

    def judged(self, candidate: Candidate) -> Verdict:
        """A verdict on secrets and contacts; to quarantine, if a detector raises."""
        try:
            spans = spans_of(candidate.text, self.detectors)
            kinds = self._kinds(candidate, spans)
        except Exception as exc:  # a detector of the user's, whose message may quote the secret
            fault = f"a detector raised {type(exc).__name__}, so nobody knows what it holds"
            return Verdict("quarantine", fault, "detectors")
        found: dict[str, list[str]] = {}
        for kind in kinds:
            found.setdefault(self.treatment(kind, candidate.explicit), []).append(kind)
        worst: Sequence[Action] = ("refuse", "quarantine")
        for action in worst:
            if action in found:
                return Verdict(action, f"it holds {_named(found[action])}", _check(found[action]))
        if "redact" not in found:
            return KEEP
        hidden = [span for span in spans if span[0] in found["redact"]]
        text = redacted(candidate.text, hidden) if hidden else None
        reason = f"{_named(found['redact'])} is redacted"
        return Verdict("keep", reason, _check(found["redact"]), text)

    def redacted_fields(self, candidate: Candidate) -> tuple[list[str], dict[str, Any]]:
        """The kinds that are redacted in a candidate that is kept, and its redacted fields."""
        explicit, fields = candidate.explicit, candidate.fields.items()
        kinds = self._kinds(candidate, spans_of(candidate.text, self.detectors))
        redacts = [kind for kind in kinds if self.treatment(kind, explicit) == "redact"]
        return redacts, {name: self._redacted(part, explicit, name) for name, part in fields}

    def redacted(self, text: str) -> str:
        """A text without anything sensitive, to be shown."""
        return redacted(text, spans_of(text, self.detectors))

    def treatment(self, kind: str, explicit: bool) -> Treatment:
        """What is done about a kind."""
        if kind in CONTACTS:
            return "keep" if explicit and self.contacts == "redact" else self.contacts
        return self.cards if kind in CARDS else self.secrets

    def _kinds(self, candidate: Candidate, spans: Sequence[Finding]) -> list[str]:
        found = [*spans]
        for name, text, _ in texts_in(candidate.fields):
            found += self._spans_in_field(text, name)
        return list(dict.fromkeys(kind for kind, _, _ in found))

    def _redacted(self, part: Any, explicit: bool, name: str) -> Any:
        if isinstance(part, str):
            spans = self._spans_in_field(part, name)
            return redacted(part, [s for s in spans if self.treatment(s[0], explicit) == "redact"])
        if isinstance(part, Mapping):
            return {key: self._redacted(each, explicit, str(key)) for key, each in part.items()}
        if isinstance(part, list | tuple):
            return [self._redacted(each, explicit, name) for each in part]
        return part

    def _spans_in_field(self, text: str, name: str) -> list[Finding]:
        """The findings in a field. One word may be an id, and by the field's name a password."""
        if len(text.split(maxsplit=1)) > 1:
            return spans_of(text, self.detectors)
        spans = spans_of(text, [each for each in self.detectors if each not in _OF_SENTENCES])
        if spans or not text.strip() or secrets not in self.detectors:
            return spans
        label = f"{name.replace('_', ' ')}: "
        named = spans_of(label + text, [secrets])
        at = len(label)
        return [(kind, start - at, end - at) for kind, start, end in named if start >= at]


def texts_in(value: Any) -> Iterator[tuple[str, str, int]]:
    """The texts in a JSON value: the name of the field, the text, and how deep it is.

    A container counts as an empty text.
    """
    left = [("", value, 0)]
    while left:
        name, part, depth = left.pop()
        if isinstance(part, str):
            yield name, part, depth
        elif isinstance(part, Mapping):
            yield name, "", depth
            left += [(str(key), each, depth + 1) for key, each in part.items()]
        elif isinstance(part, list | tuple):
            yield name, "", depth
            left += [(name, each, depth + 1) for each in part]


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


def _named(kinds: Sequence[str]) -> str:
    return " and ".join(_KINDS.get(kind, f"what a detector calls {kind!r}") for kind in kinds)


def _check(kinds: Sequence[str]) -> str:
    if kinds[0] in CONTACTS:
        return "contacts"
    return "cards" if kinds[0] in CARDS else "secrets"
