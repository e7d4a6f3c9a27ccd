"""Durability: whether what a text says will still be true next month.

The rule knows English, and says no only where it is sure: a state that passes, a greeting, thanks,
a mere question. A text in another language, or with one sentence that may last, passes. It is the
rule of what is formed unasked; who asks for something to be kept may keep anything.
"""

from __future__ import annotations

import re
from typing import Final

from perdure.stores.text import asks

_SENTENCES: Final = re.compile(
    r"[^.!?\u2026\u3002\uff01\uff1f\n]+[.!?\u2026\u3002\uff01\uff1f\"')]*"
)
_WORDS: Final = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
_APOSTROPHES: Final = str.maketrans({"\u2019": "'", "\u2018": "'"})

# longer phrases first: what a phrase has taken is not given back
_GREETINGS: Final = (
    "(?:hi|hello|hey)(?: there| again| everyone| all)?|hiya|howdy|yo|greetings|welcome back|"
    "welcome|good (?:morning|afternoon|evening|night|day|bye)|morning|bye(?: bye)?(?: for now)?|"
    "goodbye|cheers|see (?:you|ya)(?: later| soon| tomorrow| then| around)?|"
    "talk (?:to you )?(?:soon|later)|take care|ciao|later|"
    "have a (?:good|great|nice|lovely) (?:day|evening|night|weekend|one)|"
    "how can i (?:help|assist)(?: you)?(?: today)?|"
    "what can i (?:do for|help) you(?: with)?(?: today)?|"
    "how are you(?: doing)?(?: today)?"
)
_THANKS: Final = (
    "thanks|thank you|thx|ty|many thanks|much appreciated|i appreciate (?:it|that)|a lot|so much|"
    "very much|again|(?:you're|you are)(?: very| most)? welcome|no problem|np|my pleasure|anytime|"
    "don't mention it|(?:happy|glad) (?:i|to)(?: could)?(?: help| assist)?|"
    "let me know if (?:you need (?:any more help|more help|anything)|there's anything)(?: else)?"
)
_NODS: Final = (
    "ok|okay|okey|k|kk|alright|all right|right|sure(?: thing)?|of course|certainly|absolutely|"
    "definitely|exactly|indeed|great|good|nice|cool|perfect|awesome|excellent|wonderful|amazing|"
    "fantastic|lovely|fine|wow|oh|ah|aha|hm+|mhm|uh|um|well|so|yeah|yep|yup|"
    "got it|i see|i understand|understood|makes sense|sounds (?:good|great|fine|like a plan)|"
    "that's (?:great|good|fine|cool|nice|awesome|amazing|perfect|right|true)|will do|go ahead|"
    "done|noted|lol|(?:ha){2,}|(?:he){2,}|please|no worries|never mind|nevermind|interesting|"
    "agreed|true"
)
_HOLLOW: Final = tuple(
    (reason, re.compile(rf"(?:(?:{phrases}|{_NODS})(?: |$))++"))
    for reason, phrases in (
        ("it only nods", "(?!)"),
        ("it is a greeting", _GREETINGS),
        ("it is thanks", _THANKS),
        ("it is a greeting", f"{_GREETINGS}|{_THANKS}"),
    )
)
_ANSWERS: Final = re.compile(
    r"(?:(?:yes|no|nope|nah|maybe|perhaps|not sure|i (?:don't|do not) know)(?: |$))++"
)
_LONGEST_HOLLOW: Final = 120  # characters

_STATES: Final = (
    "tired|exhausted|sleepy|sick|ill|unwell|hungry|starving|thirsty|sad|happy|angry|mad|upset|"
    "stressed|anxious|nervous|excited|busy|bored|grumpy|lazy|cold|hot|freezing|fine|good|great|bad|"
    "ok|okay|better|worse|off|free|late|early|out|home|at home|at work|hung over|hungover|drunk|"
    "in a (?:good|bad|great|terrible) mood|not (?:well|feeling well|in the mood)"
)
_HOW: Final = (
    r"(?:(?:so|very|really|pretty|quite|a bit|a little|too|just|still|all|feeling|running) )*+"
)
_WHO: Final = (
    r"(?:i am|i'm|im|we are|we're|(?:the )?[^\W_]{1,30}+ (?:is|are|feels?)|(?:he|she|it)'s|i feel)"
)
_THEN: Final = (
    "(?:today|tonight|now|right now|just now|at the moment|at present|"
    "this (?:morning|afternoon|evening))"
)
_AM: Final = "(?:i am|i'm|im|we are|we're|(?:he|she|user) is)"
_LASTS: Final = "(?:living|working|studying|learning|employed|pregnant|engaged|married|single|in a)"
_PASSING: Final = tuple(
    (reason, re.compile(pattern))
    for reason, pattern in (
        (
            "it is how somebody is at the moment",
            rf"(?:{_THEN} )?{_WHO} {_HOW}(?:{_STATES})(?: {_THEN})+"
            rf"|{_THEN} {_WHO} {_HOW}(?:{_STATES})"
            rf"|(?:i am|i'm|im|we are|we're) {_HOW}"
            r"(?:tired|exhausted|sleepy|hungry|starving|thirsty|busy|bored|late|freezing)",
        ),
        (
            "it is what somebody does at the moment",
            rf"(?:right now|at the moment|just now) {_AM}(?! {_LASTS}) .*"
            rf"|{_AM}(?! {_LASTS}) .{{1,120}}(?: right now| at the moment| just now)",
        ),
        (
            "it is the weather of a day",
            rf"(?:it's|it is|the weather is) {_HOW}"
            r"(?:raining|snowing|sunny|cloudy|windy|cold|hot|warm|nice)"
            rf"(?: (?:out|outside|here|{_THEN}))*",
        ),
        (
            "it is said in passing",
            r"(?:i'm |i am |im )?(?:brb|gtg|g2g|omw|afk|ttyl|be right back|"
            r"on (?:my|the|our) way(?: (?:home|there|over|to .{1,60}))?)(?: now)?|"
            r"(?:please )?(?:hold on|hang on|wait)(?: (?:a|one) (?:sec|second|moment|minute|min))?|"
            r"(?:one|just a|give me a) (?:sec|second|moment|minute|min)(?: please)?|"
            r"(?:i've|i have|i) (?:got to|gotta|have to|need to) (?:go|run|leave)(?: now)?|"
            r"(?:i'll|i will|i'm|i am) (?:be )?"
            r"(?:back|there|ready|leaving|heading (?:out|home|over))"
            r"(?: (?:soon|now|in .{1,30}|shortly))?",
        ),
    )
)


def passing(text: str) -> str | None:
    """Why what a text says will not matter next month; None: it may well.

    >>> passing("I'm so tired today"), passing("I'm allergic to nuts")
    ('it is how somebody is at the moment', None)
    """
    reason = None
    for sentence in _sentences(text):
        why = _why_passing(sentence)
        if why is None:
            return None
        reason = reason or why
    return reason or "it says nothing"


def hollow(text: str) -> str | None:
    """Why a text says nothing at all: a greeting, thanks, a nod; None: it says something.

    >>> hollow("Thanks a lot!"), hollow("Thanks, I moved to Oslo.")
    ('it is thanks', None)
    """
    if len(text) > _LONGEST_HOLLOW:
        return None
    words = _plain(text)
    if not words:
        return "it has no words"
    return next((reason for reason, pattern in _HOLLOW if pattern.fullmatch(words)), None)


def _why_passing(sentence: str) -> str | None:
    why = hollow(sentence)
    if why is not None:
        return why
    if asks(sentence):
        return "it is a question"
    words = _plain(sentence)
    if _ANSWERS.fullmatch(words):
        return "it is an answer without its question"
    return next((reason for reason, pattern in _PASSING if pattern.fullmatch(words)), None)


def _sentences(text: str) -> list[str]:
    return [found for found in map(str.strip, _SENTENCES.findall(text)) if _WORDS.search(found)]


def _plain(text: str) -> str:
    return " ".join(_WORDS.findall(text.translate(_APOSTROPHES).lower()))
