"""Read conversations from a ChatGPT export or from the page of a shared link."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage

from perdure.cli.importing.conversation import (
    Conversation,
    MalformedPart,
    build_conversation_without_messages,
    build_imported_message,
    format_code_block,
    format_placeholder,
    get_by_path,
    parse_json_or_none,
    parse_timestamp,
    replace_surrogates,
    shorten_line,
)

# Maps each field name in `titles.IMPORTED_KEYS` to the field's name in a ChatGPT export.
_FIELD_NAMES: Final = {
    **{name: name for name in ("title", "create_time", "update_time", "gizmo_id")},
    "model": "default_model_slug",
}
_TEXT_KINDS: Final = ("text", "multimodal_text", "code")
# Kinds of content that ChatGPT hides from the user, such as reasoning, custom instructions, and web
# pages read by the model.
_HIDDEN_KINDS: Final = (
    *("thoughts", "reasoning_recap", "user_editable_context", "model_editable_context"),
    *("tether_browsing_display", "tether_browsing_code", "sonic_webpage", "computer_output"),
    *("computer_initialize_state", "app_pairing_content", "super_widget"),
)
# Matches characters that no provider accepts in a tool name.
_INVALID_IN_TOOL_NAME: Final = re.compile(r"[^\w-]", re.ASCII)
# Prefix of the names of the ChatGPT tools that write documents.
_CANVAS_PREFIX: Final = "canmore."
# The value of `_MessagePart.kind` for a deep-research report.
_REPORT_KIND: Final = "report"
_WIDGET_STATE_PREFIX: Final = "The latest state of the widget is: "
_AUDIO_OR_VIDEO: Final = re.compile(r"(audio|video).*_asset_pointer$")
# Patterns for the two citation formats. `_MARKUP` matches citations enclosed in private-use
# characters. `_BRACKET` matches citations such as 【12†source】, which older models wrote.
_MARKUP: Final = re.compile("[ \t]?\ue200([^\ue200\ue201]*)\ue201|[\ue200-\ue2ff]")
_BRACKET: Final = re.compile("[ \t]?【(\\d+)(?::\\d+)?†[^】]*】")


def is_chatgpt_conversation(value: Mapping[str, Any]) -> bool:
    """Return whether an object is a conversation from a ChatGPT export or a ChatGPT shared link."""
    return bool(value.keys() & {"mapping", "linear_conversation"})


def build_chatgpt_conversation(export: Mapping[str, Any]) -> Conversation:
    """Build a `Conversation` from a conversation in a ChatGPT export.

    Malformed messages are skipped, and are listed in the new conversation's `problems`.
    """
    tree = _read_parents_and_messages_by_id(export)
    name = get_by_path(export, str, "conversation_id") or export.get("id")
    conversation = build_conversation_without_messages(name, export, _FIELD_NAMES, sorted(tree))
    if not tree and export.get("mapping") != {}:
        conversation.add_problem("'mapping' is missing or is not a JSON object")
    parts: dict[str, _MessagePart] = {}
    for key, (_, message) in tree.items():
        # Skip nodes without a message, such as the root node of the message tree.
        if message is None:
            continue
        conversation.source_count += 1
        try:
            part = _read_message_part(message)
            # ChatGPT may store the same report in several messages. Import it once.
            if part.kind == _REPORT_KIND and any(
                part.text == earlier.text for earlier in parts.values()
            ):
                conversation.left_out["hidden"] += 1
            elif part.text.strip():
                parts[key] = part
            elif part.kind not in _TEXT_KINDS or part.plain_text.strip():
                kind = (
                    part.kind
                    if part.kind in _HIDDEN_KINDS
                    else "hidden"
                    if part.is_hidden
                    else part.tool
                )
                conversation.left_out[kind or part.kind] += 1
        except MalformedPart as exc:
            conversation.add_problem(str(exc), key)
    parents = {key: parent for key, (parent, _) in tree.items()}
    conversation.add_message_tree(
        parents,
        _convert_parts_to_messages_by_id(parents, parts),
        get_by_path(export, str, "current_node"),
    )
    # `former_texts` contains the texts that earlier versions of perdure imported. The former text
    # of a deep research report is "", because earlier versions skipped such reports.
    conversation.former_texts = {
        key: part.former_text
        for key, part in parts.items()
        if key in conversation.nodes and (part.former_text or part.kind == _REPORT_KIND)
    }
    return conversation


def _read_parents_and_messages_by_id(
    export: Mapping[str, Any],
) -> dict[str, tuple[str | None, Any]]:
    """Return a (parent id, message) tuple for each node of the conversation's message tree.

    The key is the id of the node. The parent id of the tree's root node is None. The second element
    of the tuple is None if the node has no message.
    """
    tree: dict[str, tuple[str | None, Any]] = {}
    for key, node in get_by_path(export, dict, "mapping").items():
        node = node if isinstance(node, dict) else {"message": node}
        tree[replace_surrogates(key)] = (
            get_by_path(node, str, "parent") or None,
            node.get("message"),
        )
    last = None
    for number, node in enumerate([] if tree else get_by_path(export, list, "linear_conversation")):
        node = node if isinstance(node, dict) else {"message": node}
        key = get_by_path(node, str, "id") or f"message-{number}"
        tree[key] = last, node.get("message")
        last = key
    return tree


def _convert_parts_to_messages_by_id(
    parent_ids: Mapping[str, str | None], parts: Mapping[str, _MessagePart]
) -> dict[str, list[BaseMessage]]:
    """Convert the content parts of a conversation to messages.

    Return a dict that maps the id of each node in the message tree to the node's messages.

    If all child nodes of an exported tool call are tool results, the tool call is converted to an
    `AIMessage` with an entry in `tool_calls`, and the results are converted to `ToolMessage`s. If a
    tool call has no child node, or has a child node that is not a tool result, the tool call and
    all of its results are converted to plain text. Model providers reject tool calls without
    results and results without tool calls.
    """
    followers: dict[str | None, list[str]] = defaultdict(list)
    for key, parent in parent_ids.items():
        followers[parent].append(key)
    results = {key for key, part in parts.items() if part.role == "tool"}
    calls = {key for key, part in parts.items() if part.tool} - results
    # Ids of the answered tool calls. A tool call is answered if it has at least one child node, and
    # all of its child nodes are tool results.
    answered = {key for key in calls if followers[key] and results.issuperset(followers[key])}
    messages: dict[str, list[BaseMessage]] = {}
    for key, part in parts.items():
        role = "assistant" if part.role == "tool" else part.role
        metadata = {
            "create_time": part.created_at,
            "model_name": get_by_path(part.metadata, str, "model_slug"),
        }
        text = _replace_citation_marks_by_sources(part.text, part.metadata)
        message = build_imported_message(
            role,
            text,
            key,
            is_from_tool=bool(part.tool),
            is_document=part.tool.startswith(_CANVAS_PREFIX),
            **metadata,
        )
        common_fields: Any = {"id": key, "response_metadata": message.response_metadata}
        name, parent_id = _INVALID_IN_TOOL_NAME.sub("_", part.tool)[:64], parent_ids[key]
        if key in answered:
            call = {
                "name": name,
                "args": {"input": _extract_main_argument_of_tool_call(part)},
                "id": key,
            }
            message = AIMessage("", tool_calls=[call], **common_fields)
        elif parent_id in answered:
            text = part.plain_text.strip("\n") if part.kind == "execution_output" else text
            message = ToolMessage(text, name=name, tool_call_id=parent_id, **common_fields)
        elif key in calls and part.tool.startswith(_CANVAS_PREFIX):
            message.additional_kwargs["canvas"] = part.plain_text
        messages[key] = [message]
    return messages


@dataclass(slots=True)
class _MessagePart:
    """The validated content of a message in a ChatGPT export.

    Attributes:
        role: "user", "assistant", "system" or "tool".
        tool: The tool that is called or that answers, or "".
        kind: The type of the content, such as "text".
        content: The content.
        metadata: The metadata of the message.
        created_at: The time of the message in seconds since 1970, or None.
        is_hidden: Whether ChatGPT does not show the message.
        text: The text of the message that perdure imports.
        former_text: The text that an earlier version of perdure imported, if that text was shorter.
    """

    role: str
    tool: str
    kind: str
    content: Mapping[str, Any]
    metadata: Mapping[str, Any]
    created_at: float | None
    is_hidden: bool
    text: str = ""
    former_text: str = ""

    def get_first_text(self, *names: str) -> str:
        """Return the first nonblank text in `content` under one of the keys `names`, or ""."""
        texts = (get_by_path(self.content, str, name) for name in names)
        return next((text for text in texts if text.strip()), "")

    @property
    def content_parts(self) -> list[Any]:
        """Return the text, image and audio parts of the content."""
        parts = self.content.get("parts")
        if parts is None:
            return [self.get_first_text("text", "result", "content")]
        if not isinstance(parts, list):
            raise MalformedPart("'parts' is not a list")
        return parts

    @property
    def plain_text(self) -> str:
        """Return all text of the content."""
        return "\n".join(
            replace_surrogates(part)
            for part in self.content_parts
            if isinstance(part, str) and part
        )


def _read_message_part(message: Any) -> _MessagePart:
    """Validate a message of the export, and render its text for the import.

    Raises:
        MalformedPart: The message is malformed, or has an unknown role or kind of content.
    """
    if not isinstance(message, dict):
        raise MalformedPart("the message is not a JSON object")
    role, content = get_by_path(message, dict, "author").get("role"), message.get("content")
    if role not in ("user", "assistant", "system", "tool"):
        raise MalformedPart(f"unknown role {shorten_line(role, 40)!r}")
    if not isinstance(content, dict):
        raise MalformedPart("no content")
    kind = get_by_path(content, str, "content_type") or "text"
    recipient, meta = get_by_path(message, str, "recipient"), get_by_path(message, dict, "metadata")
    tool = recipient if role == "assistant" and recipient != "all" else ""
    if role == "tool":
        tool = get_by_path(message, str, "author", "name") or "tool"
    is_visually_hidden = meta.get("is_visually_hidden_from_conversation") is True
    is_hidden = is_visually_hidden or kind in _HIDDEN_KINDS or message.get("channel") == "analysis"
    part = _MessagePart(
        role, tool, kind, content, meta, parse_timestamp(message.get("create_time")), is_hidden
    )
    if role == "tool" and (report := _find_deep_research_report(part)) is not None:
        return report
    if not is_hidden:
        format_part = (
            _format_tool_result
            if role == "tool"
            else _format_tool_call
            if tool
            else _format_text_part
        )
        part.text = format_part(part)
    return part


# -- the text of a part


def _format_text_part(part: _MessagePart) -> str:
    """Render a user or model message: the names of attached files, then the text."""
    if part.kind not in _TEXT_KINDS:
        raise MalformedPart(f"unknown content {shorten_line(part.kind, 40)!r}")
    if part.kind == "code":
        language, code = part.get_first_text("language"), part.plain_text
        return (
            format_code_block(code, "" if language == "unknown" else language)
            if code.strip()
            else ""
        )
    files = get_by_path(part.metadata, list, "attachments")
    # Leave out the names of attached images, because each image also has a placeholder in the
    # content.
    names = (
        get_by_path(file, str, "name")
        for file in files
        if not get_by_path(file, str, "mime_type").startswith("image/")
    )
    pictures = {get_by_path(file, str, "id"): get_by_path(file, str, "name") for file in files}
    pieces = (_format_content_piece(piece, pictures) for piece in part.content_parts)
    lines = [*(format_placeholder("file", name) for name in names if name), *pieces]
    return "\n".join(line for line in lines if line)


def _format_content_piece(piece: Any, image_names_by_id: Mapping[str, str]) -> str:
    """Return a piece's text, or a placeholder if the piece is a file.

    `image_names_by_id` maps image ids to image names.
    """
    if not isinstance(piece, dict):
        return get_by_path(piece, str)
    kind = str(piece.get("content_type", "attachment"))
    if kind == "image_asset_pointer":
        key = get_by_path(piece, str, "asset_pointer").rpartition("/")[2]
        prompt = get_by_path(piece, str, "metadata", "dalle", "prompt")
        return format_placeholder("image", prompt or image_names_by_id.get(key, ""))
    # Return no text for audio or video, because its transcript is in another piece of the message.
    if _AUDIO_OR_VIDEO.search(kind):
        return ""
    return get_by_path(piece, str, "text") or format_placeholder(kind)


def _format_tool_result(part: _MessagePart) -> str:
    """Render the result of a built-in ChatGPT tool as text.

    The returned text contains the text of the tool result only if the result is code output, a
    quote or an error. The plain strings in a tool result are left out, unless the tool result is
    code output, a quote or an error. Images and files in a tool result are replaced with
    placeholders. Return "" for a tool result without code output, quotes, errors, images or files.
    """
    if part.kind == "execution_output":
        return (
            f"[{part.tool}]\n{format_code_block(part.plain_text)}"
            if part.plain_text.strip()
            else ""
        )
    if part.kind == "tether_quote":
        return format_placeholder(
            "quote",
            ", ".join(
                filter(None, (part.get_first_text("title", "domain"), part.get_first_text("url")))
            ),
        )
    if part.kind == "system_error":
        return format_placeholder("error", part.get_first_text("text", "name"))
    return "\n".join(
        _format_content_piece(piece, {}) for piece in part.content_parts if isinstance(piece, dict)
    )


def _format_tool_call(part: _MessagePart) -> str:
    """Format a tool call as one line of text, as a fenced code block, or as a canvas document."""
    arguments = get_by_path(parse_json_or_none(part.plain_text), dict)
    if part.tool.startswith(_CANVAS_PREFIX):
        return _format_canvas_document_or_comments(part, arguments)
    request = _extract_main_argument_of_tool_call(part)
    if part.tool == "python":
        return f"[python]\n{format_code_block(request, 'python')}" if request.strip() else ""
    # If the main argument of a tool call is a JSON object or list, do not import it, because only
    # the tool knows the format of the argument.
    if request.lstrip()[:1] in "{[":
        return ""
    noun = "memory" if part.tool == "bio" else part.tool
    return format_placeholder(
        "image" if noun.startswith("dalle") or "prompt" in arguments else noun, request
    )


def _format_canvas_document_or_comments(part: _MessagePart, arguments: Mapping[str, Any]) -> str:
    """Return the text of a canvas document, or of the comments on it.

    Also set `part.former_text`.
    """
    is_new = "create" in part.tool
    noun = "canvas" if is_new else "canvas comments" if "comment" in part.tool else "canvas changed"
    part.former_text = format_placeholder(
        "canvas" if is_new else "canvas changed", get_by_path(arguments, str, "name")
    )
    kind = get_by_path(arguments, str, "type").removeprefix("code/")
    changes = [*get_by_path(arguments, list, "updates"), *get_by_path(arguments, list, "comments")]
    texts = [get_by_path(arguments, str, "content") if arguments else part.plain_text]
    texts += [
        get_by_path(change, str, "replacement") or get_by_path(change, str, "comment")
        for change in changes
    ]
    text = "\n\n".join(text for text in texts if text.strip())
    is_code = kind not in ("", "document") and text
    name = format_placeholder(noun, get_by_path(arguments, str, "name"))
    return "\n".join(filter(None, (name, format_code_block(text, kind) if is_code else text)))


def _find_deep_research_report(part: _MessagePart) -> _MessagePart | None:
    """Return the deep-research report from a widget's state, or None if there is none.

    ChatGPT stores a widget's state either in the metadata of a tool message or as the text of a
    hidden message.
    """
    state = get_by_path(part.metadata, dict, "chatgpt_sdk").get("widget_state")
    if state is None and part.kind == "text" and part.plain_text.startswith(_WIDGET_STATE_PREFIX):
        state = part.plain_text.removeprefix(_WIDGET_STATE_PREFIX)
    state = parse_json_or_none(state) if isinstance(state, str) else state
    message = get_by_path(state, dict, "report_message")
    content, meta = get_by_path(message, dict, "content"), get_by_path(message, dict, "metadata")
    created_at = parse_timestamp(message.get("create_time")) or part.created_at
    meta = {**meta, "model_slug": meta.get("model_slug") or part.metadata.get("model_slug")}
    report = _MessagePart("assistant", "", _REPORT_KIND, content, meta, created_at, False)
    if not report.plain_text.strip():
        return None
    report.text = report.plain_text + _list_sources_not_cited_in_report(meta, report.plain_text)
    return report


def _list_sources_not_cited_in_report(report_metadata: Mapping[str, Any], text: str) -> str:
    """Return the list of a report's uncited sources, as text to append to the report."""
    lines: dict[str, None] = {}
    for reference in get_by_path(report_metadata, list, "content_references"):
        matched = get_by_path(reference, str, "matched_text")
        if matched.strip() and matched in text:
            continue
        for source in (
            *get_by_path(reference, list, "items"),
            *get_by_path(reference, list, "sources"),
        ):
            if get_by_path(source, str, "url"):
                title = get_by_path(source, str, "title")
                lines[f"- {', '.join(filter(None, (title, source['url'])))}"] = None
    return "\n".join(["\n\nSources:", *lines]) if lines else ""


def _extract_main_argument_of_tool_call(part: _MessagePart) -> str:
    """Return the main argument of a tool call, such as a search query or an image prompt.

    If no argument of the tool call is named `prompt`, `q`, `query` or `queries`, return the whole
    text of the tool call.
    """
    arguments = get_by_path(parse_json_or_none(part.plain_text), dict)
    # A search tool call may contain several searches, of which only the first is imported.
    first = get_by_path(arguments, list, "search_query")[:1]
    arguments = first[0] if first and isinstance(first[0], dict) else arguments
    request = part.plain_text
    for name in ("prompt", "q", "query", "queries"):
        several = ", ".join(map(str, get_by_path(arguments, list, name)))
        request = replace_surrogates(several) or get_by_path(arguments, str, name) or request
    return request


# -- citations and other markup


def _replace_citation_marks_by_sources(text: str, meta: Mapping[str, Any]) -> str:
    """Replace the citation marks in a text with the titles and URLs of the sources."""
    for source in get_by_path(meta, list, "content_references"):
        matched = get_by_path(source, str, "matched_text")
        if "\ue200" in matched or "【" in matched:
            items = [item for item in get_by_path(source, list, "items") if isinstance(item, dict)]
            alt = get_by_path(source, str, "alt")
            alt = "" if "\ue200" in alt or alt.startswith("![") else alt
            text = text.replace(
                matched, _format_source_title_and_url(items[0] if items else source) or alt
            )
    text = _MARKUP.sub(lambda match: _convert_chatgpt_markup_to_plain_text(match[1] or ""), text)
    cited = {
        str(get_by_path(citation, dict, "metadata", "extra").get("cited_message_idx")): citation
        for citation in get_by_path(meta, list, "citations")
    }
    return _BRACKET.sub(
        lambda match: _format_source_title_and_url(
            get_by_path(cited.get(match[1]), dict, "metadata")
        ),
        text,
    )


def _format_source_title_and_url(source: Any) -> str:
    """Return the title and the URL of a source in parentheses, or "" if it has neither."""
    parts = ", ".join(
        filter(None, (get_by_path(source, str, "title"), get_by_path(source, str, "url")))
    )
    return f" ({parts})" if parts else ""


def _convert_chatgpt_markup_to_plain_text(markup: str) -> str:
    """Convert ChatGPT's markup for an entity or a link to plain text.

    Entity markup is replaced by the entity's name. Link markup is replaced by the link's title and
    URL. Other markup becomes "".
    """
    kind, *rest = markup.split("\ue202")
    if kind == "url":
        return f" {' '.join(rest)}"
    entity = get_by_path(parse_json_or_none(rest[0]), list) if kind == "entity" and rest else []
    name = get_by_path(entity[1], str) if len(entity) > 1 else ""
    return f" {name}" if name else ""
