"""The support desk: an agent with three tools works for two customers, who stay apart.

An approver answers for a refund, a job asks each night, each customer asks what is known, is
exported, and is forgotten. The same story is told with a database that a program opens, and with a
server whose backend acts for the customers; on a file and on Postgres.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import httpx
import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.types import Command

from perdure import people
from perdure.checkpointers import open_checkpointer
from perdure.errors import UnknownPerson
from perdure.memory import (
    Collection,
    MemoryMiddleware,
    memories,
    recall,
    remember_turns,
    search_memory,
    search_threads,
    use_memories,
)
from perdure.memory.run_config import read_run_user
from perdure.server.api_people import build_report_json
from perdure.server.http.access import ACT_PERMISSION, ADMIN_PERMISSION
from perdure.server.http.keys import KeysFileAccess
from perdure.settings import Settings
from perdure.stores import open_store
from tests.contracts.erased import read_raw_bytes as read_database
from tests.openai_server import Answer, OpenAIServer
from tests.people import People
from tests.server.http.test_acting import open_client_acting_for
from tests.server.http.test_keys import render_key_entry
from tests.server.running import wait_until
from tests.server.runs.test_crons import make_due
from tests.server.talking import build_input
from tests.server.test_person import Desk, Model, serve_desk
from tests.server.test_person_attack import read_everything_shown

APPROVED: Any = {"decisions": [{"type": "approve"}]}
NIGHTLY = "Nightly check: is anything open?"
STAFF = {
    "boss": "Open refunds are limited to the number Walrus.",
    "desk": "Open parcels are kept in the room Badger.",
}


@dataclass(frozen=True)
class Customer:
    """A customer, with words that occur in nobody else's texts."""

    name: str
    order: int
    goods: str
    wish: str

    @property
    def marks(self) -> tuple[str, ...]:
        """The name and the words of the customer."""
        return (self.name, self.goods, self.wish)


DORA = Customer("dorothea", 1717, "canoe-Heron", "Ocelot")
KIM = Customer("kimberley", 2323, "tent-Finch", "Lemur")
CUSTOMERS = (DORA, KIM)


class Shop:
    """The shop whose orders the tools read and refund.

    Attributes:
        refunds: The customer and the order of each refund.
    """

    def __init__(self) -> None:
        self.refunds: list[tuple[str | None, int]] = []

    def tools(self) -> list[Any]:
        """Return the three tools of the agent."""

        @tool
        def find_order(number: int, config: RunnableConfig) -> str:
            """Find an order of the customer."""
            found = [
                f"{each.order}: {each.goods}"
                for each in CUSTOMERS
                if (each.name, each.order) == (read_run_user(config), number)
            ]
            return found[0] if found else "This customer has no such order."

        @tool
        def refund(number: int, config: RunnableConfig) -> str:
            """Refund an order of the customer."""
            self.refunds.append((read_run_user(config), number))
            return f"Order {number} is refunded."

        return [find_order, refund, search_memory(min_score=0)]


def choose_reply(body: dict[str, Any]) -> Answer | str:
    """Answer as the model does: call the tool that the last message asks for, or quote a result."""
    last = body["messages"][-1]
    text = str(last["content"])
    if last["role"] == "tool":
        return f"I found this: {text}"
    if "What do you know about me?" in text:
        return build_tool_call("search_memory", query="parcel order refund")
    for asked, name in (("Where is order", "find_order"), ("Please refund order", "refund")):
        if asked in text:
            return build_tool_call(
                name, number=int(text.partition(asked)[2].split()[0].strip(".?"))
            )
    return "It is noted."


def build_tool_call(name: str, **arguments: Any) -> Answer:
    """Return an answer that calls a tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    called = [{"id": f"call-{uuid4()}", "type": "function", "function": function}]
    return Answer({"content": None, "tool_calls": called}, "tool_calls")


def build_agent(model: OpenAIServer, shop: Shop, **parts: Any) -> Any:
    """Build the agent, which asks a person before it refunds anything."""
    chat = ChatOpenAI(model="gpt-5-mini", base_url=model.base_url, api_key="none")  # type: ignore[arg-type]
    memory = MemoryMiddleware(use_memories(min_score=0), remember_turns())
    approval = HumanInTheLoopMiddleware({"refund": {"allowed_decisions": ["approve", "reject"]}})
    return create_agent(chat, shop.tools(), middleware=[memory, approval], **parts)


@dataclass
class DeskInterface(ABC):
    """An interface to the agent, through which the story is played.

    Attributes:
        model: The scripted model, which keeps all requests.
        shop: The shop.
        db: The settings of the database.
        both: The database, as a program opens it.
    """

    model: OpenAIServer
    shop: Shop
    db: Settings
    both: People
    prompts: dict[str, list[str]] = field(default_factory=dict)

    @contextmanager
    def record_prompts(self, customer: Customer) -> Iterator[None]:
        """Record the prompts of a customer's turn."""
        before = len(self.model.requests)
        yield
        asked = [json.dumps(each["messages"]) for each in self.model.requests[before:]]
        assert asked, "the model was not asked"
        self.prompts.setdefault(customer.name, []).extend(asked)

    @abstractmethod
    def begin(self, customer: Customer) -> str:
        """Begin a thread of a customer."""

    @abstractmethod
    def say(self, customer: Customer, thread_id: str, text: str) -> str:
        """Say something for a customer, and return the last message of the thread."""

    @abstractmethod
    def approve(self, customer: Customer, thread_id: str) -> str:
        """Let another person approve what the thread waits for, and return the last message."""

    @abstractmethod
    def check_nightly(self, customer: Customer, thread_id: str) -> None:
        """Run the nightly job on the thread."""

    @abstractmethod
    def show(self, customer: Customer, thread_id: str) -> str:
        """Return all that lists, searches and pages show of a customer."""

    @abstractmethod
    def export(self, customer: Customer) -> list[dict[str, Any]]:
        """Return the archive of a customer."""

    @abstractmethod
    def plan(self, customer: Customer) -> dict[str, Any]:
        """Return what would be erased."""

    @abstractmethod
    def forget(self, customer: Customer) -> dict[str, Any]:
        """Forget a customer, and return the receipt."""

    @abstractmethod
    def is_known(self, customer: Customer) -> bool:
        """Return whether anything belongs to a customer."""


class ProgramInterface(DeskInterface):
    """A program with the library. Its config says whose memories a run uses."""

    def _invoke(self, user: str, thread_id: str, input: Any) -> str:
        agent = build_agent(
            self.model, self.shop, checkpointer=self.both.saver, store=self.both.store
        )
        config: Any = {"configurable": {"thread_id": thread_id, "user_id": user}}
        return str(agent.invoke(input, config)["messages"][-1].text)

    def begin(self, customer: Customer) -> str:
        return str(uuid4())

    def say(self, customer: Customer, thread_id: str, text: str) -> str:
        return self._invoke(customer.name, thread_id, build_input(text))

    def approve(self, customer: Customer, thread_id: str) -> str:
        return self._invoke(self._user_of(thread_id), thread_id, Command(resume=APPROVED))

    def check_nightly(self, customer: Customer, thread_id: str) -> None:
        self._invoke(self._user_of(thread_id), thread_id, build_input(NIGHTLY))

    def _user_of(self, thread_id: str) -> str:
        """Return the person of a thread, as stored in its newest checkpoint."""
        head = self.both.saver.head(thread_id)
        if head is None:
            raise LookupError(thread_id)
        return str(head.metadata["user_id"])

    def show(self, customer: Customer, thread_id: str) -> str:
        config: Any = {"configurable": {"user_id": customer.name}}
        saver, store = self.both.saver, self.both.store
        told = search_threads(saver, store, "order parcel refund", user=customer.name)
        found = recall("order parcel refund", store=store, config=config, min_score=0)
        listed = memories(store=store, config=config)
        return "\n".join(map(repr, [told, found, listed, saver.history(thread_id)]))

    def export(self, customer: Customer) -> list[dict[str, Any]]:
        lines = people.export(customer.name, self.both.saver, self.both.store)
        return [json.loads(json.dumps(line)) for line in lines]

    def plan(self, customer: Customer) -> dict[str, Any]:
        return build_report_json(people.plan(customer.name, self.both.saver, self.both.store))

    def forget(self, customer: Customer) -> dict[str, Any]:
        return build_report_json(people.forget(customer.name, self.both.saver, self.both.store))

    def is_known(self, customer: Customer) -> bool:
        try:
            people.plan(customer.name, self.both.saver, self.both.store)
        except UnknownPerson:
            return False
        return True


@dataclass
class BackendInterface(DeskInterface):
    """A backend whose key acts for the customers, who have no keys, by the SDK and by REST."""

    desk: Desk = field(kw_only=True)

    def _client(self, customer: Customer) -> Any:
        return open_client_acting_for(self.desk, "desk", customer.name)

    def begin(self, customer: Customer) -> str:
        return str(self._client(customer).threads.create()["thread_id"])

    def say(self, customer: Customer, thread_id: str, text: str) -> str:
        values = self._client(customer).runs.wait(thread_id, "desk", input=build_input(text))
        return str(values["messages"][-1]["content"])

    def approve(self, customer: Customer, thread_id: str) -> str:
        boss: Any = self.desk.client("boss")
        values = boss.runs.wait(thread_id, "desk", command={"resume": APPROVED})
        return str(values["messages"][-1]["content"])

    def check_nightly(self, customer: Customer, thread_id: str) -> None:
        boss: Any = self.desk.client("boss")
        before = len(boss.runs.list(thread_id))
        cron = boss.crons.create_for_thread(
            thread_id, "desk", schedule="0 3 * * *", input=build_input(NIGHTLY)
        )
        make_due(self.db, cron["cron_id"])
        wait_until(lambda: len(boss.runs.list(thread_id)) == before + 1)
        wait_until(lambda: boss.threads.get(thread_id)["status"] == "idle")

    def show(self, customer: Customer, thread_id: str) -> str:
        return read_everything_shown(self.desk, "desk", thread_id, customer.name)

    def _ask(self, method: str, customer: Customer, path: str = "") -> httpx.Response:
        headers = {"x-api-key": "desk", "x-perdure-user": customer.name}
        url = f"{self.desk.url}/people/{customer.name}{path}"
        return httpx.request(method, url, headers=headers, timeout=60)

    def export(self, customer: Customer) -> list[dict[str, Any]]:
        archive = self._ask("GET", customer, "/export").raise_for_status().text
        return [json.loads(line) for line in archive.splitlines()]

    def plan(self, customer: Customer) -> dict[str, Any]:
        report: dict[str, Any] = self._ask("GET", customer).raise_for_status().json()
        return report

    def forget(self, customer: Customer) -> dict[str, Any]:
        report: dict[str, Any] = self._ask("DELETE", customer).raise_for_status().json()
        return report

    def is_known(self, customer: Customer) -> bool:
        status = self._ask("GET", customer).status_code
        assert status in (200, 404)
        return status == 200


@pytest.fixture(params=["library", "server"])
def front(
    request: pytest.FixtureRequest,
    db: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[DeskInterface]:
    """An interface to the agent, on a database in which the staff has memories too."""
    monkeypatch.setattr("tests.server.test_person.SECRETS", STAFF)
    with ExitStack() as stack:
        model = stack.enter_context(OpenAIServer(choose_reply))
        saver = stack.enter_context(open_checkpointer(db.db))
        store = stack.enter_context(open_store(db.db))
        shop, both = Shop(), People(db.db, saver, store)
        if request.param == "library":
            for user, text in STAFF.items():
                Collection(store, ("memories", user)).insert(text)
            yield ProgramInterface(model, shop, db, both)
            return
        file = tmp_path / "keys.toml"
        rights = {"boss": ADMIN_PERMISSION, "desk": ACT_PERMISSION}
        lines = [
            render_key_entry(user, user, f'permissions = ["{right}"]')
            for user, right in rights.items()
        ]
        file.write_text("".join(lines))
        made: Any = build_agent(model, shop)
        desk = stack.enter_context(serve_desk(db, KeysFileAccess(file), cast("Model", model), made))
        yield BackendInterface(model, shop, db, both, desk=desk)


def tell_story(front: DeskInterface, customer: Customer) -> str:
    """Let a customer ask, have a refund approved, run the nightly job, and return the thread."""
    with front.record_prompts(customer):
        thread_id = front.begin(customer)
        asked = f"Leave parcels with {customer.wish}. Where is order {customer.order}?"
        assert customer.goods in front.say(customer, thread_id, asked)

        front.say(customer, thread_id, f"Please refund order {customer.order}.")
        assert (customer.name, customer.order) not in front.shop.refunds
        assert "is refunded" in front.approve(customer, thread_id)
        assert front.shop.refunds[-1] == (customer.name, customer.order)

        front.check_nightly(customer, thread_id)
    return thread_id


def test_customers_of_support_desk_never_see_data_of_each_other(
    front: DeskInterface, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts, lists and archives of each customer contain no word of the other."""
    with caplog.at_level(logging.INFO):
        threads = {each.name: tell_story(front, each) for each in CUSTOMERS}
        check_other_orders(front)
        for customer in CUSTOMERS:
            with front.record_prompts(customer):
                again = front.begin(customer)
                known = front.say(customer, again, "What do you know about me?")
            assert (customer.goods in known, customer.wish in known) == (True, True)
        shown = {each.name: front.show(each, threads[each.name]) for each in CUSTOMERS}
        exports = {each.name: front.export(each) for each in CUSTOMERS}
    logs = "\n".join(each.getMessage() for each in caplog.records)

    for customer, other in ((DORA, KIM), (KIM, DORA)):
        strange = (*other.marks, threads[other.name], "Walrus", "Badger")
        prompts = "\n".join(front.prompts[customer.name])
        archive = json.dumps(exports[customer.name])
        for text in (prompts, shown[customer.name], archive):
            assert [mark for mark in strange if mark in text] == []
            assert [mark for mark in customer.marks[1:] if mark not in text] == []
        assert NIGHTLY in prompts
        assert any(NIGHTLY in json.dumps(each) for each in exports[customer.name])
        assert [mark for mark in customer.marks[1:] if mark in logs] == []
    for user, text in STAFF.items():
        kept = Collection(front.both.store, ("memories", user)).list(limit=100)
        assert [each.text for each in kept] == [text]


def check_other_orders(front: DeskInterface) -> None:
    """Check that a customer cannot ask for an order of the other."""
    with front.record_prompts(KIM):
        found = front.say(KIM, front.begin(KIM), f"Where is order {DORA.order}?")
    assert "no such order" in found


def test_forgotten_customer_leaves_nothing_in_database(front: DeskInterface) -> None:
    """The receipt matches the plan, and the other customer keeps everything."""
    threads = {each.name: tell_story(front, each) for each in CUSTOMERS}
    with front.record_prompts(DORA):
        waiting = front.begin(DORA)
        front.say(DORA, waiting, f"Please refund order {DORA.order}.")
    assert find_missing_words(front, DORA.marks) == []
    before = front.export(KIM)[1:]

    planned, done = front.plan(DORA), front.forget(DORA)

    assert planned["erased"] == done["erased"]
    assert done["scrubbed"] == (not front.db.db.startswith("postgres"))
    receipt = json.dumps([planned, done])
    assert threads[DORA.name] in receipt
    assert [mark for mark in (*KIM.marks, "Walrus", "Badger") if mark in receipt] == []
    # the operator of the database is told where a text of hers is, here that of the job; others not
    quoting = {part["what"]: part["ids"] for part in done["kept"]}
    assert quoting == (
        {"threads with quotations": [threads[KIM.name]]}
        if isinstance(front, ProgramInterface)
        else {}
    )
    assert find_missing_words(front, DORA.marks) == [*DORA.marks]
    assert find_missing_words(front, KIM.marks) == []
    assert (front.is_known(DORA), front.is_known(KIM)) == (False, True)
    assert front.export(KIM)[1:] == before

    # what waited for an approval is gone with her
    refunds = [*front.shop.refunds]
    with pytest.raises((LookupError, httpx.HTTPStatusError)):
        front.approve(DORA, waiting)
    assert front.shop.refunds == refunds

    # she comes back as somebody new, and the other is forgotten by the library
    with front.record_prompts(DORA):
        known = front.say(DORA, front.begin(DORA), "What do you know about me?")
    assert not any(mark in known for mark in (*DORA.marks[1:], *KIM.marks))
    people.forget(KIM.name, front.both.saver, front.both.store)
    assert find_missing_words(front, KIM.marks) == [*KIM.marks]
    assert front.is_known(DORA)


def find_missing_words(front: DeskInterface, marks: tuple[str, ...]) -> list[str]:
    """Return the words that are nowhere in the database: its files, or the rows of Postgres."""
    saver: Any = front.both.saver
    left = read_database(saver)
    return [mark for mark in marks if mark.encode() not in left]
