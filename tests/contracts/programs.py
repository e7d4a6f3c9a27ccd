"""Random courses of a graph with everything in it, and what of them can be compared.

A *world* is a checkpointer and the graph on it. The same actions in two worlds must leave the same
threads behind; ids are random, so each is replaced by the number of its first appearance.
"""

from __future__ import annotations

import asyncio
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypedDict

from hypothesis import strategies as st
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, RemoveMessage
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.graph import START, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES, add_messages
from langgraph.types import Command, Interrupt, PregelTask, Send, StateSnapshot, interrupt

Durability = Literal["sync", "async", "exit"]
ROOT: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
THREAD: Any = {"configurable": {"thread_id": "t"}}


# -- the graph


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    return {**old, **new}


class State(TypedDict):
    """A channel of each kind."""

    todo: list[str]
    log: Annotated[list[str], operator.add]
    messages: Annotated[list[AnyMessage], add_messages]
    table: Annotated[dict[str, Any], merged]


class Given(TypedDict):
    """What a subgraph is told."""

    todo: list[str]


class Told(TypedDict):
    """What a subgraph gives back."""

    log: Annotated[list[str], operator.add]


class Part(Given, Told):
    """The state of a subgraph."""

    kept: Annotated[dict[str, Any], merged]


def plan(state: State) -> dict[str, Any]:
    n = len(state["log"])
    said = AIMessage(f"plan {n}", id=f"ai{n}")
    return {"log": [f"plan {n}"], "messages": [said], "table": {"plans": n, f"p{n % 5}": "x" * n}}


def route(state: State) -> list[Send | str]:
    """Where a run goes: to all that it is told to do at once, but fails alone."""
    todo = state["todo"]
    if "fail" in todo:
        return ["fail"]
    found: list[Send | str] = [word for word in ("ask", "child", "keeper") if word in todo]
    found += ["edit"] if EDITS.keys() & set(todo) else []
    found += [Send("worker", {"n": n}) for n in range(3)] if "send" in todo else []
    return found or ["finish"]


def worker(task: dict[str, int]) -> dict[str, Any]:
    return {"log": [f"worker {task['n']}"], "table": {f"w{task['n']}": [task["n"]]}}


def ask(state: State) -> dict[str, Any]:
    answers = [str(interrupt({"asked at": len(state["log"])}))]
    if "twice" in state["todo"]:
        answers.append(str(interrupt("and then?")))
    said = [HumanMessage(answer, id=f"h{len(state['log'])}.{answer}") for answer in answers]
    return {"log": [f"told {answer}" for answer in answers], "messages": said}


def fail(state: State) -> dict[str, Any]:
    if not state["table"].get("mended"):
        raise RuntimeError(f"failed at {len(state['log'])}")
    return {"log": ["mended"]}


def _replaced(messages: list[AnyMessage]) -> list[BaseMessage]:
    return [HumanMessage("said otherwise", id=message.id) for message in messages[:1]]


EDITS: dict[str, Callable[[list[AnyMessage]], list[BaseMessage]]] = {
    "remove": lambda messages: [RemoveMessage(id=str(m.id)) for m in messages[:1]],
    "replace": _replaced,
    "again": lambda messages: [
        *(RemoveMessage(id=str(m.id)) for m in messages[1:2]),
        *messages[1:2],
    ],
    "clear": lambda messages: [RemoveMessage(id=REMOVE_ALL_MESSAGES), *messages[-2:]],
}


def edit(state: State) -> dict[str, Any]:
    word = next(word for word in EDITS if word in state["todo"])
    return {"messages": EDITS[word](state["messages"]), "log": [word]}


def finish(state: State) -> dict[str, Any]:
    return {"log": ["finish"], "todo": []}


def part(name: str, checkpointer: Literal[True] | None) -> Any:
    """A subgraph of two nodes; the second asks if the run is told so."""

    def first(state: Part) -> dict[str, Any]:
        kept = len(state.get("kept", {}))
        return {"log": [f"{name} has {kept}"], "kept": {f"{name} {kept}": kept}}

    def second(state: Part) -> dict[str, Any]:
        word = interrupt(f"{name} asks") if f"{name} asks" in state["todo"] else "nothing"
        return {"log": [f"{name} hears {word}"], "kept": {str(word): 0}}

    builder = StateGraph(Part, input_schema=Given, output_schema=Told)
    builder.add_node("first", first).add_node("second", second)
    builder.add_edge(START, "first").add_edge("first", "second")
    return builder.compile(checkpointer=checkpointer)


def built(saver: Any) -> Any:
    """The graph."""
    builder: Any = StateGraph(State)
    nodes: dict[str, Any] = {
        **{"plan": plan, "worker": worker, "ask": ask, "fail": fail, "edit": edit},
        **{"child": part("child", None), "keeper": part("keeper", True)},
    }
    for name, node in nodes.items():
        builder.add_node(name, node)
    builder.add_node("finish", finish)
    builder.add_edge(START, "plan")
    builder.add_conditional_edges("plan", route, [*list(nodes)[1:], "finish"])
    for name in list(nodes)[1:]:
        builder.add_edge(name, "finish")
    return builder.compile(checkpointer=saver)


# -- actions


@dataclass(frozen=True)
class Turn:
    """An input, from the head or (`at`) from the checkpoint of that place in the history."""

    todo: list[str]
    named: bool
    blocking: bool
    durability: Durability
    at: int | None = None


@dataclass(frozen=True)
class Resume:
    """An answer to what a run asked."""

    answer: str
    blocking: bool
    durability: Durability
    at: int | None = None


@dataclass(frozen=True)
class Replay:
    """A run from a checkpoint on, without an input."""

    blocking: bool
    durability: Durability
    at: int | None = None


@dataclass(frozen=True)
class Update:
    """A person's edit, as if a node had made it."""

    as_node: str | None
    word: str
    blocking: bool
    at: int | None = None


@dataclass(frozen=True)
class Reopen:
    """The process ends and another opens the file."""


Action = Turn | Resume | Replay | Update | Reopen

_durabilities = st.sampled_from(["sync", "async", "exit"])
_places = st.none() | st.integers(0, 9)
_words = ["send", "ask", "twice", "fail", *EDITS]
_parts = ["keeper", "keeper asks", "child", "child asks", "send", "ask"]
_answers = st.sampled_from(["yes", "no"])
_nodes = st.sampled_from([None, "plan", "edit", "finish", START])
_edits = st.sampled_from(["mended", "said", "nothing", "remove"])


def actions(*, subgraphs: bool) -> st.SearchStrategy[list[Action]]:
    """Courses of up to nine actions, which begin with a turn."""
    words = st.lists(st.sampled_from(_parts if subgraphs else _words), max_size=3, unique=True)
    if subgraphs:  # what keeps its state has some to be read back
        words = words.map(lambda found: [*found, "keeper"])
    color = st.booleans()
    turn = st.builds(Turn, words, st.booleans(), color, _durabilities, st.none())
    fork = st.builds(Turn, words, st.booleans(), color, _durabilities, _places)
    resume = st.builds(Resume, _answers, color, _durabilities, _places)
    replay = st.builds(Replay, color, _durabilities, _places)
    update = st.builds(Update, _nodes, _edits, color, _places)
    one = st.one_of(turn, fork, resume, resume, replay, update, st.just(Reopen()))
    return st.tuples(turn, st.lists(one, max_size=8)).map(lambda pair: [pair[0], *pair[1]])


# -- worlds


@dataclass
class World:
    """A checkpointer, the graph on it, and the numbers of the ids that were seen.

    Attributes:
        open: Opens the checkpointer, again after `Reopen`.
        saver: The open checkpointer.
        runner: Runs the asynchronous calls.
    """

    open: Callable[[], Any]
    saver: Any
    runner: asyncio.Runner
    numbers: dict[str, int] = field(default_factory=dict)
    history: list[str] = field(default_factory=list)
    turns: int = 0
    answered_at_exit: bool = False

    def __post_init__(self) -> None:
        self.graph = built(self.saver)

    def act(self, action: Action) -> Any:
        """Do it, and say what came of it: values, or the error."""
        if isinstance(action, Reopen):
            self.saver = self.open()
            self.graph = built(self.saver)
            return None
        try:
            return self.plain(self._done(action))
        except Exception as error:
            return [type(error).__name__, self.plain(str(error))]

    def _done(self, action: Turn | Resume | Replay | Update) -> Any:
        config = self._config(action.at)
        if isinstance(action, Update):
            values = UPDATES[action.word](self.graph.get_state(config).values)
            if action.blocking:
                self.graph.update_state(config, values, action.as_node)
            else:
                self.runner.run(self.graph.aupdate_state(config, values, action.as_node))
            return None
        given: Any = None
        if isinstance(action, Resume):
            self.answered_at_exit |= action.durability == "exit"
            asked = sorted(self.graph.get_state(config).interrupts, key=lambda i: _blank(i.value))
            # to several, the answer is one question's: which task of them takes it is chance;
            # from an older checkpoint on, tasks that had not asked may ask as well
            is_shared = len(asked) > 1 or action.at is not None
            many = {asked[0].id: action.answer} if asked and is_shared else None
            given = Command(resume=many or action.answer)
        elif isinstance(action, Turn):
            self.turns += 1
            name = f"u{self.turns}" if action.named else None
            said = HumanMessage(f"turn {self.turns}", id=name)
            given = {"todo": action.todo, "messages": [said], "log": [f"turn {self.turns}"]}
        if action.blocking:
            return self.graph.invoke(given, config, durability=action.durability)
        return self.runner.run(self.graph.ainvoke(given, config, durability=action.durability))

    def _config(self, at: int | None) -> Any:
        if at is None or not self.history:
            return THREAD
        uid = self.history[at % len(self.history)]
        return {"configurable": {**ROOT["configurable"], "checkpoint_id": uid}}

    # -- what can be seen

    def thread(self) -> Any:
        """The state with its subgraphs, and the history."""
        history = list(self.graph.get_state_history(THREAD))
        self.history = [s.config["configurable"]["checkpoint_id"] for s in history]
        state = self.graph.get_state(THREAD, subgraphs=True)
        return self.plain([state, history])

    def listings(self, number: int) -> dict[str, Any]:
        """What `list` says of the thread, with and without its options, in both colours."""
        before = {"before": self._config(number)} if self.history else {}
        options: list[dict[str, Any]] = [
            *({}, {"limit": number}, {"filter": {"source": "loop"}}, before),
            {"filter": {"source": "input"}, "limit": 1},
            {**before, "filter": {"source": "loop"}, "limit": 2},
        ]
        found = {str(n): list(self.saver.list(ROOT, **given)) for n, given in enumerate(options)}
        every = sorted(self.saver.list(THREAD), key=lambda each: str(each.checkpoint["id"]))
        for each in every:  # of each namespace, from the oldest on
            found.setdefault(each.config["configurable"]["checkpoint_ns"], []).append(each)
        found["alist"] = self.runner.run(self._alist(options[-1]))
        plain: dict[str, Any] = self.plain(found)
        return plain

    async def _alist(self, options: dict[str, Any]) -> list[CheckpointTuple]:
        return [found async for found in self.saver.alist(ROOT, **options)]

    # -- ids as numbers

    def plain(self, value: Any) -> Any:
        """A value with each random id as a number, without times and versions."""
        match value:
            case str():
                return _IDS.sub(self._number, value)
            case dict():
                pairs = sorted(value.items(), key=lambda pair: _blank(pair[0]))
                return {
                    self.plain(key): self.plain(item)
                    for key, item in pairs
                    if not str(key).startswith("__pregel_")  # the checkpointer of a subgraph
                }
            case Interrupt():
                return ["interrupt", self.plain(value.value), self.plain(value.id)]
            case BaseMessage():
                # a write is stored before or after the reducer gave an id to a message without one
                own = value.id is not None and not _IDS.fullmatch(value.id)
                return [value.type, self.plain(value.content), value.id if own else "random"]
            case StateSnapshot() | PregelTask():
                named = value._asdict()
                named.pop("created_at", None)
                return self.plain(named)
            case CheckpointTuple():
                values = value.checkpoint["channel_values"]
                parts = self.plain([value.config, value.parent_config, value.metadata, values])
                pending = value.pending_writes or []
                if self.answered_at_exit:
                    # langgraph writes the answer at the exit or not, by which of two tasks was
                    # first: it takes the answer out of a list that another task has replaced
                    pending = [w for w in pending if w[:2] != (NULL_TASK_ID, RESUME)]
                writes = sorted(pending, key=lambda write: _blank(write[1:]))
                return [parts, sorted(self.plain(writes), key=repr)]  # in the order of threads
            case list() | tuple():
                if all(isinstance(item, Interrupt) for item in value):
                    value = sorted(value, key=_blank)
                return [self.plain(item) for item in value]
        return value if isinstance(value, int | float | None) else self.plain(str(value))

    def _number(self, match: re.Match[str]) -> str:
        return f"#{self.numbers.setdefault(match[0], len(self.numbers))}"


NULL_TASK_ID, RESUME = "00000000-0000-0000-0000-000000000000", "__resume__"
_IDS = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b[0-9a-f]{32}\b")


def _blank(value: Any) -> str:
    return _IDS.sub("#", repr(value))


UPDATES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "mended": lambda _: {"table": {"mended": True}},
    "said": lambda values: {"messages": [AIMessage("a person says", id="person")], "log": ["said"]},
    "nothing": lambda _: None,
    "remove": lambda values: {"messages": EDITS["remove"](values.get("messages", []))},
}
