"""`perdure import` of OpenAI's files for fine-tuning and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perdure.checkpointers import SQLiteCheckpointer
from tests.cli.commands import invoke, run_json
from tests.cli.exports import (
    START,
    write_jsonl,
)
from tests.cli.imported import (
    USER,
    import_and_count,
    read_all_thread_texts,
)


def build_request(name: str, **body: Any) -> dict[str, Any]:
    """Build a line of the input file of a batch."""
    url = f"/v1/{body.pop('to', 'chat/completions')}"
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "gpt-4o", **body}}


def build_response(name: str, body: Any, **fields: Any) -> dict[str, Any]:
    """Build a line of the output file of a batch."""
    response = {"status_code": 200, "request_id": "r", "body": body}
    return {"id": "batch_req_1", "custom_id": name, "response": response, "error": None, **fields}


def test_training_examples_of_every_kind_are_imported(tmp_path: Path) -> None:
    """A preference is a branch, and a completion two messages; tools and gradings are counted."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    ask = [{"role": "user", "content": "How deep is it?"}]
    two, three = ([{"role": "assistant", "content": f"{n} metres"}] for n in ("Two", "Three"))
    weighed = [{**USER, "content": "Hi"}, {"role": "assistant", "content": "Ho", "weight": 0}]
    examples: list[dict[str, Any]] = [
        {"input": {"messages": ask, "tools": [tool]},
         "preferred_output": two, "non_preferred_output": three},
        {"prompt": "Water is", "completion": " wet"},
        {"messages": weighed, "tools": [tool], "parallel_tool_calls": True},
        {"messages": [{**USER, "content": "Name a boat"}], "reference_answer": {"name": "ferry"}},
        {"input": {}, "preferred_output": two, "non_preferred_output": three},
        {"prompt": ["a"], "completion": "b"},
    ]  # fmt: skip
    report = run_json("import", str(write_jsonl(tmp_path / "t.jsonl", examples)))

    assert (report["conversations"], report["messages"]) == (4, 8)
    assert report["left_out"] == {"tools": 2, "parallel_tool_calls": 1, "reference_answer": 1}
    assert [entry["reason"] for entry in report["skipped"]] == [
        "a preference example has no 'input.messages'",
        "a training example has a 'prompt' or 'completion' that is not a string",
    ]
    assert read_all_thread_texts() == [
        *(["human: Hi", "ai: Ho"], ["human: How deep is it?", "ai: Two metres"]),
        *(["human: Name a boat"], ["human: Water is", "ai:  wet"]),
    ]
    assert import_and_count(tmp_path / "t.jsonl") == (4, 0, 4)
    with SQLiteCheckpointer.open("x.db") as saver:
        items = [i for head in saver.heads() for i in saver.history(head.thread_id)]
    assert [i.value.text for i in items if i.branch] == ["Three metres"]
    assert [i.value.additional_kwargs for i in items if i.value.text == "Ho"] == [{"weight": 0}]


def test_batch_requests_are_imported_with_their_responses(tmp_path: Path) -> None:
    """Failed requests, and those without a conversation, are named."""
    ask = {"role": "user", "content": [{"type": "input_text", "text": "How deep?"}]}
    call = {"type": "function_call", "call_id": "c", "name": "depth", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "2 m"}
    requests = [
        build_request("1", messages=[{**USER, "content": "Hi"}], tools=[{"type": "function"}]),
        build_request("2", to="responses", instructions="Be brief", input=[ask, call, result]),
        build_request("3", to="responses", input="Who?"),
        build_request("4", to="completions", prompt="Water is"),
        build_request("5", to="embeddings", input="some text"),
        build_request("6", messages=[{**USER, "content": "Fail"}]),
    ]
    answer = {"role": "assistant", "content": "Ho", "refusal": None}
    output = {
        "type": "message",
        "role": "assistant",
        "id": "m",
        "status": "completed",
        "content": [{"type": "output_text", "text": "2 metres", "annotations": []}],
    }
    choices = [
        {"index": n, "message": {**answer, "content": t}} for n, t in enumerate(("Ho", "Hey"))
    ]
    answers = [
        build_response(
            "1", {"object": "chat.completion", "created": int(START), "choices": choices}),
        build_response("2", {"object": "response", "created_at": START, "output": [
            {"type": "reasoning", "summary": []}, output]}),
        build_response("4", {"choices": [{"index": 0, "text": " wet"}]}),
        build_response(
            "6", None, response=None, error={"code": "batch_expired", "message": "late"}),
        build_response("7", {"choices": choices}),
    ]  # fmt: skip
    input_file, output_file = (
        write_jsonl(tmp_path / "in.jsonl", requests),
        write_jsonl(tmp_path / "out.jsonl", answers),
    )
    first = import_and_count(input_file)
    report = run_json("import", str(output_file), str(input_file))
    alone = invoke("import", str(output_file), "--db", "alone.db")

    assert first == (5, 8, 0)
    assert (report["messages"], report["unchanged"]) == (4, 2)
    assert report["left_out"] == {"tools": 1}
    assert sorted(entry["reason"] for entry in report["skipped"]) == [
        "a batch request failed: batch_expired",
        "a batch request to '/v1/embeddings' was skipped; only requests to chat models are "
        "imported",
        "a batch response has no matching request; also pass the batch's input file to the command",
    ]
    assert read_all_thread_texts() == [
        *(["human: Fail"], ["human: Hi", "ai: Ho"], ["human: Water is", "ai:  wet"]),
        ["human: Who?"],
        ["system: Be brief", "human: How deep?", "ai: ", "tool: 2 m", "ai: 2 metres"],
    ]
    assert import_and_count(output_file, input_file) == (5, 0, 5)
    assert alone.exit_code == 1
    assert "also pass the batch's input file" in alone.stderr
