"""Earlier repetitions of a question rank behind the statement that answers it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableConfig

from perdure import SQLiteCheckpointer, SQLiteStore
from perdure.graphs import chat_graph
from perdure.memory import recall, remember_turns, search_memory, use_memories
from perdure.memory.long_term.records import TURN, build_put
from perdure.stores import Provenance, PutItem
from tests.memory.recall_helpers import ANN, AS_ANN, build_fact_put, open_filled_store

AT = datetime(2026, 1, 1, 12, tzinfo=UTC)
UNRELATED_TEXTS = (
    "The swallows are back",
    "I oiled the gate",
    "We ate barley soup",
    "The shelf needs a third screw",
    "My shoulder aches",
    "I sowed radishes",
    "The ferry was early",
    "I sold an old lens",
    "Uncle Leo wrote",
    "The pie was burnt",
    "The moon was red",
    "We saw a long play",
    "I found a mitten",
    "The dough is rising",
    "The trams stopped at noon",
    "I changed a bulb",
)
DENTIST_QUESTIONS = (
    "Who is our dentist?",
    "Who's the dentist?",
    "What is the name of our dentist?",
    "Do you remember our dentist?",
    "What is our dentist called?",
    "Tell me who our dentist is",
    "Which dentist do we have?",
    "Name our dentist",
    "Can you recall the dentist's name?",
    "Who was the dentist again?",
    "I forgot the name of our dentist",
    "Our dentist, who is that?",
    "Remind me who our dentist is",
    "Who does our teeth, which dentist?",
    "Please give me our dentist's name",
    "Dentist's name?",
    "Did I tell you who our dentist is?",
)
REPLIES = (
    "I do not know that.",
    "I'm sorry, I don't have that information.",
    "You have not told me, as far as I know.",
    "I don't know who your dentist is.",
    "I have no record of that yet. Could you tell me?",
)


def build_exchange_puts(number: int, text: str, reply: str) -> Iterator[PutItem]:
    """Yield the puts that store a user message and its reply in a thread of their own."""
    thread, at = f"t{number}", AT + timedelta(hours=number)
    for position, (actor, message_text) in enumerate((("user", text), ("assistant", reply))):
        key = f"{thread}-{position}"
        source = Provenance(thread, None, (key,), actor, actor, position, at)
        yield build_put(
            ANN, key, {"text": f"{actor}: {message_text}", "kind": TURN}, provenance=source
        )


def rank_statement_after_each_question(
    statement: str,
    questions: Sequence[str],
    query: str,
    answer: str,
    replies: Sequence[str] = REPLIES,
) -> list[int]:
    """Return the rank of the statement among ten results after each repetition.

    0 means not recalled.
    """
    ranks = []
    exchanges = [(statement, "Noted."), *((text, "Noted.") for text in UNRELATED_TEXTS)]
    puts = [
        put for number, pair in enumerate(exchanges) for put in build_exchange_puts(number, *pair)
    ]
    with open_filled_store(*puts, index="offline") as store:
        for number, text in enumerate(questions):
            store.batch(build_exchange_puts(100 + number, text, replies[number % len(replies)]))
            recalled = recall(query, store=store, config=AS_ANN, limit=10).memories
            matching_ranks = (
                place for place, memory in enumerate(recalled, 1) if answer in memory.text
            )
            ranks.append(next(matching_ranks, 0))
    return ranks


@pytest.mark.parametrize("reply", ["Noted.", "I do not know that."])
def test_statement_ranks_above_repeated_questions_of_other_threads(
    tmp_path: Path, reply: str
) -> None:
    """A chat graph with `remember_turns` asks 17 times.

    The statement stays within the first three ranks.
    """
    with (
        SQLiteStore.open(tmp_path / "store.db") as store,
        SQLiteCheckpointer.open(tmp_path / "checkpoints.db") as saver,
    ):
        graph = chat_graph(
            FakeListChatModel(responses=[reply]),
            memory=[use_memories(), remember_turns()],
            checkpointer=saver,
            store=store,
        )
        recalled = []
        for number, text in enumerate(
            ["Our dentist is called Wilhelmina Sørby", *UNRELATED_TEXTS, *DENTIST_QUESTIONS]
        ):
            config: RunnableConfig = {"configurable": {"thread_id": str(number)}}
            graph.invoke({"messages": [HumanMessage(text)]}, config, context={"user_id": "ann"})
            if number > len(UNRELATED_TEXTS):
                memories = recall("Who is our dentist?", store=store, config=AS_ANN).memories
                recalled.append([memory.text for memory in memories])

    assert all(any("Sørby" in text for text in texts[:3]) for texts in recalled)
    assert any(
        text == "user: Who is our dentist?" for text in recalled[0]
    )  # it stays, and ranks last


@pytest.mark.parametrize(
    "query",
    [
        "Who is our dentist?",
        "who's our dentist",
        "What is the name of our dentist?",
        "Tell me who our dentist is",
        "Remind me of the dentist's name, please",
    ],
)
@pytest.mark.parametrize(
    ("statement", "answer"),
    [
        ("Our dentist is called Wilhelmina Sørby", "Sørby"),
        ("our dentist is called wilhelmina sørby btw", "sørby"),
        ("My dentist Wilhelmina, when is she in?", "Wilhelmina"),
        ("Our dentist is my mother", "mother"),
    ],
)
def test_statement_ranks_first_for_varied_queries_and_statements(
    statement: str, answer: str, query: str
) -> None:
    """The statement may be part of a question, and its answer may be a common word."""
    ranks = rank_statement_after_each_question(statement, DENTIST_QUESTIONS, query, answer)

    assert all(1 <= place <= 3 for place in ranks), ranks


@pytest.mark.parametrize(
    ("statement", "questions", "query", "answer"),
    [
        (
            "The alarm code is juniper-52",
            "What is the alarm code?|Tell me the alarm code|I forgot the alarm code|alarm code?"
            "|Show me the code of the alarm please|Do you remember the alarm code?",
            "What is the alarm code?",
            "juniper",
        ),
        (
            "We sign the lease on 3 October",
            "When do we sign the lease?|Tell me when we sign the lease"
            "|On which date is the lease signed?"
            "|Do you know when we sign the lease?|I forgot when we sign the lease",
            "When do we sign the lease?",
            "3 October",
        ),
        (
            "The bicycle is in the cellar of number 9",
            "Where did I leave the bicycle?|Where is my bicycle?|Find my bicycle"
            "|Where's the bicycle?"
            "|I forgot where I left the bicycle|The bicycle, where did I leave it?",
            "Where did I leave the bicycle?",
            "number 9",
        ),
        (
            "Our cat has a green collar, did you see it?",
            "Which collar does our cat have?|Tell me the colour of the cat's collar"
            "|Do you know what collar our cat has?",
            "Which colour is the collar of our cat?",
            "green",
        ),
        (
            "Unsere Zahnärztin heißt Wilhelmina Sørby",
            "Wer ist unsere Zahnärztin?|Wie heißt unsere Zahnärztin?|Nenn unsere Zahnärztin"
            "|Sag mir, wer unsere Zahnärztin ist|Unsere Zahnärztin, wer ist das?"
            "|Wie war noch der Name unserer Zahnärztin?",
            "Wer ist unsere Zahnärztin?",
            "Sørby",
        ),
        (
            "Notre dentiste s'appelle Wilhelmina Sørby",
            "Qui est notre dentiste ?|Dis-moi qui est notre dentiste"
            "|Tu te souviens de notre dentiste ?"
            "|Rappelle-moi le nom de notre dentiste|Notre dentiste, c'est qui ?",
            "Qui est notre dentiste ?",
            "Sørby",
        ),
        (
            "Nuestra dentista se llama Wilhelmina Sørby",
            "¿Quién es nuestra dentista?|Dime quién es nuestra dentista"
            "|¿Recuerdas a nuestra dentista?|¿Cómo se llama nuestra dentista?",
            "¿Quién es nuestra dentista?",
            "Sørby",
        ),
        (
            "Нашего зубного врача зовут Вильгельмина",
            "Кто наш зубной врач?|Как зовут нашего зубного врача?|Скажи, кто наш зубной врач",
            "Кто наш зубной врач?",
            "Вильгельмина",
        ),
        (
            "我们的牙医叫威廉敏娜",
            "我们的牙医是谁\uff1f|我们的牙医叫什么名字\uff1f|你还记得我们的牙医吗\uff1f",
            "我们的牙医是谁\uff1f",
            "威廉敏娜",
        ),
        (
            "私たちの歯医者はウィルマさんです",
            "私たちの歯医者は誰ですか\uff1f|歯医者の名前は何ですか\uff1f|歯医者の名前を教えてください",
            "私たちの歯医者は誰ですか\uff1f",
            "ウィルマ",
        ),
    ],
)
def test_statement_ranks_first_for_other_subjects_and_languages(
    statement: str, questions: str, query: str, answer: str
) -> None:
    ranks = rank_statement_after_each_question(statement, questions.split("|"), query, answer)

    assert all(1 <= place <= 3 for place in ranks), ranks


def test_search_tool_shows_statement_before_repeated_questions() -> None:
    exchanges = [("Our dentist is called Wilhelmina Sørby", "Noted.")]
    exchanges += [(text, "Noted.") for text in UNRELATED_TEXTS]
    exchanges += [(text, REPLIES[number % 5]) for number, text in enumerate(DENTIST_QUESTIONS)]
    puts = [
        put for number, pair in enumerate(exchanges) for put in build_exchange_puts(number, *pair)
    ]
    with open_filled_store(*puts, index="offline") as store:
        tool = search_memory(store=store)
        shown = tool.invoke({"query": "Who is our dentist?", "limit": 3}, AS_ANN)

    assert "Sørby" in shown.split('"memory"')[1]


def test_repeated_questions_rank_behind_answer_of_other_namespace() -> None:
    """A memory with exactly the text of the query is left out."""
    team = ("memories", "team")
    with open_filled_store(
        *build_exchange_puts(1, "Do you know who repairs our boiler?", "Not yet."),
        *build_exchange_puts(2, "Tell me, who repairs the boiler?", "I am not sure."),
        index="offline",
    ) as store:
        store.put(team, "boiler", {"text": "Halvorsen repairs the boiler", "kind": "fact"})
        for number in range(20):
            store.put(team, f"o{number}", {"text": f"Room {number} is free", "kind": "fact"})
        store.put(ANN, "same", {"text": "Who repairs the boiler?", "kind": TURN})
        recalled = recall(
            "Who repairs the boiler?", store=store, namespace=[ANN, team], limit=10
        ).memories

    texts = [memory.text for memory in recalled]
    assert texts[0] == "Halvorsen repairs the boiler"
    assert set(texts[-2:]) == {
        "user: Do you know who repairs our boiler?",
        "user: Tell me, who repairs the boiler?",
    }
    assert "Who repairs the boiler?" not in texts


def test_question_that_adds_information_is_no_repetition() -> None:
    """The added information may be a name, a number or several words."""
    with open_filled_store(
        *build_exchange_puts(1, "Did you enjoy the concert in Reykjavik?", "It was loud."),
        *build_exchange_puts(2, "Is the concert on 14 May still on?", "Yes, at eight."),
        *build_exchange_puts(3, "Which concert shall we hear?", "Any."),
        index="offline",
    ) as store:
        recalled = recall("Where was the concert?", store=store, config=AS_ANN, limit=10).memories

    texts = [memory.text for memory in recalled]
    last = texts.index("user: Which concert shall we hear?")
    assert texts.index("user: Did you enjoy the concert in Reykjavik?") < last
    assert texts.index("user: Is the concert on 14 May still on?") < last
    assert last == len(texts) - 1


def test_fact_in_form_of_question_keeps_its_rank() -> None:
    """Only turns are treated as repeated questions."""
    with open_filled_store(
        build_fact_put("a", "Who keeps the canoe? Ann does not know"),
        build_fact_put("b", "The canoe lies at the mill"),
        index="offline",
    ) as store:
        by_search = [item.key for item in store.search(ANN, query="Who keeps the canoe?")]
        recalled = recall("Who keeps the canoe?", store=store, config=AS_ANN, min_score=0).memories

    assert [memory.key for memory in recalled] == by_search == ["a", "b"]
