"""Define and validate the body of a request that starts a run.

Some keys of a run's config, context and metadata are reserved for the server. If a client sets
reserved keys in a run's metadata, the server drops these keys. Reserved keys in the config and the
context are rejected by `RunRequest.refuse_reserved_config_values`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from contextlib import suppress
from itertools import chain
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from langchain_core.runnables import RunnableConfig
from langgraph.types import Command, Send
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from perdure.checkpointers.labels import (
    CALLER,
    CALLER_ACTION,
    STATE_FROM_OTHERS,
    TURN_WITHOUT_MEMORY,
)
from perdure.errors import ConfigurationError
from perdure.memory.run_config import parse_run_teams
from perdure.server.runs.message_authors import (
    HUMAN_ROLES,
    MESSAGE_ROLES,
    get_message_role,
    iter_nested_strings,
    unwrap_serialized_langchain_message,
)
from perdure.server.threads import validate_metadata

StreamMode = Literal[
    "values",
    "updates",
    "messages",
    "messages-tuple",
    "custom",
    "debug",
    "tasks",
    "checkpoints",
    "events",
]
# Keys that only the server is allowed to set in a config, in a context or in metadata
_RESERVED_NAMES: Final = (
    "user_id", "owner", "thread_id", "run_id", "assistant_id", "graph_id", CALLER, CALLER_ACTION,
    STATE_FROM_OTHERS, TURN_WITHOUT_MEMORY,
)  # fmt: skip
_UNSUPPORTED_FIELDS: Final = ("strict_resume", "feedback_keys", "langsmith_tracer")
# Maximum delay of a run (`after_seconds`), in seconds: ten years
_MAX_DELAY_S: Final = 10 * 365 * 24 * 3600


class Goto(BaseModel):
    """A target of a `Command`'s `goto`: a node and its input."""

    node: str
    input: Any = None


def _as_list(value: Any) -> Any:
    """Return `value` if it is a list, otherwise a list that contains only `value`."""
    return value if isinstance(value, list) else [value]


def _deduplicate_stream_modes(modes: list[StreamMode]) -> list[StreamMode]:
    """Return the stream modes without duplicates. If there are none, return `["values"]`.

    If a client requests both `messages` and `messages-tuple`, the mode `messages` is left out, as
    in langgraph's server, because the two modes together would send each token twice.
    """
    chosen = [*dict.fromkeys(modes)] or ["values"]
    return [mode for mode in chosen if mode != "messages" or "messages-tuple" not in chosen]


def parse_repeated_or_json_array_parameter(values: Any) -> list[Any]:
    """Return all values of a query parameter that can be given more than once.

    A client can repeat the query parameter in the URL, or send it once as a JSON array.

    The JavaScript SDK sends `stream_mode=values&stream_mode=updates`; earlier versions of it send
    `stream_mode=["values","updates"]`.
    """
    items = values if isinstance(values, list) else [values]
    return [*chain.from_iterable(map(_parse_json_array_or_wrap, items))]


def _parse_json_array_or_wrap(value: Any) -> list[Any]:
    """Return the elements of a JSON array that is passed as a string.

    If `value` is not a string that contains a JSON array, return `[value]`.
    """
    if isinstance(value, str) and value.startswith("["):
        with suppress(ValueError, RecursionError):
            return json.loads(value)  # type: ignore[no-any-return] # JSON that starts with "["
    return [value]


def is_reserved_name(name: str) -> bool:
    """Return whether only the server or langgraph may set a key in a config or in metadata."""
    return name in _RESERVED_NAMES or name.startswith(("__", "langgraph_"))


def _drop_reserved_names(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of metadata without the keys that are reserved for the server or langgraph."""
    return {key: value for key, value in metadata.items() if not is_reserved_name(key)}


Metadata = Annotated[dict[str, Any], AfterValidator(_drop_reserved_names)]
"""The metadata that a client sends, without reserved names. Reserved names do not cause an error,
because LangGraph's `RemoteGraph` sends some of them."""


class WithoutNulls(BaseModel):
    """Base class of request-body models that treat null fields as missing."""

    @model_validator(mode="before")
    @classmethod
    def _drop_null_fields(cls, body: Any) -> Any:
        """Remove fields whose value is null."""
        is_object = isinstance(body, Mapping)
        return (
            {name: value for name, value in body.items() if value is not None}
            if is_object
            else body
        )


class CommandFields(WithoutNulls):
    """The fields of LangGraph's `Command`, as sent by a client."""

    update: dict[str, Any] | list[tuple[str, Any]] | None = None
    resume: Any = None
    goto: Annotated[list[str | Goto], BeforeValidator(_as_list)] = []

    def to_langgraph_command(self) -> Command[Any]:
        """Convert a client's command into a LangGraph `Command` object."""
        goto = [
            target if isinstance(target, str) else Send(target.node, target.input)
            for target in self.goto
        ]
        return Command(update=self.update, resume=self.resume, goto=goto)

    @property
    def is_empty(self) -> bool:
        """Return True if the command sets none of `resume`, `update` and `goto`."""
        return self.resume is None and not self.update and not self.goto


class CheckpointRef(BaseModel):
    """Identifies a checkpoint in a request, such as the checkpoint from which a run continues."""

    thread_id: str | None = None
    checkpoint_id: str | None = None
    checkpoint_ns: str | None = None
    checkpoint_map: dict[str, str] | None = None


class Configurable(CheckpointRef):
    """A config's `configurable` dict: a checkpoint reference and other fields for the graph."""

    model_config = ConfigDict(extra="allow")


class ClientConfig(WithoutNulls):
    """The fields of a LangChain config that clients are allowed to set."""

    tags: list[str] = []
    recursion_limit: int = Field(default=25, ge=1, le=1000)
    configurable: Configurable = Configurable()
    metadata: Metadata = {}


class StoredTexts(NamedTuple):
    """Texts and message ids in a thread's state, to recognize input that a client sends again.

    Texts are stored without leading and trailing white space.

    Attributes:
        message_ids: The ids of all messages.
        texts_by_other_users: The texts of the human messages that other users have written, as
            opposed to the person to whom the thread belongs.
        texts: The strings in channels whose values are not messages.
        input_channels: The names of the channels that a run's input can write to, or None if they
            are unknown.
    """

    message_ids: Set[str]
    texts_by_other_users: Set[str]
    texts: Set[str]
    input_channels: Set[str] | None


NO_STORED_TEXTS: Final = StoredTexts(frozenset(), frozenset(), frozenset(), None)
"""The texts of a thread whose state was not loaded, or is empty."""


class RunRequest(WithoutNulls):
    """The request body that `langgraph_sdk` sends to start a run."""

    assistant_id: str
    input: Any = None
    command: CommandFields | None = None
    checkpoint: CheckpointRef | None = None
    checkpoint_id: str | None = None
    config: ClientConfig = ClientConfig()
    context: dict[str, Any] | None = None
    metadata: Metadata = {}
    interrupt_before: Literal["*"] | list[str] | None = None
    interrupt_after: Literal["*"] | list[str] | None = None
    stream_mode: Annotated[
        list[StreamMode], BeforeValidator(_as_list), AfterValidator(_deduplicate_stream_modes)
    ] = ["values"]
    stream_subgraphs: bool = False
    stream_resumable: bool = False
    on_disconnect: Literal["cancel", "continue"] = "continue"
    on_completion: Literal["delete", "keep"] = "delete"
    multitask_strategy: Literal["reject", "enqueue", "interrupt", "rollback"] = "enqueue"
    if_not_exists: Literal["reject", "create"] = "reject"
    durability: Literal["sync", "async", "exit"] | None = None
    checkpoint_during: bool | None = None
    after_seconds: float = Field(default=0, ge=0, le=_MAX_DELAY_S)
    webhook: str | None = None
    strict_resume: bool | None = None
    feedback_keys: list[str] | None = None
    langsmith_tracer: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _refuse_unsupported_and_fill_related_fields(self) -> Self:
        """Check the request's fields, and set fields that depend on other fields.

        Unsupported fields and unsupported combinations of fields are rejected.
        """
        for field in _UNSUPPORTED_FIELDS:
            if value := getattr(self, field):
                raise ValueError(
                    f"the field {field!r} is {value!r}, but this server does not support this "
                    "field; remove the field"
                )
        # In langgraph, `checkpoint_during` is the former name of `durability`.
        if self.durability is None and self.checkpoint_during is not None:
            self.durability = "async" if self.checkpoint_during else "exit"
        if self.after_seconds and self.multitask_strategy == "reject":
            raise ValueError(
                "after_seconds cannot be combined with multitask_strategy 'reject', because a "
                "delayed run cannot be rejected later; choose another strategy"
            )
        self._drop_command_if_empty_else_drop_input()
        self.validate_metadata_of_run_checkpoints()
        return self

    def _drop_command_if_empty_else_drop_input(self) -> None:
        """Drop `command` if it is empty. If it is not empty, drop `input`.

        Some clients send an `input` together with a `command` that answers an interrupt. If a
        request has a command and an `input`, the `input` is ignored, because it only repeats the
        thread's messages or is an empty object.
        """
        if self.command is not None and self.command.is_empty:
            self.command = None
        if self.command is not None and self.input is not None:
            self.input = None

    def validate_metadata_of_run_checkpoints(self) -> None:
        """Validate the metadata that will be stored with the run's checkpoints.

        Raises:
            ConfigurationError: See `validate_metadata`.
        """
        # LangGraph copies strings and numbers from `configurable` into the checkpoint metadata.
        labels = {
            name: value
            for name, value in self._configurable_with_requested_checkpoint.items()
            if isinstance(value, str | int | float)
        }
        validate_metadata({**labels, **self.config.metadata, **self.metadata})

    def graph_input(self) -> Any:
        """Return the graph's input: a `Command` if the request has one, otherwise `input`."""
        return self.command.to_langgraph_command() if self.command else self.input

    @property
    def client_input_values(self) -> list[Any]:
        """Return the client-supplied values that the graph receives as input or in a command."""
        if self.command is None:
            return [self.input]
        targets = [target.input for target in self.command.goto if not isinstance(target, str)]
        return [self.command.update, self.command.resume, *targets]

    @property
    def call_options(self) -> dict[str, Any]:
        """Return the request fields that are passed to the graph as keyword arguments."""
        return self.model_dump(
            include={"context", "interrupt_before", "interrupt_after", "durability"}
        )

    def build_fields_to_store(self) -> dict[str, Any]:
        """Return the request fields that the client has set, for storage in the run's database row.

        The returned fields do not include the metadata and the assistant id, because the field
        `RunRow.details` of the same row already contains them.
        """
        return self.model_dump(exclude={"metadata", "assistant_id"}, exclude_unset=True)

    @property
    def has_new_graph_input(self) -> bool:
        """Return whether the request has new graph input, not just answers to interrupts."""
        if self.command is None:
            return self.input is not None
        sends = [target for target in self.command.goto if not isinstance(target, str)]
        return bool(self.command.update) or any(target.input is not None for target in sends)

    def continues_turn(self, stored_texts: StoredTexts = NO_STORED_TEXTS) -> bool:
        """Return whether the run continues an earlier turn instead of starting a new one.

        A run with a command continues the turn's pending tasks, even if the command adds a message.
        If a run's input has no new human message, the graph responds to the messages from earlier
        runs.

        Args:
            stored_texts: The texts in the thread's state. Some clients send all texts of the state
                again with each run.
        """
        value, channels = self.input, stored_texts.input_channels
        if isinstance(value, dict) and channels is not None:
            # LangGraph ignores input keys that are not input channels of the graph.
            value = {name: part for name, part in value.items() if name in channels}
        return self.command is not None or not _brings_new_text(value, stored_texts)

    @property
    def answers_interrupt_with_edited_tool_call(self) -> bool:
        """Return whether the request answers an interrupt by editing a tool call.

        The answer can be sent as `command.resume`, or as the input of a thread stream.
        """
        answer = self.input if self.command is None else self.command.resume
        return _contains_edit_decision(answer)

    def merge_with_assistant(self, assistant: Mapping[str, Any]) -> Self:
        """Return the request, merged with its assistant's configuration.

        The assistant's context, metadata, `configurable` and config metadata are merged key by key
        with those of the request. If the request and the assistant have a value for the same key,
        the request's value is used. The request's tags are added to the assistant's tags.

        Raises:
            ConfigurationError: The combined metadata is too large.
        """
        base_config, own_config = assistant["config"], self.config.model_dump(exclude_unset=True)
        tags = dict.fromkeys((*base_config.get("tags", ()), *own_config.get("tags", ())))
        config = {**base_config, **own_config, "tags": [*tags]}
        for name in ("configurable", "metadata"):
            config[name] = {**base_config.get(name, {}), **own_config.get(name, {})}
        combined = self.model_copy(
            update={
                "assistant_id": assistant["assistant_id"],
                "config": ClientConfig.model_validate(config),
                "metadata": {**_drop_reserved_names(assistant["metadata"]), **self.metadata},
                "context": {**assistant["context"], **(self.context or {})} or self.context,
            }
        )
        combined.validate_metadata_of_run_checkpoints()
        return combined

    def refuse_reserved_config_values(self, thread_id: str, user: str) -> None:
        """Reject a config or context that sets a value reserved for the server.

        Args:
            thread_id: The thread of the run.
            user: The person whose memories the run uses.

        Raises:
            ConfigurationError: The config or the context contains a reserved name. `thread_id`,
                `user_id` and `owner` are allowed if they have the run's own values.
        """
        allowed = {"thread_id": thread_id, "user_id": user, "owner": user}
        for name, value in chain(
            self._configurable_with_requested_checkpoint.items(), (self.context or {}).items()
        ):
            if is_reserved_name(name) and value is not None and value != allowed.get(name):
                raise ConfigurationError(
                    f"the field {name!r} is {value!r}, but only the server may set this field; "
                    "remove it from the request"
                )

    def team_names(self) -> set[str]:
        """Return the names of the teams that the request's config and context specify.

        Raises:
            InvalidConfig: A name of a team is invalid.
        """
        names = set[str]()
        for values in (self._configurable_with_requested_checkpoint, self.context or {}):
            for team, teams in ((values.get("team"), None), (None, values.get("teams"))):
                names |= {*(parse_run_teams(team, teams) or ())}
        return names

    @property
    def checkpoint_ids_by_namespace(self) -> dict[str, str]:
        """Return a dict of the checkpoint ids in the request, keyed by checkpoint namespace."""
        return get_checkpoint_ids_by_namespace(self._configurable_with_requested_checkpoint)

    @property
    def start_checkpoint_id(self) -> str | None:
        """Return the id of the checkpoint, in the root graph, from which the run starts.

        Return None if the run starts from the thread's latest checkpoint (its head). If the request
        specifies a subgraph's checkpoint, the id of the root graph's checkpoint is taken from
        `checkpoint_map`.
        """
        return self.checkpoint_ids_by_namespace.get("")

    @property
    def _configurable_with_requested_checkpoint(self) -> dict[str, Any]:
        """Return the request's `configurable`, with the requested checkpoint added to it."""
        configurable = self.config.configurable.model_dump(exclude_unset=True)
        configurable |= (self.checkpoint or CheckpointRef()).model_dump(exclude_none=True)
        configurable |= {"checkpoint_id": self.checkpoint_id} if self.checkpoint_id else {}
        return {
            name: value
            for name, value in configurable.items()
            if value is not None or name not in CheckpointRef.model_fields
        }

    def build_config(
        self, server_values: Mapping[str, Any], *, is_continued: bool
    ) -> RunnableConfig:
        """Return the config of the run.

        Args:
            server_values: Values that only the server sets.
            is_continued: Whether an earlier execution of the run is continued. The config then
                contains no checkpoint id, so that the run continues from the thread's head.
        """
        configurable = {
            name: value
            for name, value in self._configurable_with_requested_checkpoint.items()
            if name not in CheckpointRef.model_fields
        }
        if not is_continued:
            # A request can name the checkpoint in `checkpoint`, `checkpoint_id` or
            # `config.configurable`. Pass the checkpoint to LangGraph in the same form in all three
            # cases, so that LangGraph always loads the requested checkpoint.
            configurable["checkpoint_ns"] = ""
            if self.start_checkpoint_id is not None:
                configurable["checkpoint_id"] = self.start_checkpoint_id
            if checkpoint_map := self._configurable_with_requested_checkpoint.get("checkpoint_map"):
                configurable["checkpoint_map"] = checkpoint_map
        return {
            "configurable": {**configurable, **server_values},
            "metadata": {**self.config.metadata, **self.metadata},
            "tags": self.config.tags,
            "recursion_limit": self.config.recursion_limit,
        }


def get_checkpoint_ids_by_namespace(configurable: Mapping[str, Any]) -> dict[str, str]:
    """Return a dict of the checkpoint ids in a config's `configurable`, keyed by namespace."""
    ids = {configurable.get("checkpoint_ns", ""): configurable.get("checkpoint_id")}
    ids |= configurable.get("checkpoint_map") or {}
    return {namespace: checkpoint_id for namespace, checkpoint_id in ids.items() if checkpoint_id}


def _brings_new_text(value: Any, stored_texts: StoredTexts) -> bool:
    """Return whether an input contains a new human message, or text that the thread lacks.

    If a list contains human messages, only the last human message with content is checked, because
    the graph responds to that message. A human message whose id is already in the thread is not
    new, even if its content is changed. An input can be a list with several messages. The last
    human message in such a list does not count as new if the thread contains the same text from
    another user. The reason is that some clients resend whole conversations without message ids. A
    human message that is sent alone counts as new even if the thread already contains the same
    text, because a user may say "yes" more than once. This check ignores messages with a non-human
    role, such as `assistant`. This check ignores numbers, booleans and requests to remove a
    message, because they add no text to the thread.

    Args:
        value: The input or a part of it.
        stored_texts: The texts in the thread's state, which are not new.
    """
    if isinstance(value, list):
        if (pair := _parse_human_message(value)) is not None:
            return _is_new_message(pair, stored_texts)
        if any(map(_parse_human_message, value)):
            # A list of messages may also contain human messages that are plain strings.
            messages = [
                _HumanMessage(None, element)
                if isinstance(element, str)
                else _parse_human_message(element)
                for element in value
            ]
            with_content = [
                message for message in messages if message is not None and message.has_content
            ]
            return (
                bool(with_content)
                and _is_new_message(with_content[-1], stored_texts)
                and not (
                    len(value) > 1 and _is_by_other_users(with_content[-1].content, stored_texts)
                )
            )
        texts = [element for element in value if isinstance(element, str)]
        if len(value) > 1 and texts and _is_by_other_users(texts[-1], stored_texts):
            return False
        if len(value) == 2 and isinstance(value[0], str) and value[0] in MESSAGE_ROLES:
            return False
        return any(_brings_new_text(element, stored_texts) for element in value)
    if isinstance(value, str):
        return bool(value.strip()) and value.strip() not in stored_texts.texts
    if not isinstance(value, dict) or "decisions" in value:
        # The human-in-the-loop middleware of LangChain expects the key `decisions` in an answer.
        return False
    if (message := _parse_human_message(value)) is not None:
        return _is_new_message(message, stored_texts)
    fields = unwrap_serialized_langchain_message(value)
    if get_message_role(fields) in (*MESSAGE_ROLES, "remove", "constructor"):
        # Do not count non-human messages, `RemoveMessage` objects or objects in LangChain's
        # serialization format as new text from a user.
        return False
    return any(_brings_new_text(part, stored_texts) for part in fields.values())


class _HumanMessage(NamedTuple):
    """The id and the content of a human message in an input."""

    message_id: str | None
    content: Any

    @property
    def has_content(self) -> bool:
        """Whether the message contains more than white space."""
        blocks = self.content if isinstance(self.content, list) else [self.content]
        texts = [block.get("text", True) if isinstance(block, dict) else block for block in blocks]
        return any(text.strip() if isinstance(text, str) else text for text in texts)


def _parse_human_message(value: Any) -> _HumanMessage | None:
    """Parse a human message from a dict or a `[role, text]` list.

    Return None if the value is not a human message.
    """
    if isinstance(value, list):
        is_pair = len(value) == 2 and isinstance(value[0], str) and value[0] in HUMAN_ROLES
        return _HumanMessage(None, value[1]) if is_pair else None
    if not isinstance(value, dict):
        return None
    fields = unwrap_serialized_langchain_message(value)
    if get_message_role(fields) not in HUMAN_ROLES:
        return None
    message_id = fields.get("id")
    return _HumanMessage(message_id if isinstance(message_id, str) else None, fields.get("content"))


def _is_new_message(message: _HumanMessage, stored_texts: StoredTexts) -> bool:
    """Return whether a human message is not blank and is not stored in the thread yet.

    A message counts as stored if the thread contains a message with the same id. A message without
    an id counts as not stored.
    """
    return message.has_content and message.message_id not in stored_texts.message_ids


def _is_by_other_users(content: Any, stored_texts: StoredTexts) -> bool:
    """Return whether all texts in `content` come from users other than the thread's own user.

    A text counts as written by another user if a message from another user in the thread contains
    the same text. Return False if `content` has no text.
    """
    texts = [text.strip() for text in iter_nested_strings(content)]
    return bool(texts) and all(text in stored_texts.texts_by_other_users for text in texts)


def _contains_edit_decision(answer: Any) -> bool:
    """Return whether an answer to interrupts contains a decision of the type `edit`.

    An answer to LangChain's human-in-the-loop middleware contains a list of decisions, each with a
    type such as `approve` or `edit`. An answer to several interrupts is a dict with one answer for
    each interrupt id.
    """
    if isinstance(answer, dict):
        return answer.get("type") == "edit" or any(map(_contains_edit_decision, answer.values()))
    return isinstance(answer, list) and any(map(_contains_edit_decision, answer))
