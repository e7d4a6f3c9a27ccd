"""Detectors: what they find, what they leave alone, and that their cost is linear."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import ConfigurationError
from perdure.memory.long_term.detectors import (
    DETECTORS,
    find_secrets,
    find_sensitive_spans,
    find_service_keys,
    phone_numbers,
    redact_spans,
)
from tests.rounds import rounds

MEGABYTE = 1 << 20
MAIL = "the password for the mail at my work"


def redact_all(text: str) -> str:
    return redact_spans(text, find_sensitive_spans(text, DETECTORS))


@pytest.mark.parametrize(
    "secret",
    [
        "sk-proj-abcDEF1234567890abcDEF",
        "AKIAIOSFODNN7EXAMPLE",
        "ghp_" + "a1B2" * 9,
        "github_pat_" + "11ABCDE0" * 5,
        "xoxb-123456789012-abcdefghij",
        "AIzaSyA1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q",
        "sk_live_" + "4eC39HqLyjWDarjtT1zdp7dc",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc_def",
    ],
)
def test_service_keys_are_redacted(secret: str) -> None:
    """The form of a key identifies it anywhere in a text."""
    assert redact_all(f"It is {secret}") == "It is [secret]"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("password: hunter2", "password: [secret]"),
        ("my password is swordfish.", "my password is [secret]."),
        ("Das Passwort ist Geheim1!", "Das Passwort ist [secret]!"),
        ("my PIN is 1234", "my PIN is [secret]"),
        ("api_key=abcdef123456", "api_key=[secret]"),
        ("postgres://u:p4ss@host/db", "postgres://u:[secret]@host/db"),
        ("pay with 4111 1111 1111 1111 exp 12/27", "pay with [card] exp 12/27"),
        ("5500-0000-0000-0004", "[card]"),
        ("378282246310005", "[card]"),
        ("Ask ann.b+c@sub.example.co.uk.", "Ask [e-mail]."),
        ("müller@straße.de", "[e-mail]"),
        ("+49 30 123456", "[phone]"),
        ("+1 (415) 555-2671", "[phone]"),
    ],
)
def test_passwords_cards_and_contacts_are_redacted(text: str, expected: str) -> None:
    """Passwords are found by the words around them, and cards by their check digits."""
    assert redact_all(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("2024-05-01", "on 01.02.2024 at 10:30", "01.02.2024 12.30", "2024-05-01 10:00:00"),
        *("from 2020 to 2024", "10:30-11:30", "version 1.2.3.4", "v10.15.7", "192.168.100.200"),
        *("$1,000,000", "1 000 000 000", "EUR 1200000", "0.123456789", "3.14159265358979"),
        *("order 0123456789", "id 4155552671", "ISBN 0-306-40615-2", "ISBN 978-3-16-148410-0"),
        *("call on 2024-05-01", "phone in 2023 2024", "mobile 12 13 14", "population 83200000"),
        *("My password is too weak", "secret: practice"),
        *("4111 1111 1111 1112", "1234567890123456", "45 67 23 89 12 34 56 78", "1714550400000"),
        *("f47ac10b-58cc-4372-a567-0e02b2c3d479", "9fceb02d0ae598e95dc970b74767f19372d61af8"),
        *("user @ home", "a@b", "sk-learn-tutorials-are-great"),
        *("lotto 03 14 22 31 38 45", "Kundennummer 0123456789", "patient number 0123456789"),
        *("sk-learn-contrib-imbalanced-2", "Serial no. 4012888888881881x", "0.4111111111111111"),
        *("The password for gmail is super safe", "password: ********", "Password: 8 characters"),
        *("password: ${DB_PASSWORD}", "access token is valid until 2026-12-31", "the pin is on it"),
        *("the password for wifi is on the fridge", "the password for wifi is: see the fridge"),
        *("lost the password for gmail - again", "password for wifi - on the fridge"),
        *(
            "password for the wifi: ask Bob",
            "The password for wifi is unknown.",
            "pw = auth.split()",
        ),
        *(
            "password reset on: 2024-05-01",
            "Password rules: 8-20 characters",
            "passwords: dict[str]",
        ),
        *(
            "My password manager is 1Password",
            "password policy: min12chars",
            "lost password - again",
        ),
        *("A password was provided.", "the password to Office365", "Set the password to be safe2"),
        *(
            "password is 2 years old",
            "my password is 12 characters long",
            "the door code is unknown",
        ),
        *("the pin on the map: a lake", "I changed my password to something else in 2024"),
        *("pin: 2024-05-01", "Authorization: basic training", "a passport for 2024", "pass: 23B"),
        *(
            '{"password": null}',
            '{"password": "", "user": "ann"}',
            "The secret to whisking is time",
        ),
        "thisIsAVeryLongCamelCaseIdentifierNameForTesting123",
        "https://example.com/articles/2024/05/01/title-123456",
    ],
)
def test_dates_ids_prices_and_versions_are_not_redacted(text: str) -> None:
    """Text that only looks like a phone number, a card or a secret stays unchanged."""
    assert redact_all(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"password": "hunter2"}', '{"password": "[secret]"}'),
        ('"password":"hunter2"', '"password":"[secret]"'),
        (r"{\"password\": \"hunter2", r"{\"password\": \"[secret]"),
        ('{"api_key": "abcd1234abcd1234"}', '{"api_key": "[secret]"}'),
        ('{"userPassword": "hunter 2 three"}', '{"userPassword": "[secret]"}'),
        ("**Password:** hunter2", "**Password:** [secret]"),
        ("password -> hunter2", "password -> [secret]"),
        ("password → hunter2", "password → [secret]"),
        ("<password>hunter2</password>", "<password>[secret]</password>"),
        ("password hunter2", "password [secret]"),
        ("Authorization: Bearer abcdef123456789", "Authorization: Bearer [secret]"),
        ("Authorization: Basic dXNlcjpwYXNzd29yZA==", "Authorization: Basic [secret]"),
        ("-H 'Authorization: Bearer 5f2b9c1d8e7a4f3b'", "-H 'Authorization: Bearer [secret]'"),
        ("pw: hunter2", "pw: [secret]"),
        ("pass: hunter2", "pass: [secret]"),
        ("DB_PASS=s3cr3t", "DB_PASS=[secret]"),
        ("mysecret=abc123def456", "mysecret=[secret]"),
        ("postgres://:s3cr3t@db/x", "postgres://:[secret]@db/x"),
        ("redis://default:p@ss@host", "redis://default:[secret]@host"),
        ("the password for gmail is hunter2", "the password for gmail is [secret]"),
        ("the wifi password we use is BlueHouse77", "the wifi password we use is [secret]"),
        ("the password for wifi is: hunter2!x", "the password for wifi is: [secret]"),
        ("Password for wifi: swordfish", "Password for wifi: [secret]"),
        ("the password to my account is: hunter2!", "the password to my account is: [secret]!"),
        ("the password of the router = hunter2", "the password of the router = [secret]"),
        ("password for wifi -> hunter2", "password for wifi -> [secret]"),
        ("password (wifi): hunter2", "password (wifi): [secret]"),
        ("my password is: hunter2", "my password is: [secret]"),
        ("my password is now hunter2", "my password is now [secret]"),
        ("my password's hunter2", "my password's [secret]"),
        ("her password was hunter2", "her password was [secret]"),
        ("my password is 123456", "my password is [secret]"),
        ('the password for wifi is "blue house"', 'the password for wifi is "[secret]"'),
        ("the password was changed to hunter2.", "the password was changed to [secret]."),
        ("Ann changed her wifi password to hunter2.", "Ann changed her wifi password to [secret]."),
        ("wifi password - hunter2", "wifi password - [secret]"),
        ("the password for the mail at my work is hunter2", f"{MAIL} is [secret]"),
        ("password hunter2 was leaked", "password [secret] was leaked"),
        ("more password hunter22: yes", "more password [secret]: yes"),
        ("password hunter2 - for wifi", "password [secret] - for wifi"),
        ("pw for wifi: hunter2", "pw for wifi: [secret]"),
        ("the pw is hunter2", "the pw is [secret]"),
        ("passcode for the door: 8842", "passcode for the door: [secret]"),
        ("the passcode for the door is 8842", "the passcode for the door is [secret]"),
        ("pass phrase: hunter2", "pass phrase: [secret]"),
        ("the PIN for my card is: 4321", "the PIN for my card is: [secret]"),
        ("PIN number: 4321", "PIN number: [secret]"),
        ("door code: 8842", "door code: [secret]"),
        ("the api key for mail is: abcdef123456", "the api key for mail is: [secret]"),
        ("la contraseña del wifi es: hunter2", "la contraseña del wifi es: [secret]"),
        ("das Passwort fürs WLAN lautet hunter2", "das Passwort fürs WLAN lautet [secret]"),
        ("wachtwoord: hunter2", "wachtwoord: [secret]"),
        ("パスワード:hunter2", "パスワード:[secret]"),
        ("我的密码是hunter2。", "我的密码是[secret]。"),
        ("пароль: hunter2", "пароль: [secret]"),
        ("PIN 4321", "PIN [secret]"),
        ("pin code 4321", "pin code [secret]"),
        ("the pin of my card is 4321", "the pin of my card is [secret]"),
        ("recovery code: 1234-5678", "recovery code: [secret]"),
        ("CVV 123", "CVV [secret]"),
        ("cvc: 123", "cvc: [secret]"),
        ("secret key 5f2b9c1d8e7a4f3b", "secret key [secret]"),
        ("_ghp_" + "b1" * 18, "_[secret]"),
    ],
)
def test_secrets_are_redacted_in_any_syntax_or_language(text: str, expected: str) -> None:
    """JSON, markup, headers, commands and addresses are recognized.

    Redacting twice changes nothing.
    """
    assert redact_all(text) == expected
    assert redact_all(expected) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pa\u00adssword: hun\u200bter2!", "pa\u00adssword: [secret]!"),
        ("p\u200bassword\u200b: hunter2", "p\u200bassword\u200b: [secret]"),
        ("contrasen\u0303a: sol123", "contrasen\u0303a: [secret]"),
        ("\uff50assword\uff1a hunter2", "\uff50assword\uff1a [secret]"),
        ("\u201cpassword\u201d: \u201chunter2\u201d", "\u201cpassword\u201d: \u201c[secret]\u201d"),
        ("ann\uff20example.com", "[e-mail]"),
        *(
            (f"\u2026 {gap.join(['4111', '1111', '1111', '1111'])}!", "\u2026 [card]!")
            for gap in ("\u202f", "\u2009", "\u2011", "\u2013", "  ", ".", "_", "/", "\u200b ")
        ),
        ("".join(chr(0xFF10 + int(digit)) for digit in "4111111111111111"), "[card]"),
        ("card 4\u200b111111111111111", "card [card]"),
        (",4111111111111111", ",[card]"),
        ("4111111111111111,4242424242424242", "[card],[card]"),
        ("41111111 11111111", "[card]"),
        ("4242-4242 4242-4242", "[card]"),
        ("4111111111111111exp", "[card]exp"),
        ("\u0664\u0661" * 3 + " +49 30 12\u00ad3456", "\u0664\u0661" * 3 + " [phone]"),
    ],
)
def test_secrets_with_unusual_characters_are_redacted_in_place(text: str, expected: str) -> None:
    """Invisible characters and other forms of spaces, dashes, digits and letters hide nothing."""
    assert redact_all(text) == expected


def test_spans_are_positions_in_the_original_text() -> None:
    """Detectors see a normalized form of the text."""
    assert find_sensitive_spans("\u00ad\u00adpassword: hunter2", [find_secrets]) == [
        ("secret", 12, 19)
    ]


@pytest.mark.repeats  # a quarter of a megabyte is long enough
@pytest.mark.parametrize("part", ["1 ", "a@", "\u200b", "a\u0301\u0316", "\u2026"])
def test_long_text_of_near_matches_is_searched_in_linear_time(part: str) -> None:
    """A detector that started over at each position would take hours."""
    assert find_sensitive_spans(part * (rounds(MEGABYTE) // len(part)), DETECTORS) == []


@pytest.mark.parametrize(
    "part",
    [
        *("a@a.", "0171 ", "+1 ", "eyJ", "sk-a", "password is ", "://a:", "4111 ", "DE89 ", "SG.a"),
        *(
            "tel 1 2 3 4 5 6 7",
            "aB1",
            "(020) ",
            "01 23 ",
            "-----BEGIN PRIVATE KEY-----",
            "api key ",
            "password for a ",
            "authorization: bearer ",
            "curl -u a:",
            "<password>a",
            "\u5bc6\u7801\u662f",
            'password:"',
            "4111_",
            "4111-",
            "\u0316\u0301",
        ),
    ],
)
def test_hostile_repetitions_are_searched_in_linear_time(part: str) -> None:
    """The spans are within the text."""
    text = part * (MEGABYTE // 16 // len(part))

    assert all(
        0 <= start < end <= len(text) for _, start, end in find_sensitive_spans(text, DETECTORS)
    )


@given(
    st.text(
        alphabet="aB1 @.+-:/\n4k_s漢é\u0301\u00ad\u200b\uff11\u2026\u2013\u0130\ufdfa", max_size=200
    )
)
def test_spans_are_ordered_and_within_the_text(text: str) -> None:
    end = 0
    for _, start, stop in find_sensitive_spans(text, DETECTORS):
        assert end <= start < stop <= len(text)
        end = stop
    assert redact_spans(text, []) == text


def test_overlapping_spans_are_merged() -> None:
    detectors = [lambda text: [("x", 0, 4)], lambda text: [("y", 2, 6), ("y", 6, 8)]]

    assert find_sensitive_spans("abcdefgh", detectors) == [("x", 0, 6), ("y", 6, 8)]


# -- detectors of the extra `privacy`


def test_service_keys_detector_finds_keys_by_detect_secrets() -> None:
    """The package detect-secrets knows the keys of Azure, Twilio and Slack, for example."""
    key = "SK" + "1a2b3c4d" * 4

    assert [kind for kind, _, _ in find_service_keys(f"Twilio: {key}")] == ["secret"]
    assert redact_all("https://hooks.slack.com/services/T00000000/B00000000/" + "a1b2c3d4" * 3) == (
        "[secret]"
    )


def test_phone_numbers_finds_numbers_of_its_region_only() -> None:
    numbers = phone_numbers("DE")

    assert redact_spans(
        "Ruf 01701234567 an", find_sensitive_spans("Ruf 01701234567 an", [numbers])
    ) == ("Ruf [phone] an")
    assert find_sensitive_spans("order 123456, 2024-05-01 10:00", [numbers]) == []
    with pytest.raises(ConfigurationError, match="region is 'Germany'"):
        phone_numbers("Germany")


def test_phone_numbers_without_the_extra_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error is raised before the detector is used."""
    monkeypatch.setattr("perdure.memory.long_term.detectors.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"perdure\[privacy\]"):
        phone_numbers("DE")
