"""Passwords, keys and PINs that are named as such: "password: …", "the PIN of my card is …"."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from perdure.memory.gate.plain_text import Found

SECRET: Final = "secret"

_HINTS: Final = (
    *(
        "passw",
        "passph",
        "passco",
        "passord",
        "pass:",
        "pass=",
        "pass =",
        'pass"',
        "pass'",
        "_pass",
    ),
    *("pwd", "pw:", "pw=", "pw ", 'pw"', "kennwort", "wachtw", "contrase", "mot de pas", "senha"),
    *("pin ", "pin:", "pin=", "pin-", "pin_", 'pin"', "pin*", "pincode", "otp", "cvv", "cvc"),
    *(" key", "_key", "-key", "apikey", "accesskey", "secretkey", "token", "secret"),
    *(" code", "-code", "_code", " phrase", "mnemonic", "recovery words", "<pass", "card verif"),
)
_UNSPACED: Final = ("密码", "密碼", "口令", "パスワード", "暗証番号", "비밀번호")
_STARTS: Final = re.compile(
    "pass|pwd|pw|kenn|wacht|contra|mot de|парол|senha|pin|recov|backup|2fa|otp|secu|verif|api|acce"
    "|auth|client|private|secret|bearer|refresh|id|session|token"
)
_DECORATED: Final = r"[\"'`*_>\])\\]{0,4}"
_SAID: Final = r"\s{0,3}(?:is|was|are|ist|lautet|es|est)?\s{0,3}"
# "the password for gmail is …", "the password we use is …"
_ABOUT: Final = (
    r"(?P<about>\s(?:for|of|to|on|at|we|i|you|from|für|von|zum|zu|de|del|du|van|voor|pour)"
    r"(?:\s[\w.@'-]{1,30}+){1,4}?(?=\s(?:is|was|ist|lautet|es|est|=|:)\s|:))?"
)
_STRICT: Final = r"(?:[:=]{1,2}|[-=]{1,2}>|[\u2192\u21d2\u27a1\u279c])"
_SIGN: Final = (
    rf"{_ABOUT}{_DECORATED}(?P<sign>{_SAID}{_STRICT}|\s{{1,3}}(?:is|ist|lautet|es|est)\b|"
    r"(?P<bare>(?=\s)))[*_>\\]{0,4}\s{0,40}[*\\]{0,3}"
)
_QUOTED: Final = r"(?P<quote>[\"'`])(?P<quoted>(?:(?!(?P=quote))[^\n]){1,256}+)(?P=quote)"
_VALUE: Final = rf"(?:{_QUOTED}|[\"'`]?(?P<value>[^\s\"'`]{{1,256}}+))"
_NAMED: Final = re.compile(
    r"(?:(?P<password>passwor[dt]|passwd|passphrase|passcode|passord|pwd|kennwort|wachtwoord|"
    r"contraseña|contrasena|mot de passe|парол[ья]|(?<![^\W_])(?:pw|senha))|"
    r"(?<![^\W_])(?P<weak>pass)|"
    r"(?<![^\W_])(?:(?P<pin>pin(?:[ _-]?(?:code|number))?)|"
    r"(?P<code>otp|(?:recovery|backup|2fa|otp|security|verification)[ _-](?:code|pin)))|"
    r"(?P<key>(?<![^\W_])(?:api|access|auth|client|private|secret|bearer|refresh|id|session)"
    r"[ _-]?(?:key|token|secret)|(?:access|refresh|auth|api|secret)(?:token|key)|"
    r"(?<![^\W_])token|secret))"
    rf"{_SIGN}{_VALUE}",
    re.IGNORECASE,
)
# scripts without spaces: no end of a word tells where the name is
_NAMED_THERE: Final = re.compile(
    rf"(?:{'|'.join(_UNSPACED)}){_DECORATED}\s{{0,3}}(?:{_STRICT}|[是为為は는은])"
    rf"{_DECORATED}\s{{0,40}}[\"'`]?(?P<value>[!-~]{{3,256}}+)"
)
_TAG: Final = re.compile(
    r"<(?:\w{0,20}[:_-])?(?:password|passwd|passwort|pwd|pass|secret|token|api[_-]?key)>"
    r"\s{0,20}([^<\s][^<]{0,255}+)</",
    re.IGNORECASE,
)
_CHECK_CODE: Final = re.compile(
    r"(?<![^\W_])(?:cvv2?|cvc2?|card verification (?:code|value)|security code)[\"'*_]{0,3}"
    r"\s{0,3}(?:is|ist|code|number)?\s{0,3}[:=]?[\"'*_]{0,3}\s{0,3}[\"']?(\d{3,4})(?!\w)",
    re.IGNORECASE,
)
_SEED: Final = re.compile(
    r"(?:seed|recovery|mnemonic)(?: phrase| words)?\W{0,3}(?:is\W{1,3})?"
    r"((?:[a-z]{3,8}[ ,]{1,2}){11,23}[a-z]{3,8})(?![a-z])",
    re.IGNORECASE,
)
_OTHERS: Final = (
    (("</",), _TAG),
    (("cvv", "cvc", "card verif", "security code"), _CHECK_CODE),
    (("seed", "mnemonic", "recovery phrase", "recovery words"), _SEED),
)
# what "the password is …" goes on with when it does not tell the password
_OTHERWISE: Final = """
    a an the my your our his her its their this that these those not no never too very so more one
    less now still also only just always and or but if in on at of for to from by with as required
    needed necessary wrong right correct incorrect invalid valid weak strong expired missing
    stored saved kept hidden secret safe secure insecure encrypted hashed protected changed reset
    set unset sent shared known unknown lost forgotten long short old new same different empty
    optional mandatory case-sensitive visible there here what where when why how something
    somewhere written being going working broken hard easy difficult impossible super really
    probably must should has have can cannot may will would null none true false undefined
    nicht kein falsch richtig abgelaufen zu sehr noch im auf ein eine der die das een de het niet
"""
_NO_PASSWORD: Final = frozenset(_OTHERWISE.split())
_MARKS: Final = ".,;:!?)]}>*\\"
_ELSEWHERE: Final = re.compile(r"\[secret\]?|\$\{.*|\{\{.*|\$[A-Z][A-Z0-9_]{2,}")  # or blotted out
_ENDS: Final = re.compile(
    r"[^\w\s]{0,4}+(?:\s{0,3}$|\s{0,3}\n|[.,;!?]\s| (?:and|but|or|und|en|et) )"
)


def passwords(text: str, lowered: str) -> Iterator[Found]:
    """What a text names as a password, a key, a PIN or the code of a card.

    Args:
        text: In its plain form.
        lowered: The text in small letters.
    """
    if any(hint in lowered for hint in _HINTS):
        yield from _named(text, lowered)
        for needles, pattern in _OTHERS:
            if any(needle in lowered for needle in needles):
                for match in pattern.finditer(text):
                    yield SECRET, match.start(1), match.end(1)
    elif not text.isascii() and "парол" in lowered:
        yield from _named(text, lowered)
    if not text.isascii() and any(name in text for name in _UNSPACED):
        for match in _NAMED_THERE.finditer(text):
            yield SECRET, match.start("value"), match.end("value")


def _named(text: str, lowered: str) -> Iterator[Found]:
    at = 0
    for begins in _STARTS.finditer(lowered):  # the form of capitals and small letters is as long
        match = _NAMED.match(text, begins.start()) if begins.start() >= at else None
        if match is None:
            continue
        at = match.end()
        quoted = match["quoted"]
        start = match.start("value" if quoted is None else "quoted")
        value = match["value"].rstrip(_MARKS) if quoted is None else quoted
        if _tells(match, value, start):
            yield SECRET, start, start + len(value)


def _tells(match: re.Match[str], value: str, start: int) -> bool:
    """Whether what follows the name of a secret is the secret."""
    bare = match["bare"] is not None
    if match["pin"]:
        return value.isdecimal() and (4 if bare else 3) <= len(value) <= (8 if bare else 12)
    if match["code"]:
        return value.replace("-", "").isdecimal() and 4 <= len(value) <= 40
    digits = any(map(str.isdigit, value))
    mixed = digits and any(map(str.isalpha, value))
    if bare:
        return mixed and value.isalnum() and len(value) >= (16 if match["key"] else 6)
    if match["key"]:
        return len(value) >= 8 and digits
    if match["weak"]:
        return mixed and len(value) >= 6
    return _is_password(match, value, start)


def _is_password(match: re.Match[str], value: str, start: int) -> bool:
    if not value or value.lower() in _NO_PASSWORD or _ELSEWHERE.fullmatch(value):
        return False
    short = len(value) < 3 and match["quoted"] is None
    said = match["about"] is not None and value.isalpha() and value.islower()
    # "8 characters", "the password for gmail is super safe"
    return not (short or said) or _ENDS.match(match.string, start + len(value)) is not None
