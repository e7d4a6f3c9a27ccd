"""Find and redact secrets, payment cards and contact data in texts.

If perdure is installed with the extra `privacy`, the detector `find_service_keys` uses the package
detect-secrets, and the detector `find_phone_numbers` uses the package phonenumbers. Without the
extra `privacy`, `find_service_keys` and `find_phone_numbers` find nothing.
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

from perdure.errors import MissingDependency
from perdure.memory.long_term.records import KEEP, Candidate, Verdict
from perdure.memory.options import check_choice

Finding = tuple[str, int, int]
"""The kind, start and end of a finding. The sensitive text is `text[start:end]`."""
Detector = Callable[[str], Iterable[Finding]]
"""A function that returns the findings in a text.

The built-in detectors report the kinds `"secret"`, `"card"`, `"e-mail"` and `"phone"`. An
application's own detectors can report other kinds.
"""
Treatment = Literal["keep", "redact", "quarantine", "refuse"]
REDACTED_FIELD: Final = "redacted"
"""The field of a memory's value that lists the kinds of redacted findings."""

_TREATMENTS_BY_SEVERITY: Final[Sequence[Treatment]] = ("refuse", "quarantine", "redact")
_CONTACT_KINDS: Final = ("e-mail", "phone")
# Maps each built-in kind of sensitive data to a description of this kind. The gate decides whether
# a memory may be stored, and includes the description in the `reason` of its verdict.
_KIND_NAMES: Final = {
    "card": "the number of a payment card",
    "e-mail": "an e-mail address",
    "phone": "a telephone number",
    "secret": "a password, key or other secret",
}
# Patterns for secrets that are recognised without a label such as "api_key:". In order, the
# patterns match keys with a known prefix and JSON web tokens, private keys in PEM format, passwords
# in URLs, new passwords in sentences such as "I changed the password to x1y2", and credentials in
# HTTP headers.
_KEY_PATTERNS: Final = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?a)(?<![A-Za-z0-9])(?P<value>(?:gh[oprsu]_|github_pat_|glpat-|xox[abeoprs]-|AIza|[rs]k_live_"
        r"|[rs]k_test_|npm_|hf_|pypi-|SG[.])(?=[A-Za-z_.-]{0,60}\d)[\w.-]{16,300}+"
        r"|sk-(?:[a-z]{2,10}\d{0,2}-){0,2}(?=[A-Za-z_]{0,40}\d)\w{16,300}+[\w-]{0,300}+"
        r"|A(?:KIA|SIA)[A-Z0-9]{16}\b|eyJ[\w-]{8,4096}+\.eyJ[\w-]{8,4096}+(?:\.[\w-]{0,4096}+)?)",
        r"(?P<value>-----BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY(?: BLOCK)?-----"
        r"(?:[^-]|-(?!----END))*+(?:-----END[A-Z0-9 ]{0,40}-----)?)",
        r"://[^\s/:@]{0,100}+:(?P<value>[^\s/]{1,200})@",
        r"(?i)\b(?:chang|reset|set|updat)[a-z]{0,4} (?:\S{1,30} ){0,3}?pass(?:word|code|phrase) to"
        r" [\"'`]?(?P<value>(?=\S{0,60}\d)[^\s\"'`]{3,255}[^\s\"'`.,;:!?)])",
        r"(?i)\b(?:bearer|basic) {1,3}(?P<value>(?=[^\s\"']{0,60}\d)[\w+/=.~-]{12,4096}+)",
    )
)
# The pattern for labelled secrets is one lookahead, so that matches can overlap. The value after
# one label can itself be the label of another value.
_LABELLED_SECRET: Final = re.compile(
    r"(?=(?:(?P<password>(?:pass[ -]?(?:word(?:s(?= ))?|phrase|code)|passwort|passwd|pwd|kennwort"
    r"|wachtwoord|contrase(?:ñ|n\u0303?)a|mot de passe|senha|пароль|密码|密碼|パスワード"
    r"|(?<![^\W_])pw(?= [^:=]))\d?(?! (?:manager|generator|polic|rule|field|hint)))"
    r"|(?<![^\W_])(?P<pin>pin(?:[ _-]?(?:code|number))?|cvv2?|cvc2?|otp"
    r"|(?:recovery|backup|security|verification|access|login|door|gate|alarm) code)"
    r"|(?:api|access|secret|private|auth|refresh)[ _-]?(?:key|token)|secret|token"
    r"|(?<![^\W_])(?:pass|pw)(?=[\"'*]{0,3} ?[:=]))"
    r"(?:(?P<sign>[\"'`*_\\>]{0,4}\s{0,3}(?:[:=>]|[-=]>|\u2192|是:?))"
    r"|(?(password)(?=\s{1,3}[\"'`*_]{0,4}(?=\S{0,40}\d)(?=\S{0,40}[a-z])[^\s\"'`]{4})|(?!))"
    r"|\s-(?=\s)"
    r"|(?P<preposition>(?=\s(?:for|of|to|on|at|in|fürs?|vo[nm]|de[rsl]?|voor|van|para|da|do|du|pour|от|для"
    r"|[(\[])))?(?P<words>(?:\s[\w.@'()\[\]/&-]{1,30}){0,6}?)"
    r"(?P<verb>(?:(?P<is>'s|\s(?:is|equals|ist|lautet|es|est|è|é))"
    r"|\s(?:(?:(?:was|has been) )?(?:set|changed|reset) to|was|are|will be))"
    r"(?:\s(?:now|still))?(?P<colon>\s?[:=])?"
    r"|(?(preposition)(?:(?P<late_sign>\s{0,3}(?:[:=]|[-=]>|\u2192))|\s-)|(?!)))(?=\s)"
    r"|(?=\s))"
    r"[\"'`*_\\]{0,4}\s{0,10}[*\\\"'`]{0,4}"
    r"(?P<value>(?<=[\"'`])[^\n\"'`]{1,256}+|[^\s\"'`<>]{1,256}+))",
    re.IGNORECASE,
)
# Texts are searched for `_SECRET_LABEL` first, because searching for `_LABELLED_SECRET` takes ten
# times as long.
_SECRET_LABEL: Final = re.compile(
    r"(?i)pass|pwd|pw|kennwort|wachtwoord|contrase|senha|пароль|密|パス|pin|cvv|cvc|otp|code|key|token"
    r"|secret"
)
# Every cloud API key contains a match for `_KEY_LIKE_RUN`, so texts without a match are not
# searched for the patterns of detect-secrets.
_KEY_LIKE_RUN: Final = re.compile(r"[\w+/=.~-]{16}")
_CLAUSE_END: Final = re.compile(r"[^\w\s]{0,4}\s{0,3}(?:$|\n)|[.,;!?]\s")
_TRAILING_PUNCTUATION: Final = ".,;:!?)]}>*\\。"
_PLACEHOLDER: Final = re.compile(r"\W*|\[.*|\$.*|\{.*|null|none|true|false", re.IGNORECASE)
_CARD: Final = re.compile(
    r"(?<![\d.])(?:(?:[3-6]\d|2[2-7])\d{2}(?:[ ./_-]{0,2}\d{4}){3}"
    r"|3[47]\d{2}[ -]?\d{6}[ -]?\d{5})(?!\d|[A-Za-z]\b)"
)
_EMAIL: Final = re.compile(
    r"(?<![\w.+%'-])(?!git@)[\w.+%'-]{1,64}+@(?:[^\W_](?:[\w-]{0,61}[^\W_])?\.){1,6}[^\W\d_]{2,24}"
    r"(?![\w@])"
)
# Size, in characters, of the overlapping chunks of text that are searched with the patterns of
# detect-secrets.
_WINDOW_SIZE: Final = 4_096
# replacements for all characters in a Unicode category: format characters are removed, and spaces,
# dashes and quotation marks are replaced with their ASCII equivalents
_CATEGORY_REPLACEMENTS: Final = {"Cf": "", "Zs": " ", "Pd": "-", "Pi": '"', "Pf": '"'}


def find_secrets(text: str) -> Iterator[Finding]:
    """Find passwords, PINs, keys and other credentials.

    Passwords and PINs are recognised by a label such as "password", and keys by a label or a known
    prefix. Passwords in URLs and credentials in HTTP headers are recognised by their position.
    """
    for pattern in _KEY_PATTERNS:
        for match in pattern.finditer(text):
            yield "secret", *match.span("value")
    end = 0
    for match_of_label in _LABELLED_SECRET.finditer(text) if _SECRET_LABEL.search(text) else ():
        start, value = match_of_label.start("value"), match_of_label["value"]
        if text[start - 1] not in "\"'`":
            value = value.rstrip(_TRAILING_PUNCTUATION)
        if match_of_label.start() >= end and _is_labelled_value_secret(match_of_label, value):
            end = start + len(value)
            yield "secret", start, end


def _is_labelled_value_secret(label_match: re.Match[str], value: str) -> bool:
    """Return whether the value after a label such as "token" or "password" looks like a secret."""
    if _PLACEHOLDER.fullmatch(value):
        return False
    if label_match["pin"]:
        return value.replace("-", "").isdecimal() and 3 <= len(value) <= 9
    if label_match["password"] and label_match["sign"]:
        return len(value) >= 3
    has_digit = any(map(str.isdigit, value))
    if label_match["password"] and label_match["verb"] and (value.isdecimal() or not has_digit):
        return len(value) >= 4 and _is_labelled_value_password(label_match, value)
    min_length = 4 if label_match["password"] else 6 if label_match["sign"] else 12
    return len(value) >= min_length and has_digit and not value.isdecimal()


def _is_labelled_value_password(label_match: re.Match[str], value: str) -> bool:
    """Return whether the text after a label such as "password" is likely to be a password.

    Call this function only if a verb follows the label, as in "the password is secret". The value
    must consist only of digits, or contain no digits. The surrounding words can show that the value
    is an ordinary word, as in "the password for wifi is unknown".
    """
    start = label_match.start("value")
    is_quoted = label_match.string[start - 1] in "\"'`"
    has_sign = bool(label_match["late_sign"] or (label_match["is"] and label_match["colon"]))
    if not is_quoted and _CLAUSE_END.match(label_match.string, start + len(value)) is None:
        return False
    if has_sign or not label_match["is"]:
        return has_sign
    if value.isalpha() and not is_quoted:  # "the password for wifi is unknown"
        return not label_match["words"]
    return (not label_match["words"] or label_match["preposition"] is not None) and (
        is_quoted or value.isdecimal()
    )


def find_card_numbers(text: str) -> Iterator[Finding]:
    """Find payment card numbers of 15 or 16 digits that pass the Luhn check."""
    for match in _CARD.finditer(text):
        digits = [int(char) for char in reversed(match[0]) if char.isdecimal()]
        doubled = (sum(divmod(2 * digit, 10)) for digit in digits[1::2])
        if (sum(digits[::2]) + sum(doubled)) % 10 == 0:
            yield "card", match.start(), match.end()


def find_email_addresses(text: str) -> Iterator[Finding]:
    """Find e-mail addresses."""
    for match in _EMAIL.finditer(text) if "@" in text else ():
        yield "e-mail", match.start(), match.end()


def find_phone_numbers(text: str, region: str | None = None) -> Iterator[Finding]:
    """Find telephone numbers with a country code, if the package phonenumbers is installed.

    Args:
        text: The text.
        region: A region such as "US" whose numbers are also found without a country code.
    """
    if ("+" in text or region) and find_spec("phonenumbers") is not None:
        for match in import_module("phonenumbers").PhoneNumberMatcher(text, region):
            yield "phone", match.start, match.end


def phone_numbers(region: str) -> Detector:
    """Return a detector for telephone numbers.

    In addition to numbers with a country code, the detector finds numbers in the national format of
    a region, such as "US".

    Raises:
        MissingDependency: The extra `privacy` is not installed.
        ConfigurationError: The region is unknown.
    """
    if find_spec("phonenumbers") is None:
        raise MissingDependency(
            'phone_numbers needs an additional package; run pip install "perdure[privacy]"'
        )
    check_choice("region", region, sorted(import_module("phonenumbers").SUPPORTED_REGIONS))
    return lambda text: find_phone_numbers(text, region)


def find_service_keys(text: str) -> Iterator[Finding]:
    """Find API keys of cloud services, if the package detect-secrets is installed."""
    for pattern in _load_service_key_patterns() if _KEY_LIKE_RUN.search(text) else ():
        # Search the text in windows of limited length, because some patterns take quadratic time on
        # long texts.
        for start in range(0, len(text), _WINDOW_SIZE // 2):
            for match in pattern.finditer(text[start : start + _WINDOW_SIZE]):
                yield "secret", start + match.start(), start + match.end()


@lru_cache(1)
def _load_service_key_patterns() -> tuple[re.Pattern[str], ...]:
    """Return the API key patterns of detect-secrets, or () if the package is not installed."""
    if find_spec("detect_secrets") is None:
        return ()
    plugins = import_module("detect_secrets.core.plugins.util")
    classes = plugins.get_mapping_from_secret_type_to_class().values()
    # Skip two detect-secrets patterns: IP addresses are not secret, and `_KEY_PATTERNS` already
    # finds passwords in URLs.
    plugins_used = (
        plugin for plugin in classes if not plugin.__name__.startswith(("IPPublic", "BasicAuth"))
    )
    return tuple(pattern for plugin in plugins_used for pattern in getattr(plugin, "denylist", ()))


DETECTORS: Final[tuple[Detector, ...]] = (
    find_secrets,
    find_card_numbers,
    find_email_addresses,
    find_phone_numbers,
    find_service_keys,
)
"""The built-in detectors."""


def find_sensitive_spans(text: str, detectors: Iterable[Detector]) -> list[Finding]:
    """Find sensitive data in a text.

    The detectors receive normalized text, in which compatibility characters, such as full-width
    letters, are replaced by their ordinary equivalents.

    Args:
        text: The text.
        detectors: The detectors.

    Returns:
        The findings, in order, with positions in the original text. Overlapping findings are merged
        into one, which has the kind of the first of them.
    """
    forms = [text] if text.isascii() else [_normalize_char(char) for char in text]
    plain = "".join(forms)
    findings: list[Finding] = []
    for detector in detectors:
        findings += detector(plain)
    if not findings:
        return []
    positions = range(len(text)) if text.isascii() else [i for i, f in enumerate(forms) for _ in f]
    merged: list[Finding] = []
    for kind, start, end in sorted(findings, key=lambda finding: finding[1]):
        if merged and start < merged[-1][2]:
            merged[-1] = *merged[-1][:2], max(end, merged[-1][2])
        else:
            merged.append((kind, start, end))
    return [(kind, positions[start], positions[end - 1] + 1) for kind, start, end in merged]


@lru_cache(1 << 14)
def _normalize_char(char: str) -> str:
    """Return the plain form of a character.

    Quotation marks, dashes and spaces are replaced by their ASCII equivalents, format characters
    are removed, and all other characters are normalized to NFKC.
    """
    form = _CATEGORY_REPLACEMENTS.get(unicodedata.category(char))
    return unicodedata.normalize("NFKC", char) if form is None else form


def redact_spans(text: str, spans: Sequence[Finding]) -> str:
    """Replace each finding in a text with its kind in brackets, such as `[phone]`."""
    parts, position = [], 0
    for kind, start, end in spans:
        parts += [text[position:start], f"[{kind}]"]
        position = end
    return "".join([*parts, text[position:]])


@dataclass(frozen=True, slots=True)
class SensitiveDataRules:
    """A gate's rules for sensitive data.

    Attributes:
        secrets: The treatment of all findings that are not contacts.
        contacts: The treatment of e-mail addresses and telephone numbers.
        detectors: The functions that find sensitive data.
    """

    secrets: Treatment
    contacts: Treatment
    detectors: Sequence[Detector]

    def judge(self, candidate: Candidate) -> Verdict:
        """Check a candidate memory for sensitive data, and decide whether the memory may be stored.

        If a detector raises an error, the candidate is quarantined.
        """
        kinds: dict[str, Treatment] = {}
        try:
            text = self._redact_value_and_collect_treatments(
                candidate.text, None, candidate.explicit, kinds
            )
            fields = self._redact_value_and_collect_treatments(
                candidate.fields, "", candidate.explicit, kinds
            )
        # Do not quote the error message of a detector in the verdict, because an
        # application-defined detector could include the secret in the message.
        except Exception as exc:
            fault = f"a detector raised {type(exc).__name__}, so the text may contain secrets"
            return Verdict("quarantine", fault, "detectors")
        if not kinds:
            return KEEP
        for treatment in _TREATMENTS_BY_SEVERITY:
            if found_kinds := [
                kind for kind, kind_treatment in kinds.items() if kind_treatment == treatment
            ]:
                break
        else:
            return KEEP
        names = " and ".join(_KIND_NAMES.get(k, f"data of the kind {k!r}") for k in found_kinds)
        check = "contacts" if found_kinds[0] in _CONTACT_KINDS else "secrets"
        if treatment != "redact":
            return Verdict(treatment, f"the text contains {names}", check)
        fields[REDACTED_FIELD] = found_kinds
        redacted_text = None if text == candidate.text else text
        return Verdict("keep", f"redacted {names}", check, redacted_text, fields=fields)

    def redact(self, text: str) -> str:
        """Return a copy of a text with all sensitive data redacted."""
        return redact_spans(text, find_sensitive_spans(text, self.detectors))

    def _redact_value_and_collect_treatments(
        self,
        value: Any,
        field_name: str | None,
        is_explicitly_requested: bool,
        treatments_by_kind: dict[str, Treatment],
    ) -> Any:
        """Return a copy of a text or field value in which sensitive data is redacted.

        Sensitive data is replaced only if its kind has the treatment `"redact"`. For each kind of
        sensitive data that is found, such as `"e-mail"`, the treatment is recorded in
        `treatments_by_kind`.

        Args:
            value: A text, or a JSON value of fields.
            field_name: The name of the field, or None for the text of the memory.
            is_explicitly_requested: Whether the memory was requested explicitly. Contacts in a
                memory that was requested explicitly are not redacted.
            treatments_by_kind: A dict to which the method adds the kinds that it finds.
        """
        if isinstance(value, Mapping):
            fields = value.items()
            return {
                key: self._redact_value_and_collect_treatments(
                    item, str(key), is_explicitly_requested, treatments_by_kind
                )
                for key, item in fields
            }
        if isinstance(value, list | tuple):
            return [
                self._redact_value_and_collect_treatments(
                    item, field_name, is_explicitly_requested, treatments_by_kind
                )
                for item in value
            ]
        if not isinstance(value, str):
            return value
        spans = (
            find_sensitive_spans(value, self.detectors)
            if field_name is None
            else self._find_field_spans(value, field_name)
        )
        redacted_spans: list[Finding] = []
        for kind, start, end in spans:
            treatment = self.contacts if kind in _CONTACT_KINDS else self.secrets
            stays = is_explicitly_requested and kind in _CONTACT_KINDS and treatment == "redact"
            treatments_by_kind[kind] = "keep" if stays else treatment
            if treatments_by_kind[kind] == "redact":
                redacted_spans.append((kind, start, end))
        return redact_spans(value, redacted_spans) if redacted_spans else value

    def _find_field_spans(self, text: str, field_name: str) -> list[Finding]:
        """Find sensitive data in a field.

        Detectors receive the string `name: value`, so that they can recognise the field name as a
        label. A value that is a single word is not searched for contact data, because it may be an
        id that merely looks like an e-mail address or a telephone number.
        """
        ignored = () if len(text.split()) > 1 else (find_email_addresses, find_phone_numbers)
        label = f"{field_name.replace('_', ' ')}: "
        findings = find_sensitive_spans(
            label + text, [detector for detector in self.detectors if detector not in ignored]
        )
        offset = len(label)
        return [
            (kind, start - offset, end - offset) for kind, start, end in findings if start >= offset
        ]
