"""Random sequences of actions on a graph with all features, and their comparable results.

A *world* is a checkpointer and a graph that uses it. The same actions in two worlds must produce
equal threads. Ids are random, so each id is replaced by the number of its first occurrence.
"""

from __future__ import annotations

import asyncio
import operator
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def merge_dicts(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    return {**old, **new}


class State(TypedDict):
    """A channel of each kind."""

    todo: list[str]
    log: Annotated[list[str], operator.add]
    messages: Annotated[list[AnyMessage], add_messages]
    table: Annotated[dict[str, Any], merge_dicts]


class SubgraphInput(TypedDict):
    """The input of a subgraph."""

    todo: list[str]


class SubgraphOutput(TypedDict):
    """The output of a subgraph."""

    log: Annotated[list[str], operator.add]


class SubgraphState(SubgraphInput, SubgraphOutput):
    """The state of a subgraph."""

    kept: Annotated[dict[str, Any], merge_dicts]


def plan(state: State) -> dict[str, Any]:
    n = len(state["log"])
    message = AIMessage(f"plan {n}", id=f"ai{n}")
    return {
        "log": [f"plan {n}"],
        "messages": [message],
        "table": {"plans": n, f"p{n % 5}": "x" * n},
    }


def route(state: State) -> list[Send | str]:
    """Return the nodes for all words of `todo`, in one step; if `fail` is a word, only `fail`."""
    todo = state["todo"]
    if "fail" in todo:
        return ["fail"]
    targets: list[Send | str] = [word for word in ("ask", "child", "keeper") if word in todo]
    targets += ["edit"] if EDITS.keys() & set(todo) else []
    targets += [Send("worker", {"n": n}) for n in range(3)] if "send" in todo else []
    return targets or ["finish"]


def worker(task: dict[str, int]) -> dict[str, Any]:
    return {"log": [f"worker {task['n']}"], "table": {f"w{task['n']}": [task["n"]]}}


def ask(state: State) -> dict[str, Any]:
    answers = [str(interrupt({"asked at": len(state["log"])}))]
    if "twice" in state["todo"]:
        answers.append(str(interrupt("and then?")))
    messages = [HumanMessage(answer, id=f"h{len(state['log'])}.{answer}") for answer in answers]
    return {"log": [f"told {answer}" for answer in answers], "messages": messages}


def fail(state: State) -> dict[str, Any]:
    if not state["table"].get("mended"):
        raise RuntimeError(f"failed at {len(state['log'])}")
    return {"log": ["mended"]}


def _replace_first_message(messages: list[AnyMessage]) -> list[BaseMessage]:
    return [HumanMessage("said otherwise", id=message.id) for message in messages[:1]]


EDITS: dict[str, Callable[[list[AnyMessage]], list[BaseMessage]]] = {
    "remove": lambda messages: [RemoveMessage(id=str(m.id)) for m in messages[:1]],
    "replace": _replace_first_message,
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


def build_subgraph(name: str, checkpointer: Literal[True] | None) -> Any:
    """Build a subgraph of two nodes; the second one interrupts if `todo` contains its question."""

    def first(state: SubgraphState) -> dict[str, Any]:
        kept = len(state.get("kept", {}))
        return {"log": [f"{name} has {kept}"], "kept": {f"{name} {kept}": kept}}

    def second(state: SubgraphState) -> dict[str, Any]:
        word = interrupt(f"{name} asks") if f"{name} asks" in state["todo"] else "nothing"
        return {"log": [f"{name} hears {word}"], "kept": {str(word): 0}}

    builder = StateGraph(SubgraphState, input_schema=SubgraphInput, output_schema=SubgraphOutput)
    builder.add_node("first", first).add_node("second", second)
    builder.add_edge(START, "first").add_edge("first", "second")
    return builder.compile(checkpointer=checkpointer)


def build_graph(saver: Any) -> Any:
    """Build the graph that all worlds use."""
    builder: Any = StateGraph(State)
    nodes: dict[str, Any] = {
        **{"plan": plan, "worker": worker, "ask": ask, "fail": fail, "edit": edit},
        **{"child": build_subgraph("child", None), "keeper": build_subgraph("keeper", True)},
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
    """A run with an input, from the head or from the checkpoint at `history_index`."""

    todo: list[str]
    has_message_id: bool
    blocking: bool
    durability: Durability
    history_index: int | None = None


@dataclass(frozen=True)
class Resume:
    """A run that answers an interrupt."""

    answer: str
    blocking: bool
    durability: Durability
    history_index: int | None = None


@dataclass(frozen=True)
class Replay:
    """A run without an input, from a checkpoint."""

    blocking: bool
    durability: Durability
    history_index: int | None = None


@dataclass(frozen=True)
class Update:
    """An update of the state in the name of a node."""

    as_node: str | None
    word: str
    blocking: bool
    history_index: int | None = None


@dataclass(frozen=True)
class Reopen:
    """A restart, in which another process opens the file."""


Action = Turn | Resume | Replay | Update | Reopen

DURABILITIES = st.sampled_from(["sync", "async", "exit"])
HISTORY_INDEXES = st.none() | st.integers(0, 9)
WORDS = ["send", "ask", "twice", "fail", *EDITS]
SUBGRAPH_WORDS = ["keeper", "keeper asks", "child", "child asks", "send", "ask"]
ANSWERS = st.sampled_from(["yes", "no"])
NODES = st.sampled_from([None, "plan", "edit", "finish", START])
EDIT_WORDS = st.sampled_from(["mended", "said", "nothing", "remove"])


def action_lists(*, subgraphs: bool) -> st.SearchStrategy[list[Action]]:
    """Return a strategy for lists of up to nine actions that begin with a turn."""
    words = st.lists(
        st.sampled_from(SUBGRAPH_WORDS if subgraphs else WORDS), max_size=3, unique=True
    )
    if subgraphs:  # the subgraph "keeper" keeps its state, and there must be some to read
        words = words.map(lambda drawn: [*drawn, "keeper"])
    blocking = st.booleans()
    turn = st.builds(Turn, words, st.booleans(), blocking, DURABILITIES, st.none())
    fork = st.builds(Turn, words, st.booleans(), blocking, DURABILITIES, HISTORY_INDEXES)
    resume = st.builds(Resume, ANSWERS, blocking, DURABILITIES, HISTORY_INDEXES)
    replay = st.builds(Replay, blocking, DURABILITIES, HISTORY_INDEXES)
    update = st.builds(Update, NODES, EDIT_WORDS, blocking, HISTORY_INDEXES)
    action = st.one_of(turn, fork, resume, resume, replay, update, st.just(Reopen()))
    return st.tuples(turn, st.lists(action, max_size=8)).map(lambda pair: [pair[0], *pair[1]])


# -- worlds


@dataclass
class World:
    """A checkpointer, a graph that uses it, and the number of each id that has occurred.

    Attributes:
        open: The function that opens the checkpointer; called again for `Reopen`.
        saver: The open checkpointer.
        runner: The runner of the asynchronous calls.
    """

    open: Callable[[], Any]
    saver: Any
    runner: asyncio.Runner
    numbers: dict[str, int] = field(default_factory=dict)
    history: list[str] = field(default_factory=list)
    turns: int = 0
    answered_at_exit: bool = False
    separated_task_ids: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.graph = build_graph(self.saver)

    def perform(self, action: Action) -> Any:
        """Perform an action, and return the resulting values, or the type and text of the error."""
        if isinstance(action, Reopen):
            self.saver = self.open()
            self.graph = build_graph(self.saver)
            return None
        try:
            return self.normalize(self._perform_on_graph(action))
        except Exception as error:
            return [type(error).__name__, self.normalize(str(error))]

    def _perform_on_graph(self, action: Turn | Resume | Replay | Update) -> Any:
        config = self._build_config(action.history_index)
        if isinstance(action, Update):
            values = UPDATES[action.word](self.graph.get_state(config).values)
            with self._collect_separated_task_ids(config, action.as_node):
                if action.blocking:
                    self.graph.update_state(config, values, action.as_node)
                else:
                    self.runner.run(self.graph.aupdate_state(config, values, action.as_node))
            return None
        graph_input: Any = None
        if isinstance(action, Resume):
            self.answered_at_exit |= action.durability == "exit"
            questions = sorted(
                self.graph.get_state(config).interrupts, key=lambda i: _mask_ids(i.value)
            )
            # With several questions, the answer names one of them, because it is random which task
            # would take it. From an older checkpoint, more tasks than these may ask.
            is_shared = len(questions) > 1 or action.history_index is not None
            answers = {questions[0].id: action.answer} if questions and is_shared else None
            graph_input = Command(resume=answers or action.answer)
        elif isinstance(action, Turn):
            self.turns += 1
            message_id = f"u{self.turns}" if action.has_message_id else None
            message = HumanMessage(f"turn {self.turns}", id=message_id)
            graph_input = {
                "todo": action.todo,
                "messages": [message],
                "log": [f"turn {self.turns}"],
            }
        if action.blocking:
            return self.graph.invoke(graph_input, config, durability=action.durability)
        return self.runner.run(
            self.graph.ainvoke(graph_input, config, durability=action.durability)
        )

    @contextmanager
    def _collect_separated_task_ids(self, config: Any, as_node: str | None) -> Iterator[None]:
        """Collect the ids under which perdure keeps an update apart from the writes of a task.

        LangGraph may store an update under the id of a task that has stored its own writes. The
        saver for memory drops such an update, and perdure stores it under a new id (decision 0005).
        """
        state = self.graph.get_state(config)
        names = {task.id: task.name for task in state.tasks}
        ids_before = self._read_writing_task_ids(state.config)
        yield
        if any(as_node in (None, names.get(task_id)) for task_id in ids_before & names.keys()):
            self.separated_task_ids |= self._read_writing_task_ids(state.config) - ids_before

    def _read_writing_task_ids(self, config: Any) -> set[str]:
        """Return the ids of the tasks that have pending writes at a checkpoint."""
        found = self.saver.get_tuple(config)
        return set() if found is None else {write[0] for write in found.pending_writes or []}

    def _build_config(self, history_index: int | None) -> Any:
        if history_index is None or not self.history:
            return THREAD
        uid = self.history[history_index % len(self.history)]
        return {"configurable": {**ROOT["configurable"], "checkpoint_id": uid}}

    # -- readable results

    def read_thread(self) -> Any:
        """Return the normalized state, with its subgraphs, and the normalized history."""
        history = list(self.graph.get_state_history(THREAD))
        self.history = [s.config["configurable"]["checkpoint_id"] for s in history]
        state = self.graph.get_state(THREAD, subgraphs=True)
        return self.normalize([state, history])

    def list_checkpoints(self, number: int) -> dict[str, Any]:
        """Return the normalized results of `list` and `alist`, with and without their options."""
        before = {"before": self._build_config(number)} if self.history else {}
        options: list[dict[str, Any]] = [
            *({}, {"limit": number}, {"filter": {"source": "loop"}}, before),
            {"filter": {"source": "input"}, "limit": 1},
            {**before, "filter": {"source": "loop"}, "limit": 2},
        ]
        results = {
            str(n): list(self.saver.list(ROOT, **listing_options))
            for n, listing_options in enumerate(options)
        }
        records = sorted(self.saver.list(THREAD), key=lambda saved: str(saved.checkpoint["id"]))
        for record in records:  # grouped by namespace, oldest first
            results.setdefault(record.config["configurable"]["checkpoint_ns"], []).append(record)
        results["alist"] = self.runner.run(self._list_async(options[-1]))
        normalized: dict[str, Any] = self.normalize(results)
        return normalized

    async def _list_async(self, options: dict[str, Any]) -> list[CheckpointTuple]:
        return [record async for record in self.saver.alist(ROOT, **options)]

    # -- ids as numbers

    def normalize(self, value: Any) -> Any:
        """Replace each random id in a value by a number, and drop times and versions."""
        match value:
            case str():
                return _IDS.sub(self._replace_id, value)
            case dict():
                pairs = sorted(value.items(), key=lambda pair: _mask_ids(pair[0]))
                return {
                    self.normalize(key): self.normalize(item)
                    for key, item in pairs
                    if not str(key).startswith("__pregel_")  # the checkpointer of a subgraph
                }
            case Interrupt():
                return ["interrupt", self.normalize(value.value), self.normalize(value.id)]
            case BaseMessage():
                # a write is stored before or after the reducer gave an id to a message without one
                own = value.id is not None and not _IDS.fullmatch(value.id)
                return [value.type, self.normalize(value.content), value.id if own else "random"]
            case StateSnapshot() | PregelTask():
                fields = value._asdict()
                fields.pop("created_at", None)
                return self.normalize(fields)
            case CheckpointTuple():
                values = value.checkpoint["channel_values"]
                parts = self.normalize([value.config, value.parent_config, value.metadata, values])
                pending = [
                    write
                    for write in value.pending_writes or []
                    if write[0] not in self.separated_task_ids
                ]
                if self.answered_at_exit:
                    # It depends on the order of two tasks whether langgraph writes the answer at
                    # the exit: one task removes the answer from a list that another replaces.
                    pending = [w for w in pending if w[:2] != (NULL_TASK_ID, RESUME)]
                writes = sorted(pending, key=lambda write: _mask_ids(write[1:]))
                return [
                    parts,
                    sorted(self.normalize(writes), key=repr),
                ]  # OS threads write in any order
            case list() | tuple():
                if all(isinstance(item, Interrupt) for item in value):
                    value = sorted(value, key=_mask_ids)
                return [self.normalize(item) for item in value]
        return value if isinstance(value, int | float | None) else self.normalize(str(value))

    def _replace_id(self, match: re.Match[str]) -> str:
        return f"#{self.numbers.setdefault(match[0], len(self.numbers))}"


NULL_TASK_ID, RESUME = "00000000-0000-0000-0000-000000000000", "__resume__"
_IDS = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b[0-9a-f]{32}\b")


def _mask_ids(value: Any) -> str:
    return _IDS.sub("#", repr(value))


UPDATES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "mended": lambda _: {"table": {"mended": True}},
    "said": lambda values: {"messages": [AIMessage("a person says", id="person")], "log": ["said"]},
    "nothing": lambda _: None,
    "remove": lambda values: {"messages": EDITS["remove"](values.get("messages", []))},
}
