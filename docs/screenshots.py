"""Draws docs/screenshots, the pages of `perdure serve`, of a demonstration conversation.

python docs/screenshots.py [NAME ...]

It needs the extra `server`, playwright and a Chromium.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langgraph_sdk import get_sync_client
from playwright.sync_api import sync_playwright

from perdure.checkpointers import SQLiteCheckpointer
from perdure.graphs.chat import chat_graph
from perdure.memory import (
    Instructions,
    record_views,
    remember,
    remember_turns,
    summarize,
    trim,
    use_instructions,
    use_memories,
)
from perdure.server import create_app
from perdure.server.graphs import Graphs
from perdure.settings import Settings
from perdure.stores import SQLiteStore

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.server.running import run_server

FOLDER = Path(__file__).parent / "screenshots"
WIDTH, PHONE, HEIGHT = 1280, 390, 860
USER = "ann"
PAGES = [
    ("threads", "/ui/threads", WIDTH),
    ("thread", "/ui/thread?id=garden", WIDTH),
    ("question", "/ui/thread?id=letter#talk", WIDTH),
    ("talk-phone", "/ui/thread?id=garden#talk", PHONE),
    ("runs", "/ui/runs", WIDTH),
    ("checkpoints", "/ui/checkpoints?id=garden", WIDTH),
    ("memories", "/ui/memories?q=how+much+sun+does+the+balcony+get&limit=6", WIDTH),
    ("memory", "/ui/memory?ns=memories&ns=ann&key=balcony", WIDTH),
]

Said = str | tuple[str, dict[str, Any]]
EARLIER: list[tuple[str, list[Said]]] = [
    (
        "We moved to a flat with a balcony that faces north-west. It gets sun from four o'clock.",
        ["Good to know: that suits herbs that like half shade, such as mint, chives and parsley."],
    ),
    ("My sister Nora cannot eat celery.", ["I will keep celery out of what I suggest for Nora."]),
]
GARDEN: list[tuple[str, list[Said]]] = [
    (
        "What can I grow on our balcony this year?",
        [
            "Your balcony faces north-west and has sun from four o'clock, so half shade: mint, "
            "chives, parsley, lettuce, radishes and strawberries of the woods.\n\nTomatoes would "
            "need two more hours."
        ],
    ),
    (
        "Let's take lettuce and chives. Is it warm enough to sow them this week?",
        [
            ("forecast", {"place": "Bergen", "days": 5}),
            "Chives yes, they sprout from 8 °C. With 4 °C at night wait with lettuce until "
            "Saturday, or sow it indoors now.",
        ],
    ),
    (
        "Two boxes are 60 cm long. How many lettuces is that?",
        ["Three to a box at 20 cm apart, so six. Put the chives between them."],
    ),
]
OTHERS = [
    ("bread", "Why is my rye bread moist inside?", "Let it cool for a day before you cut it."),
    ("bike", "Which oil for a bicycle chain in winter?", "A wet lubricant; wipe off the rest."),
    ("norwegian", "What is the difference of « vet » and « kjenner »?", "Facts, and people."),
]
LETTER = "Ask Nora whether I shall bring the chives."
DECISIONS: Any = ["approve", "edit", "reject"]
RUNS: list[tuple[str, Any]] = [
    ("bread", [{"role": "user", "content": "And how do I keep it?"}]),
    ("bike", [{"role": "narrator", "content": "It is raining."}]),
    ("norwegian", [{"role": "user", "content": "Which of them is for a place?"}]),
]
SUMMARY = (
    "Ann asks what grows on her balcony in half shade; suggested were mint, chives, parsley, "
    "lettuce and radishes."
)


@tool
def forecast(place: str, days: int) -> str:
    """Return the weather of the next days."""
    return "Thu 9/4 °C rain, Fri 10/4 °C, Sat 12/7 °C, Sun 13/7 °C, Mon 13/8 °C"


@tool
def send_mail(to: str, subject: str, text: str) -> str:
    """Send a mail."""
    return f"sent to {to}"


class Scripted(BaseChatModel):
    """A model that says what it was told to say, and summarizes in one way."""

    said: Iterator[Said]

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def _get_ls_params(self, stop: Any = None, **kwargs: Any) -> Any:
        return {"ls_provider": "scripted", "ls_model_type": "chat", "ls_model_name": "a model"}

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Any:
        """Return the same model."""
        return self

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        made = next(self.said)
        message = (
            AIMessage(made) if isinstance(made, str) else AIMessage("", tool_calls=[_call(*made)])
        )
        return ChatResult(generations=[ChatGeneration(message=message)])


def _call(name: str, args: dict[str, Any]) -> Any:
    return {"name": name, "args": args, "id": f"call-{name}", "type": "tool_call"}


def fill(db: str) -> None:
    """Hold the conversations."""
    with SQLiteCheckpointer.open(db) as saver, SQLiteStore.open(db) as store:
        told = Instructions(store, ("instructions", USER))
        told.set("Answer in two or three sentences. Say what is uncertain.")
        for name, question, answer in OTHERS:
            _talk(saver, store, told, name, [(question, [answer])])
        _talk(saver, store, told, "home", EARLIER)
        _talk(saver, store, told, "garden", GARDEN)
        for text in ("The balcony faces west", "The balcony faces north-west, with sun from four"):
            remember(text, key="balcony", store=store, config={"configurable": {"user_id": USER}})
        config: Any = {
            "configurable": {"thread_id": "letter", "user_id": USER, "graph_id": "letters"},
            "callbacks": [record_views(saver)],
        }
        letters(checkpointer=saver).invoke({"messages": [("user", LETTER)]}, config)


def letters(**parts: Any) -> Any:
    """Build an agent that asks before it sends a mail."""
    mail = {"to": "nora@example.org", "subject": "Seeds", "text": "Shall I bring the chives?"}
    model = Scripted(said=iter([("send_mail", mail)]))
    rule: Any = {"allowed_decisions": DECISIONS, "description": "A mail is to be sent."}
    review = HumanInTheLoopMiddleware({"send_mail": rule})
    return create_agent(model, [send_mail], middleware=[review], **parts)


def _talk(saver: Any, store: Any, told: Instructions, thread: str, turns: Any) -> None:
    for number, (question, answers) in enumerate(turns):
        summary = Scripted(said=iter([SUMMARY]))
        memory = [
            use_instructions(told),
            use_memories(limit=2),
            summarize(
                summary, trigger=("messages", 6 if number == 1 else 99), keep=("messages", 4)
            ),
            trim(max_tokens=2_000),
            remember_turns(),
        ]
        parts: Any = {"memory": memory, "checkpointer": saver, "store": store}
        graph = chat_graph(Scripted(said=iter(answers)), [forecast], **parts)
        config: Any = {
            "configurable": {"thread_id": thread, "user_id": USER},
            "callbacks": [record_views(saver)],
        }
        graph.invoke({"messages": [("user", question)]}, config)


def main() -> None:
    """Fill a database, serve it, and photograph its pages."""
    FOLDER.mkdir(exist_ok=True)
    wanted = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        db = str(Path(folder) / "memory.db")
        fill(db)
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        graphs = Graphs({"chat": chat_graph(), "letters": letters()})
        with run_server(create_app(Settings(db=db, user=USER), graphs=graphs)) as url:
            with get_sync_client(url=url) as client:
                for thread, text in RUNS:
                    client.threads.update(thread, metadata={"graph_id": "chat"})
                    said: Any = {"messages": text}
                    client.runs.wait(thread, "chat", input=said, raise_error=False)
            tab = browser.new_page(base_url=url)
            for name, page, width in PAGES:
                if not wanted or name in wanted:
                    tab.set_viewport_size({"width": width, "height": HEIGHT})
                    tab.goto(page)
                    tab.screenshot(path=FOLDER / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
