"""Measure the recall of facts about one person, who is called by name, "I" or "she".

    python -m benchmarks.personal_facts

The store has 30 facts as a model extracts them: two thirds begin with the name of the person, the
others with "The user". Of the 40 questions, 20 can be answered from one of the facts, and 20 cannot
be answered. For each voice, the table shows the share of answerable questions whose fact is
recalled at the default minimum score, the number of other recalled memories, and the share of
unanswerable questions that recall nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from perdure.memory import recall, remember
from perdure.stores import SQLiteStore

NAMESPACE = ("memories", "ann")
FACTS = (
    "Ann lives in Ghent",
    "Ann works as a nurse in a children's hospital",
    "Ann likes figs and dates",
    "The user is vegetarian.",
    "Ann has a brother called Pieter",
    "The user drives a Volvo estate.",
    "Ann was born on 3 May 1988",
    "Ann plays the oboe in an orchestra",
    "The user is allergic to penicillin.",
    "Ann has two cats, Miso and Ponzu",
    "Ann speaks Dutch, French and a little Greek",
    "The user's favourite colour is dark green.",
    "Ann runs ten kilometres every Sunday",
    "Ann studied biology in Leuven",
    "The user wears size 39 shoes.",
    "Ann is married to Joris",
    "Ann's mother lives in Bruges",
    "The user prefers to be contacted by email.",
    "Ann wants to visit Iceland next summer",
    "Ann is afraid of spiders",
    "The user subscribes to The Economist.",
    "Ann drinks green tea in the morning",
    "Ann rents a flat on the third floor",
    "The user banks with Argenta.",
    "Ann broke her left arm in 2019",
    "Ann sings alto in the town choir",
    "The user uses a Linux laptop.",
    "Ann goes to bed before eleven",
    "Ann collects old postcards",
    "The user's dentist is Doctor Maes.",
)

# Questions, with the placeholders {does}, {is}, {has}, {her} and {she} for the person, and a word
# that the answer contains.
ANSWERED = {
    "Where {does} {she} live?": "Ghent",
    "What is {her} job?": "nurse",
    "Which fruit {does} {she} like?": "figs",
    "What can {she} eat?": "vegetarian",
    "What is {her} brother called?": "Pieter",
    "Which car {does} {she} drive?": "Volvo",
    "When was {she} born?": "1988",
    "Which instrument {does} {she} play?": "oboe",
    "What {is} {she} allergic to?": "penicillin",
    "What are the names of {her} cats?": "Miso",
    "Which languages {does} {she} speak?": "Dutch",
    "What is {her} favourite colour?": "green.",
    "How far {does} {she} run on Sundays?": "kilometres",
    "What did {she} study?": "biology",
    "What is {her} shoe size?": "39",
    "Who is {her} husband?": "Joris",
    "How should one contact {her_object}?": "email",
    "Which country {does} {she} want to visit?": "Iceland",
    "What {is} {she} afraid of?": "spiders",
    "Who is {her} dentist?": "Maes",
}
UNANSWERED = (
    "What is {her} passport number?",
    "How tall {is} {she}?",
    "Which school did {she} go to as a child?",
    "What is {her} blood group?",
    "Who is {her} landlord?",
    "When {does} {she} take a holiday?",
    "What is the name of {her} boss?",
    "Which football club {does} {she} support?",
    "What did {she} cook yesterday?",
    "Where did {she} park?",
    "What is {her} salary?",
    "Which newspaper {does} {she} write for?",
    "How many children {does} {she} have?",
    "What is {her} wifi password?",
    "Which phone {does} {she} own?",
    "What did the plumber charge {her_object}?",
    "Which gym {does} {she} train at?",
    "Who cuts {her} hair?",
    "What is {her} star sign?",
    "When is {her} next flight?",
)
VOICES = {
    "named": {"she": "Ann", "her": "Ann's", "her_object": "Ann", "does": "does", "is": "is"},
    "I": {"she": "I", "her": "my", "her_object": "me", "does": "do", "is": "am"},
    "she": {"she": "she", "her": "her", "her_object": "her", "does": "does", "is": "is"},
}


def spoken(question: str, voice: str) -> str:
    """Return a question in one of the voices."""
    return question.format(**VOICES[voice])


def show(voice: str, store: SQLiteStore, misses: list[str]) -> Sequence[float]:
    """Measure and print one line of the table, and return its figures."""
    recalled, others, quiet = 0, 0, 0
    for question, answer in ANSWERED.items():
        asked = spoken(question, voice)
        texts = [m.text for m in recall(asked, store=store, namespace=NAMESPACE).memories]
        right = any(answer in text for text in texts)
        recalled += right
        others += sum(answer not in text for text in texts)
        if not right:
            misses.append(asked)
    for question in UNANSWERED:
        asked = spoken(question, voice)
        quiet += not recall(asked, store=store, namespace=NAMESPACE).memories
    figures = (
        100 * recalled / len(ANSWERED),
        others / len(ANSWERED),
        100 * quiet / len(UNANSWERED),
    )
    print(f"{voice:8}{figures[0]:18.0f}{figures[1]:16.1f}{figures[2]:22.0f}", flush=True)
    return figures


def main() -> None:
    misses: list[str] = []
    with SQLiteStore.open(":memory:") as store:
        for fact in FACTS:
            remember(fact, store=store, namespace=NAMESPACE)
        print("        recalled, %   other memories   nothing of none, %")
        rows = [show(voice, store, misses) for voice in VOICES]
    print("mean    ", *(f"{sum(column) / len(column):.1f}" for column in zip(*rows, strict=True)))
    print("not recalled:", *misses, sep="\n  ")


if __name__ == "__main__":
    main()
