"""Store user profiles, which have a schema and are updated field by field."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeVar

import jsonpatch
from jsonpatch import JsonPatchException, JsonPointer, JsonPointerException
from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore
from pydantic import BaseModel, RootModel, ValidationError

from perdure.effects import build_async_function, build_blocking_function
from perdure.errors import ConfigurationError, InvalidPatch, InvalidValue, VersionConflict
from perdure.memory.long_term.detectors import (
    find_email_addresses,
    find_phone_numbers,
    find_sensitive_spans,
)
from perdure.memory.long_term.gate import Gate
from perdure.memory.long_term.memory_changes import plan_and_write_with_retries
from perdure.memory.long_term.records import (
    Candidate,
    ChangePlan,
    ItemHandle,
    Memory,
    StoreAdapter,
    Verdict,
    build_removal,
    fill_namespace,
    get_adapter,
)
from perdure.memory.namespace_templates import Template
from perdure.memory.options import check_instance
from perdure.memory.run_config import read_thread_and_checkpoint_id_of_run
from perdure.stores.base import Provenance, PutItem, Receipt
from perdure.stores.values import decode_json_object, encode_value_as_json, to_prompt_json

M = TypeVar("M", bound=BaseModel)
Document = dict[str, Any]
# Maximum size of the JSON of a profile or of a patch, in bytes.
MAX_BYTES: Final = 100_000
# Maximum number of operations in a patch.
MAX_OPERATIONS: Final = 100
_QUOTABLE_ERRORS: Final = (jsonpatch.InvalidJsonPatch, jsonpatch.JsonPatchConflict)
# Maximum number of path segments in a JSON Pointer (RFC 6901).
_MAX_PATH_PARTS: Final = 200


def check_patch_operations(patch: Any) -> list[Document]:
    """Check the operations of a JSON Patch, and return a copy of the patch as a list.

    Raises:
        InvalidPatch: The patch is not a JSON Patch (RFC 6902), is too large, or would change the
            whole document instead of its fields.
    """
    is_list = isinstance(patch, list | tuple)
    if not is_list or len(patch) > MAX_OPERATIONS:
        description = (
            f"the patch has {len(patch)} operations"
            if is_list
            else f"the patch is a {type(patch).__name__}"
        )
        raise InvalidPatch(
            f"{description}; expected a list of at most {MAX_OPERATIONS} "
            'operations, like [{"op": "replace", "path": "/home/city", "value": "Ghent"}]'
        )
    operations: list[Document] = copy_and_check_json(list(patch), "the patch")
    for number, operation in enumerate(operations, 1):
        try:
            jsonpatch.JsonPatch([operation])
            paths = [JsonPointer(operation[name]) for name in ("path", "from") if name in operation]
            if max(len(path.parts) for path in paths) > _MAX_PATH_PARTS:
                raise InvalidPatch(
                    f"the path has more than {_MAX_PATH_PARTS} segments "
                    "(field names and list indexes)"
                )
        except (InvalidPatch, JsonPatchException, JsonPointerException, TypeError) as exc:
            raise InvalidPatch(f"operation {number} is not a JSON Patch operation: {exc}") from exc
        if not paths[0].parts and operation["op"] != "test":
            raise InvalidPatch(
                f"operation {number} has an empty path, so it would change the whole document; use "
                "the path of the field to change"
            )
    return operations


def apply_patch(
    document: Document, operations: Sequence[Document], *, by_model: bool = False
) -> Document:
    """Return a copy of a document with a patch applied.

    Args:
        document: The document.
        operations: The operations of the patch, from `check_patch_operations`.
        by_model: Whether a model made the patch. With True, a patch is refused if it replaces an
            object with a new object that lacks some of the fields that had a value, because a model
            seldom means to remove fields in this way.

    Raises:
        InvalidPatch: The patch does not fit the document, or the result is too large.
    """
    patched: Document = copy_and_check_json(document, "the profile")
    for number, operation in enumerate(operations, 1):
        unpatched = patched
        try:
            # Check the size of the profile document after each operation of the patch, because a
            # single copy operation can double the document's size.
            patched = copy_and_check_json(
                jsonpatch.JsonPatch([operation]).apply(unpatched), "the profile"
            )
            if by_model and operation["op"] != "remove":
                _refuse_removal_of_filled_fields(unpatched, patched, operation.get("from"))
        except (InvalidPatch, JsonPatchException, JsonPointerException) as exc:
            # Do not include the messages of other jsonpatch errors, because they contain parts of
            # the document, which may contain secrets.
            quotable = isinstance(exc, (InvalidPatch, *_QUOTABLE_ERRORS))
            fault = str(exc) if quotable else "it cannot be applied to the document"
            description = f"operation {number}, {operation['op']} {operation['path']!r:.200}"
            raise InvalidPatch(f"{description}: {fault}") from exc
    return patched


def _refuse_removal_of_filled_fields(
    before: Document, after: Document, moved_path: str | None
) -> None:
    """Raise InvalidPatch if an operation removed fields that had non-empty values.

    Args:
        before: The document before the operation.
        after: The document after the operation.
        moved_path: The path from which the operation moves a value, or None.
    """
    lost_paths = (
        path
        for path, part in iter_removed_paths_and_values(before, after)
        if part not in (None, "", [], {})
    )
    if lost := [repr(path) for path in lost_paths if path != moved_path]:
        raise InvalidPatch(
            f"the new object lacks the fields {', '.join(lost[:5])}, so their values would be "
            "lost; replace only the fields that change, or remove each field with a separate "
            "operation"
        )


def iter_removed_paths_and_values(
    previous: Any, new: Any, path: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each field in `previous` that is missing from `new`.

    The elements of two lists are compared only if both lists have the same length.

    Args:
        previous: The previous document.
        new: The new document.
        path: The path of the two documents if they are parts of larger documents.
    """
    if isinstance(previous, dict) and isinstance(new, dict):
        for name, part in previous.items():
            part_path = f"{path}/{escape_pointer_part(name)}"
            yield from (
                iter_removed_paths_and_values(part, new[name], part_path)
                if name in new
                else [(part_path, part)]
            )
    elif isinstance(previous, list) and isinstance(new, list) and len(previous) == len(new):
        for number, part in enumerate(previous):
            yield from iter_removed_paths_and_values(part, new[number], f"{path}/{number}")


def are_patched_fields_unchanged(
    operations: Sequence[Document], seen_document: Document, current_document: Document
) -> bool:
    """Return whether two documents are equal in all top-level fields that a patch changes.

    Args:
        operations: The operations of the patch.
        seen_document: The document for which the patch was made.
        current_document: The present document.
    """
    paths = [
        operation[member]
        for operation in operations
        for member in ("path", "from")
        if member in operation
    ]
    if "" in paths:
        return is_same_json(seen_document, current_document)
    names = {JsonPointer(path).parts[0] for path in paths}
    return is_same_json(
        *(
            {name: document[name] for name in names & document.keys()}
            for document in (seen_document, current_document)
        )
    )


def is_same_json(left: Any, right: Any) -> bool:
    """Return whether two JSON values are equal. Unlike in Python, true differs from 1."""
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)


def copy_and_check_json(value: Any, description: str) -> Any:
    """Return a copy of a JSON value.

    Raises:
        InvalidPatch: The value is not JSON, or it is too large. `description` names the value in
            the error message.
    """
    try:
        text = encode_value_as_json({"document": value})
    except InvalidValue as exc:
        raise InvalidPatch(f"{description} cannot be stored as JSON: {exc}") from exc
    size = len(text.encode()) - len('{"document":}')
    if size > MAX_BYTES:
        raise InvalidPatch(f"{description} has {size:,} bytes; at most {MAX_BYTES:,} are allowed")
    return decode_json_object(text)["document"]


def escape_pointer_part(name: str) -> str:
    """Escape a name for a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


class DocumentLeaf(NamedTuple):
    """A leaf of a JSON document, which is a scalar or an empty list or object.

    Attributes:
        path: The field names and list indices that lead to the value.
        value: The value.
    """

    path: tuple[str | int, ...]
    value: Any

    @property
    def label_from_path(self) -> str:
        """The field names on the path to the leaf, joined to a label such as `home address:`.

        The label is prepended to the leaf's value before the value is checked for secrets.

        For example, the detectors do not recognise `4711` by itself as a secret, but they recognise
        `pin: 4711`.
        """
        names = (part for part in self.path if isinstance(part, str))
        return f"{' '.join(names).replace('_', ' ')}: "

    @property
    def value_as_text(self) -> str:
        """The leaf's value as a string.

        Before the leaf's value is stored, the gate checks this string form of the value for
        sensitive data. The string form is also part of the profile's search text.

        The text is empty if the leaf's value is null or an empty string, list or object.
        """
        if isinstance(self.value, bool):
            return "yes" if self.value else "no"
        return "" if self.value in (None, [], {}) else str(self.value)


def iter_document_leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[DocumentLeaf]:
    """Yield the leaves of a JSON document: its scalars, its empty lists and its empty objects."""
    if isinstance(value, dict | list) and value:
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from iter_document_leaves(part, (*path, name))
    else:
        yield DocumentLeaf(path, value)


def replace_leaves(
    document: Document, leaves: Sequence[DocumentLeaf], new_values: Sequence[Any]
) -> Document:
    """Return a copy of a document with some of its leaf values replaced.

    Args:
        document: The document.
        leaves: The leaves to change.
        new_values: The new value of each leaf.
    """
    changed: Document = copy_and_check_json(document, "the profile")
    for leaf, value in zip(leaves, new_values, strict=True):
        container: Any = changed
        for part in leaf.path[:-1]:
            container = container[part]
        if leaf.path:
            container[leaf.path[-1]] = value
    return changed


def render_search_text(document: Document) -> str:
    """Render a document as searchable text with one line per field, such as `likes: tea, figs`."""
    lines: dict[str, list[str]] = {}
    for leaf in iter_document_leaves(document):
        if leaf.value_as_text:
            lines.setdefault(leaf.label_from_path, []).append(leaf.value_as_text)
    return "\n".join(label + ", ".join(texts) for label, texts in lines.items())


def dump_profile(profile: BaseModel) -> Document:
    """Return the document of a profile."""
    return profile.model_dump(mode="json", by_alias=True, round_trip=True, warnings=False)


def validate_profile(schema: type[M], document: Document) -> M:
    """Validate a document against the profile's schema. Return an instance of the schema.

    Validation is strict, which means that a string is not accepted where a number is expected, for
    example, and that unknown fields are rejected.

    Raises:
        InvalidPatch: The document does not fit the schema.
    """
    try:
        profile = schema.model_validate_json(json.dumps(document), strict=True)
    except ValidationError as exc:
        faults = [
            _describe_validation_error(fault)
            for fault in exc.errors(include_url=False, include_context=False)
        ]
    # A custom validator in the schema can raise any exception.
    except Exception as exc:
        fault = f"a validator of {schema.__name__} raised {type(exc).__name__}: {exc!s:.300}"
        raise InvalidPatch(fault) from exc
    else:
        faults = [
            f"{path!r:.200} is an unknown field"
            for path, _ in iter_removed_paths_and_values(document, dump_profile(profile))
        ]
        if not faults:
            return profile
    raise InvalidPatch(
        f"the document does not match the schema {schema.__name__}: {'; '.join(faults)[:800]}"
    )


def _describe_validation_error(error: Any) -> str:
    """Describe a pydantic validation error, including the field's path and the invalid value."""
    path = "".join(f"/{escape_pointer_part(str(part))}" for part in error["loc"]) or "the profile"
    received = (
        "" if error["type"] == "missing" else f" (it is {to_prompt_json(error['input'])[:80]})"
    )
    return f"{path!r}: {error['msg']}{received}"


DocumentTransform = Callable[[Document], Document]
_KIND: Final = "profile"
_DOCUMENT: Final = "document"


@dataclass(frozen=True, slots=True)
class ProfileState(Generic[M]):
    """The state of a profile in the store.

    Attributes:
        owner: The `Profile` object that read the state.
        name: The key of its item.
        item: The stored item, or None.
        document: The stored document, or the defaults of the schema.
        profile: The profile, or None if the document does not fit the schema.
        fault: Why the document does not fit the schema, or "".
    """

    owner: Profile[M]
    name: str
    item: Memory | None
    document: Document
    profile: M | None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class ProfileVersion:
    """A version of a profile.

    Attributes:
        document: The document.
        version: The number of the version, or None if the store keeps no versions.
        change: The method that made the version, `"patch"` or `"set"`.
        valid_from: Since when the profile had this document.
        valid_to: Until when, or None for the present version.
        provenance: Where the change comes from.
    """

    document: Document = field(repr=False)
    version: int | None
    change: str
    valid_from: datetime | None
    valid_to: datetime | None
    provenance: Provenance | None


class Profile(Generic[M]):
    """A profile in a store. If `namespace` contains `{user_id}`, each user has a separate profile.

    Each profile change is validated against the schema and checked by the gate. If a change is
    refused or cannot be applied, `InvalidPatch` is raised and nothing is written. If two changes to
    a profile are made concurrently, neither change is lost, except in a store that does not keep
    versions.

    Args:
        schema: A pydantic model.
        store: The store. None means the store of the graph that is running.
        namespace: Labels of the namespace; see `Template`.
        key: The key of the item. The key may contain placeholders, like a label of `namespace`.
        gate: Judges each value that a change sets. None means `Gate()`. E-mail addresses and
            telephone numbers are kept if an application sets them, or if a user's message contains
            them.
    """

    def __init__(
        self,
        schema: type[M],
        store: BaseStore | None = None,
        namespace: tuple[str, ...] = ("profiles", "{user_id}"),
        key: str = "profile",
        *,
        gate: Gate | None = None,
    ) -> None:
        try:
            self.json_schema: Document = schema.model_json_schema()
            if not isinstance(schema, type) or issubclass(schema, RootModel):
                raise TypeError("it has no fields")
        # `model_json_schema` raises an error if the schema is not a pydantic model or has a field
        # that cannot be expressed in JSON.
        except Exception as exc:
            raise ConfigurationError(
                f"the schema is {schema!r:.80}; expected a pydantic model that has fields and a "
                "JSON schema"
            ) from exc
        self.namespace, self.key = Template(namespace), Template((key,))
        self.schema = schema
        self.adapter = None if store is None else StoreAdapter(store, self.namespace)
        self.gate: Gate = check_instance("gate", gate or Gate(), Gate, "Gate(…), or None")

    async def _get(
        self, config: RunnableConfig | None = None, *, as_of: datetime | None = None
    ) -> M:
        """Return the current profile or, with `as_of`, a past one.

        If no profile is stored, or if memory is disabled for the run, the returned profile contains
        the schema's default values.

        Raises:
            ConfigurationError: The stored document does not fit the schema, or there is no profile
                yet and the schema has required fields.
        """
        if self.namespace.is_memory_disabled_for_run(config):
            return self.schema()
        handle = self.get_item_handle(config)
        state = await self.read_state(handle, as_of)
        if state.profile is None:
            raise ConfigurationError(
                f"the profile {handle.key!r} in {handle.namespace!r} does not exist yet or does "
                f"not match the schema: {state.fault}; use history() to see the stored versions, "
                "and patch() or set() to correct the profile"
            )
        return state.profile

    async def _history(self, config: RunnableConfig | None = None) -> list[ProfileVersion]:
        """Return all versions of the profile, oldest first."""
        return [
            ProfileVersion(
                _copy_profile_document(item),
                item.version,
                str(item.value.get("change", "")),
                item.valid_from,
                item.valid_to,
                item.provenance,
            )
            for item in await self.get_item_handle(config).list_versions()
        ]

    async def _patch(self, operations: Any, config: RunnableConfig | None = None) -> M:
        """Apply a JSON Patch (RFC 6902) to the profile, and return the patched profile.

        Raises:
            InvalidPatch: The patch is not valid, or the schema or the gate refuses it.
        """
        return await self._write_change(
            "patch", partial(apply_patch, operations=check_patch_operations(operations)), config
        )

    async def _set(
        self, document: M | Mapping[str, Any], config: RunnableConfig | None = None
    ) -> M:
        """Replace the whole profile with another profile or document, and return the new profile.

        Raises:
            InvalidPatch: The schema or the gate refuses the document.
        """
        fields = dump_profile(document) if isinstance(document, self.schema) else document
        if not isinstance(fields, Mapping):
            raise InvalidPatch(
                f"the document {document!r:.80} has the type {type(document).__name__}; expected "
                f"an instance of {self.schema.__name__} or a dict with its fields"
            )
        whole: Document = copy_and_check_json(dict(fields), "the document")
        return await self._write_change("set", lambda _: whole, config)

    async def _forget(self, config: RunnableConfig | None = None) -> Receipt | None:
        """Erase the profile and its past versions, and return the receipt.

        If the store does not keep versions, the item is deleted and None is returned.
        """
        handle = self.get_item_handle(config)
        for version in await handle.list_versions():
            # Before erasing anything, check that the stored item is a profile.
            # `_copy_profile_document` raises an error if it is not.
            _copy_profile_document(version)
        if handle.adapter.versioned:
            receipt: Receipt = await handle.adapter.call("forget", handle.namespace, key=handle.key)
            return receipt
        await handle.adapter.write([build_removal(handle.namespace, handle.key)])
        return None

    get, aget = build_blocking_function(_get), build_async_function(_get)
    history, ahistory = build_blocking_function(_history), build_async_function(_history)
    patch, apatch = build_blocking_function(_patch), build_async_function(_patch)
    set, aset = build_blocking_function(_set), build_async_function(_set)
    forget, aforget = build_blocking_function(_forget), build_async_function(_forget)

    def get_item_handle(self, config: RunnableConfig | None = None) -> ItemHandle:
        """Return a handle to the store item that holds a run's profile.

        If the profile is changed through this handle, the change's provenance names the user as the
        actor.
        """
        namespace, [key] = fill_namespace(self.namespace, config), self.key.fill(config)
        user = Provenance(*read_thread_and_checkpoint_id_of_run(config), actor="user", trust="user")
        return ItemHandle(self.adapter or get_adapter(None, self.namespace), namespace, key, user)

    async def read_state(
        self, handle: ItemHandle, as_of: datetime | None = None
    ) -> ProfileState[M]:
        """Read the profile and its document.

        If the document does not match the schema, or if no document is stored and the schema has
        required fields, the attribute `profile` of the returned object is None, and the attribute
        `fault` gives the reason.
        """
        item = await handle.read(as_of)
        document = (
            _copy_profile_document(item) if item else dump_profile(self.schema.model_construct())
        )
        try:
            profile = validate_profile(self.schema, document) if item else self.schema()
        except (InvalidPatch, ValidationError) as exc:
            fault = str(exc) if item else f"{self.schema.__name__} has required fields"
            return ProfileState(self, handle.key, item, document, None, fault)
        return ProfileState(self, handle.key, item, dump_profile(profile), profile)

    async def plan_patch(
        self, handle: ItemHandle, operations: Sequence[Document], seen_document: Document
    ) -> Sequence[PutItem]:
        """Build the put operations that apply a model's patch to the stored profile.

        `seen_document` is the document from which the model generated the patch. The patch is
        applied to the stored profile. Another run may have changed the stored profile since the
        model generated the patch.

        Raises:
            InvalidPatch: The patch is not valid, or the schema or the gate refuses it.
            VersionConflict: The stored value of a field that the patch changes differs from the
                value in `seen_document`.
        """
        valid_operations = check_patch_operations(operations)
        state = await self.read_state(handle)
        if not are_patched_fields_unchanged(valid_operations, seen_document, state.document):
            raise VersionConflict(
                f"the profile {handle.key!r} has changed in fields that this patch also changes; "
                "create a new patch from the current profile"
            )
        apply = partial(apply_patch, operations=valid_operations, by_model=True)
        puts, _ = await self._plan_change_and_get_profile(handle, state, "patch", apply)
        return puts

    async def _write_change(
        self, operation: str, transform_document: DocumentTransform, config: RunnableConfig | None
    ) -> M:
        """Apply a change to the stored profile, save the result, and return the new profile."""
        handle = self.get_item_handle(config)
        # Declare `profile` here, because the nested function `plan` assigns to it as a nonlocal
        # variable.
        profile: M

        async def plan() -> ChangePlan:
            nonlocal profile
            state = await self.read_state(handle)
            puts, profile = await self._plan_change_and_get_profile(
                handle, state, operation, transform_document
            )
            return ChangePlan(puts)

        await plan_and_write_with_retries(handle.adapter, plan)
        return profile

    async def _plan_change_and_get_profile(
        self,
        handle: ItemHandle,
        state: ProfileState[M],
        operation: str,
        transform_document: DocumentTransform,
    ) -> tuple[Sequence[PutItem], M]:
        """Return the put operations that save a profile change, and the resulting profile."""
        try:
            new_document = transform_document(state.document)
        # Redact secrets in the error message, because it can contain field names that have not been
        # checked for secrets.
        except InvalidPatch as exc:
            raise InvalidPatch(self.gate.sensitive.redact(str(exc))) from None
        # Do not check a value if the stored profile already contains the same value under the same
        # field names. A list item is not checked either if only its index in the list has changed.
        stored = {
            (leaf.label_from_path, repr(leaf.value))
            for leaf in iter_document_leaves(state.document)
        }
        leaves = [
            leaf
            for leaf in iter_document_leaves(new_document)
            if (leaf.label_from_path, repr(leaf.value)) not in stored
        ]
        values = await _apply_gate_and_get_leaf_values_to_store(self.gate, leaves, handle)
        profile = validate_profile(self.schema, replace_leaves(new_document, leaves, values))
        document: Document = copy_and_check_json(dump_profile(profile), "the profile")
        # An unchanged profile is not written again. As an exception, if no profile is stored yet,
        # `set` writes the profile even if it equals the schema's defaults.
        if is_same_json(document, state.document) and (state.item or operation != "set"):
            return [], profile
        value = {
            "text": render_search_text(document),
            "kind": _KIND,
            _DOCUMENT: document,
            "change": operation,
        }
        return [handle.build_put(value, "text", (state.item and state.item.version) or 0)], profile


def _copy_profile_document(item: Memory) -> Document:
    """Return a copy of the profile document stored in an item.

    Raises:
        ConfigurationError: The item is not a profile.
    """
    if item.kind != _KIND or _DOCUMENT not in item.value:
        raise ConfigurationError(
            f"the key {item.key!r} in {item.namespace!r} already holds an item that is not a "
            f"profile (fields: {list(item.value)}); use another key or namespace for the profile"
        )
    # Copy the document, because langgraph's in-memory store returns the stored object itself, and
    # changing it in place would change the store.
    return deepcopy(item.value[_DOCUMENT])


async def _apply_gate_and_get_leaf_values_to_store(
    gate: Gate, leaves: Sequence[DocumentLeaf], handle: ItemHandle
) -> list[Any]:
    """Check a profile's leaf values with the gate, and return the values that may be stored.

    The gate is the filter that decides whether a text may be stored. For example, the gate can
    refuse a text that contains a password.

    Profile values are checked only by the gate's sensitive-data rules and by the application's own
    checks. The returned list contains one value for each leaf in `leaves`, in the same order.
    """
    candidates = [_convert_profile_leaf_to_gate_candidate(leaf, handle) for leaf in leaves]
    verdicts = [gate.sensitive.judge(candidate) for candidate in candidates]
    filled_indices = [i for i, leaf in enumerate(leaves) if leaf.value_as_text]
    answers = await gate.apply_custom_checks(
        [candidates[i] for i in filled_indices], [verdicts[i] for i in filled_indices]
    )
    for i, answer in zip(filled_indices, answers, strict=True):
        verdicts[i] = answer
    return [_get_leaf_value_to_store(*pair, gate) for pair in zip(leaves, verdicts, strict=True)]


def _get_leaf_value_to_store(leaf: DocumentLeaf, verdict: Verdict, gate: Gate) -> Any:
    """Return the value to store for a leaf.

    Raises:
        InvalidPatch: The gate refuses the value, or would change the field's label or a value that
            is not text.
    """
    if verdict.action == "keep":
        if verdict.text is None:
            return leaf.value
        if isinstance(leaf.value, str) and verdict.text.startswith(leaf.label_from_path):
            return verdict.text.removeprefix(leaf.label_from_path)
    path = ""
    # If a detector failed, omit the leaf's path from the error message. Redacting the path would
    # call the failing detector again.
    if verdict.check != "detectors":
        redacted = gate.sensitive.redact
        # A field name can be a secret by itself.
        names = [redacted(str(part)) for part in leaf.path]
        # Field names that are harmless by themselves can form a secret when joined. If the joined
        # names contain a secret, omit the whole path from the error message.
        label = f"{' '.join(names).replace('_', ' ')}: "
        path = "".join(f"/{name}" for name in names) if redacted(label) == label else ""
    raise InvalidPatch(
        f"{path or 'the change'!r:.200} cannot be stored: {verdict.reason} (rejected by "
        f"the check {verdict.check!r}); omit this value"
    )


def _convert_profile_leaf_to_gate_candidate(
    leaf: DocumentLeaf, profile_handle: ItemHandle
) -> Candidate:
    """Convert a leaf of the profile document to a `Candidate` for the gate.

    The gate is the set of checks that a text must pass before it is stored as a memory. The
    candidate's text contains the leaf's label and the leaf's value.
    """
    # Email addresses and phone numbers are kept if the application writes them to the profile, or
    # if a user's message contains them.
    text, explicit = leaf.label_from_path + leaf.value_as_text, profile_handle.user_texts is None
    if profile_handle.user_texts is not None:
        messages = [_normalize_letters(message) for message in profile_handle.user_texts]
        contacts = (
            _normalize_letters(text[a:b])
            for _, a, b in find_sensitive_spans(text, (find_email_addresses, find_phone_numbers))
        )
        explicit = all(any(contact in message for message in messages) for contact in contacts)
    return Candidate(text, _KIND, {}, profile_handle.provenance, "user", explicit)


def _normalize_letters(text: str) -> str:
    """Case-fold a text and remove all characters other than letters and digits."""
    return "".join(filter(str.isalnum, text.casefold()))
