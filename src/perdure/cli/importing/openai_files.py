"""Read OpenAI fine-tuning files and batch files.

Each line of a file is converted to an object with a `messages` list, the format that
`JsonLinesReader` reads. A batch has an input file with requests and an output file with responses.
Each response carries the `custom_id` of its request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from perdure.cli.importing.conversation import MalformedPart, Problem, get_by_path, shorten_line

_PREFERENCE_FIELDS: Final = ("preferred_output", "non_preferred_output")
# Names of the request fields that can contain a conversation.
_CONVERSATION_FIELDS: Final = ("messages", "input", "prompt")
# A function that imports one conversation. It is called with the conversation's position in the
# file, such as "3" or "3.1", and the object that contains the `messages` list.
_AddConversation = Callable[[str, Mapping[str, Any]], None]


def convert_fine_tuning_example_to_conversation(
    json_line: Mapping[str, Any],
) -> Mapping[str, Any] | None:
    """Convert a fine-tuning example to an object with a `messages` list.

    Return None if the line is not a training example.

    A preference example has two answers. The answer that the example marks as preferred becomes the
    main branch of the conversation, and the other answer becomes a second branch. An example for a
    completion model has a `prompt` and a `completion`, which become a human message and an AI
    message.

    Raises:
        MalformedPart: The example lacks a part.
    """
    rest = {
        k: v
        for k, v in json_line.items()
        if k not in (*_PREFERENCE_FIELDS, "input", "prompt", "completion")
    }
    if any(name in json_line for name in _PREFERENCE_FIELDS):
        model_input = get_by_path(json_line, dict, "input")
        if not isinstance(model_input.get("messages"), list):
            raise MalformedPart("a preference example has no 'input.messages'")
        preferred, other = (json_line.get(name) for name in _PREFERENCE_FIELDS)
        if not isinstance(preferred, list) or not isinstance(other, list):
            raise MalformedPart(
                f"the fields {' and '.join(map(repr, _PREFERENCE_FIELDS))} of a preference example "
                "must both be lists"
            )
        messages = model_input["messages"]
        branch = {"after": len(messages), "messages": other}
        fields = {**rest, **{k: v for k, v in model_input.items() if k != "messages"}}
        return {**fields, "messages": [*messages, *preferred], "branches": [branch]}
    if {"prompt", "completion"} <= json_line.keys() and "messages" not in json_line:
        prompt, completion = json_line["prompt"], json_line["completion"]
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise MalformedPart(
                "a training example has a 'prompt' or 'completion' that is not a string"
            )
        return {
            **rest,
            "messages": [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": completion},
            ],
        }
    return None


def is_batch_line(line: Mapping[str, Any]) -> bool:
    """Return whether a line is a batch request or a batch response."""
    return "custom_id" in line and ("body" in line or "response" in line)


class OpenAIBatches:
    """Collects batch requests and pairs them with their responses, which may be in other files."""

    def __init__(self) -> None:
        self._requests: dict[str, list[tuple[_AddConversation, str, dict[str, Any]]]] = defaultdict(
            list
        )
        self._responses: list[tuple[str, Mapping[str, Any]]] = []

    def add_request_or_response(
        self,
        file_name: str,
        position_in_file: str,
        line: Mapping[str, Any],
        add_conversation: _AddConversation,
    ) -> None:
        """Collect a batch request or a batch response, to be matched later with its counterpart.

        `import_requests_with_answers` later matches all batch requests with their responses, and
        passes each resulting conversation to `add_conversation`.

        Raises:
            MalformedPart: The line is a request without messages, or a request whose response
                contains no message, such as a request for embeddings.
        """
        if "response" in line:
            self._responses.append((f"{file_name}, {position_in_file}", line))
            return
        body = get_by_path(line, dict, "body")
        if not any(name in body for name in _CONVERSATION_FIELDS):
            raise MalformedPart(
                f"a batch request to {shorten_line(line.get('url'), 40)!r} has no messages"
            )
        if "/embeddings" in str(line.get("url")) or "/moderations" in str(line.get("url")):
            raise MalformedPart(
                f"a batch request to {shorten_line(line['url'], 40)!r} was skipped; only requests "
                "to chat models are imported"
            )
        request: dict[str, Any] = {
            "messages": _convert_openai_request_to_messages(body),
            "branches": [],
            **{name: body[name] for name in ("model", "tools", "functions") if name in body},
        }
        self._requests[str(line["custom_id"])].append((add_conversation, position_in_file, request))

    def import_requests_with_answers(self) -> list[Problem]:
        """Match all responses with their requests, and import the resulting conversations.

        A batch request is imported even if it has no response.

        Returns:
            The problems of responses that could not be matched or converted.
        """
        problems = []
        for position, line in self._responses:
            try:
                self._add_response_to_request(line)
            except MalformedPart as exc:
                problems.append(Problem(str(exc), position))
        for add, number, request in (
            request for group in self._requests.values() for request in group
        ):
            add(number, request)
        return problems

    def _add_response_to_request(self, response_line: Mapping[str, Any]) -> None:
        """Add a response's messages to the conversation of the request with the same `custom_id`.

        If the response contains alternative answers, the first one becomes the main branch, and
        each of the others becomes a separate branch.

        Raises:
            MalformedPart: The batch request failed, the response contains no message, or the
                response does not match exactly one request.
        """
        requests = self._requests.get(str(response_line["custom_id"]), [])
        body, error = (
            get_by_path(response_line, dict, "response", "body"),
            response_line.get("error"),
        )
        failure = error if isinstance(error, dict) else get_by_path(body, dict, "error")
        if failure or not body:
            reason = (
                get_by_path(failure, str, "code")
                or get_by_path(failure, str, "message")
                or "no answer"
            )
            raise MalformedPart(f"a batch request failed: {shorten_line(reason, 80)}")
        if not requests:
            raise MalformedPart(
                "a batch response has no matching request; also pass the batch's input file to the "
                "command"
            )
        if len(requests) > 1:
            raise MalformedPart(
                "a batch response matches several requests, because they have the same 'custom_id'"
            )
        answers = [*_iter_messages_of_each_answer(body)]
        if not answers:
            raise MalformedPart("a batch response contains no messages")
        request, created_at = requests[0][2], body.get("created") or body.get("created_at")
        for answer in answers:
            answer[-1] = {"created_at": created_at, **answer[-1]} if created_at else answer[-1]
        after = len(request["messages"])
        request["branches"] += [{"after": after, "messages": messages} for messages in answers[1:]]
        request["messages"] = [*request["messages"], *answers[0]]


def _convert_openai_request_to_messages(request_body: Mapping[str, Any]) -> list[Any]:
    """Return the messages in an OpenAI request (Chat Completions, Responses or Completions API)."""
    if isinstance(request_body.get("messages"), list):
        return [*request_body["messages"]]
    if isinstance(request_body.get("prompt"), str):
        return [{"role": "user", "content": request_body["prompt"]}]
    instructions, model_input = (
        get_by_path(request_body, str, "instructions"),
        request_body.get("input"),
    )
    first = [{"role": "developer", "content": instructions}] if instructions else []
    if isinstance(model_input, str):
        return [*first, {"role": "user", "content": model_input}]
    if not isinstance(model_input, list):
        raise MalformedPart("a batch request has no messages")
    return [*first, *map(_convert_responses_api_item_to_message, model_input)]


def _iter_messages_of_each_answer(response_body: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Yield each answer in a batch response, as a list of messages.

    A response can contain several alternative answers to the same request.
    """
    for choice in get_by_path(response_body, list, "choices"):
        if isinstance(get_by_path(choice, dict).get("message"), dict):
            yield [choice["message"]]
        elif get_by_path(choice, str, "text"):
            yield [{"role": "assistant", "content": choice["text"]}]
    items = [
        item
        for item in get_by_path(response_body, list, "output")
        if get_by_path(item, str, "type") != "reasoning"
    ]
    if items:
        yield [_convert_responses_api_item_to_message(item) for item in items]


def _convert_responses_api_item_to_message(item: Any) -> dict[str, Any]:
    """Convert a Responses API item to a message.

    If an item's type is unknown, the type is used as the message's role. The importer reports the
    unknown role as a problem.
    """
    kind = get_by_path(item, str, "type")
    if kind == "function_call":
        function = {
            "name": get_by_path(item, str, "name"),
            "arguments": get_by_path(item, str, "arguments"),
        }
        call = {"id": get_by_path(item, str, "call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        return {
            "role": "tool",
            "tool_call_id": get_by_path(item, str, "call_id"),
            "content": str(item.get("output")),
        }
    if isinstance(item, dict) and "role" in item:
        return {k: v for k, v in item.items() if k not in ("type", "status")}
    return {"role": kind or "unknown item", "content": ""}
