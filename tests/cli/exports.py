"""Made-up exports in the formats of ChatGPT (2023 to 2026), Claude and other programs."""

from __future__ import annotations

import io
import json
import random
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

START = 1_700_000_000.0
CITE = "\ue200cite\ue202turn0search0\ue202turn0search3\ue201"
WORDS = (  # noqa: SIM905
    "garden bread violin ferry winter paper window river salt copper market lantern piano coffee "
    "harbour ladder meadow needle orchard pepper quilt ribbon saddle timber umbrella velvet wagon"
).split()


class ChatGPTConversation:
    """Builder of a conversation of ChatGPT's export; each message follows the previous one."""

    def __init__(self, id: str, at: float = START, **about: Any) -> None:
        root: dict[str, Any] = {"id": "client-created-root", "message": None, "parent": None}
        self.mapping: dict[str, Any] = {"client-created-root": {**root, "children": []}}
        self.last_key, self.at, self.id, self.about = "client-created-root", at, id, about

    def add_message(self, role: str, content: Any, after: str | None = None, **fields: Any) -> str:
        """Add a message and return its key; a `str` is content of the kind text."""
        if isinstance(content, str):
            content = {"content_type": "text", "parts": [content]}
        key, parent = f"{self.id}-{len(self.mapping)}", after or self.last_key
        self.at += 20
        author = {"role": role, "name": fields.pop("name", None), "metadata": {}}
        message = {
            **{"id": key, "author": author, "create_time": self.at, "update_time": None},
            **{"content": content, "status": "finished_successfully", "end_turn": True},
            **{"weight": 1.0, "metadata": {}, "recipient": "all", "channel": None, **fields},
        }
        self.mapping[parent]["children"].append(key)
        self.mapping[key] = {"id": key, "message": message, "parent": parent, "children": []}
        self.last_key = key
        return key

    def add_turn(self, question: str, answer: str, **fields: Any) -> None:
        """Add a question and its answer."""
        self.add_message("user", question)
        self.add_message("assistant", answer, metadata={"model_slug": "gpt-4o", **fields})

    def add_tool_call(self, tool: str, call: str, result: Any, **fields: Any) -> None:
        """Add a call of one of ChatGPT's tools and its result."""
        language = "python" if tool == "python" else "json"
        code = {"content_type": "code", "language": language, "text": call}
        self.add_message("assistant", code, recipient=tool, metadata={"model_slug": "gpt-4o"})
        self.add_message("tool", result, name=tool, metadata=fields)

    @property
    def json(self) -> dict[str, Any]:
        """Return the conversation as it is in conversations.json."""
        return {
            **{"title": f"About {self.id}", "create_time": START, "update_time": self.at},
            **{"mapping": self.mapping, "moderation_results": [], "current_node": self.last_key},
            **{"plugin_ids": None, "conversation_id": self.id, "gizmo_id": None, "id": self.id},
            **{"is_archived": False, "safe_urls": [], "default_model_slug": "gpt-4o"},
            **self.about,
        }


def build_tool_conversation() -> ChatGPTConversation:
    """Build a conversation with tool calls, files, thoughts and other special parts."""
    talk = ChatGPTConversation("tools", gizmo_id="g-trip", title="A trip to Ghent")
    hidden = {"is_visually_hidden_from_conversation": True}
    talk.add_message("system", "", metadata=hidden)
    context = {
        "content_type": "user_editable_context",
        "user_profile": "x",
        "user_instructions": "",
    }
    talk.add_message("user", context, metadata={**hidden, "is_user_system_message": True})
    known = {"content_type": "model_editable_context", "model_set_context": "1. Likes figs"}
    talk.add_message("assistant", known)
    picture = {"content_type": "image_asset_pointer", "asset_pointer": "file-service://file-a"}
    parts = [{**picture, "width": 8}, "Plan my trip to Ghent, I am allergic to nuts"]
    image = {"id": "file-a", "name": "g.png", "mime_type": "image/png"}
    files = [{"name": "dates.pdf", "mime_type": "application/pdf"}, image]
    talk.add_message(
        "user", {"content_type": "multimodal_text", "parts": parts}, metadata={"attachments": files}
    )
    thought = {"summary": "Weighing", "content": "The user…", "chunks": [], "finished": True}
    talk.add_message("assistant", {"content_type": "thoughts", "thoughts": [thought]})
    talk.add_message("assistant", {"content_type": "reasoning_recap", "content": "Thought for 8s"})
    talk.add_tool_call("bio", "User is allergic to nuts.", "Model set context updated.")
    browsed = {"content_type": "tether_browsing_display", "result": "L0: Ghent", "summary": ""}
    talk.add_tool_call("web", '{"search_query":[{"q":"ghent ferry times"}]}', browsed)
    talk.add_message("assistant", '{"open":[{"ref_id":"turn0search1"}]}', recipient="web.run")
    quote = {"content_type": "tether_quote", "url": "https://a.example", "title": "Ferries"}
    talk.add_message(
        "tool", {**quote, "text": "A long quote", "domain": "a.example"}, name="browser"
    )
    source = {"title": "Ferries of Ghent", "url": "https://ferry.example/ghent"}
    reference = {"matched_text": CITE, "type": "grouped_webpages", "items": [source], "alt": "x"}
    named = '\ue200entity\ue202["city","Ghent","in Belgium"]\ue201'
    talk.add_message(
        "assistant",
        f"The ferry to {named} leaves at nine.{CITE} It is slow.\ue200video\ue202turn0\ue201",
        metadata={"content_references": [reference], "model_slug": "gpt-5-thinking"},
    )
    canvas = {"name": "Packing list", "type": "document", "content": "# Bring\n\n- a coat"}
    talk.add_tool_call(
        "canmore.create_textdoc", json.dumps(canvas), "Successfully created text document"
    )
    change = {"updates": [{"pattern": ".*", "multiple": False, "replacement": "- two coats"}]}
    talk.add_tool_call(
        "canmore.update_textdoc", json.dumps(change), "Successfully updated text document"
    )
    made = {**picture, "metadata": {"dalle": {"prompt": "A ferry at dawn", "gen_id": "1"}}}
    talk.add_tool_call(
        "dalle.text2im",
        '{"size":"1024x1024","prompt":"A ferry at dawn, in oils"}',
        {"content_type": "multimodal_text", "parts": [made]},
    )
    code = "for day in range(2):\n    if day:\n        print(day)"
    talk.add_tool_call("python", code, {"content_type": "execution_output", "text": "1\n"})
    talk.add_message(
        "tool", {"content_type": "system_error", "name": "Timeout", "text": "it took long"}
    )
    heard = {"content_type": "audio_transcription", "text": "Thank you", "direction": "in"}
    sound = {"content_type": "real_time_user_audio_video_asset_pointer", "frames": []}
    talk.add_message("user", {"content_type": "multimodal_text", "parts": [heard, sound]})
    cited = {"extra": {"cited_message_idx": 12}, "title": "Nuts", "url": "https://nuts.example"}
    talk.add_message(
        "assistant",
        "Walnuts are in it【12†source】, so mind【7:3†x.pdf】:\n\n"
        "```python\ndef f():\n    return 1\n```",
        metadata={"citations": [{"start_ix": 0, "end_ix": 5, "metadata": cited}]},
    )
    return talk


def add_deep_research(
    talk: ChatGPTConversation, report: str, *, in_text: bool = False, done: bool = True
) -> None:
    """Add the turn of a deep research of 2026, whose report is only in the state of a widget."""
    source = {"title": "Ferries of Ghent", "url": "https://ferry.example/ghent"}
    other = {"title": "Tides", "url": "https://tides.example"}
    references = [
        {"matched_text": CITE, "type": "grouped_webpages", "items": [source]},
        {"matched_text": " ", "type": "sources_footnote", "sources": [source, other]},
    ]
    message = {
        **{"id": "report", "author": {"role": "assistant"}, "create_time": talk.at + 600},
        **{"content": {"content_type": "text", "parts": [report]}, "status": "finished"},
        "metadata": {"content_references": references, "model_slug": "gpt-5-research"},
    }
    state: dict[str, Any] = {
        "status": "completed",
        "plan": {"title": "Ferries"},
        "report_message": message,
    }
    state |= {} if done else {"status": "in_progress", "report_message": None}
    hidden = {"is_visually_hidden_from_conversation": True}
    talk.add_message("user", "Research the ferries")
    talk.add_message(
        "assistant", '{"path": "/Deep Research App/start"}', recipient="api_tool.call_tool"
    )
    sdk = {"widget_state": json.dumps(state), "resource_name": "Deep Research App_start"}
    talk.add_message(
        "tool", {"content_type": "code", "text": ""}, metadata={**hidden, "chatgpt_sdk": sdk}
    )
    if in_text:
        text = f"The latest state of the widget is: {json.dumps(state)}"
        talk.add_message("tool", text, name="api_tool.widget_state", metadata=hidden)


def build_claude_conversation(id: str = "pond", **about: Any) -> dict[str, Any]:
    """Build a conversation of Claude's export."""
    artifact = {"command": "create", "title": "Pond plan", "content": "<svg/>", "id": "plan"}
    searched = {"type": "tool_use", "name": "web_search", "input": {"query": "pond depth"}}
    messages: list[dict[str, Any]] = [
        {
            **{"sender": "human", "text": "How deep is this pond?"},
            "content": [{"type": "text", "text": "How deep is this pond?"}],
            "attachments": [
                {"file_name": "pond.txt", "file_type": "txt", "extracted_content": "2 m\n3 m"},
                {"file_name": "", "extracted_content": "pasted: it has carps"},
            ],
            "files": [{"file_name": "pond.png"}],
        },
        {
            **{"sender": "assistant", "text": ""},
            "content": [
                {"type": "thinking", "thinking": "The user asks"},
                {"type": "text", "text": "Let me look."},
                searched,
                {"type": "tool_result", "name": "web_search", "content": []},
                {"type": "text", "text": "Three metres."},
                {"type": "tool_use", "name": "artifacts", "input": artifact},
            ],
        },
        {"sender": "human", "text": "Thank you for that", "content": []},
    ]
    for number, message in enumerate(messages):
        message["uuid"] = f"{id}-{number}"
        message["created_at"] = f"2024-05-01T10:0{number}:00.123456Z"
        message["parent_message_uuid"] = (
            f"{id}-{number - 1}" if number else "00000000-0000-4000-8000-000000000000"
        )
    return {
        **{"uuid": id, "name": "The pond", "summary": "", "chat_messages": messages},
        **{"created_at": "2024-05-01T10:00:00Z", "updated_at": "2024-05-01T10:09:00Z"},
        **about,
    }


def build_claude_files() -> dict[str, Any]:
    """Build the files of Claude's export of 2026, with documents, memories and a project."""
    plan = {"command": "create", "id": "plan", "title": "Plan", "type": "text/markdown"}
    calls: list[tuple[str, Any]] = [
        ("artifacts", {**plan, "content": "# Heron\n\nlines of a heron"}),
        ("artifacts", {"command": "update", "id": "plan", "old_str": "x", "new_str": "an egret"}),
        ("artifacts", {"command": "rewrite", "id": "plan", "content": "only a bittern"}),
        ("create_file", {"path": "/mnt/a.py", "file_text": "print('osprey')", "description": "A"}),
        ("str_replace", {"path": "/mnt/a.md", "old_str": "x", "new_str": "one plover"}),
        ("repl", {"code": "const kestrel = 1"}),
        ("bash_tool", {"command": "ls /dunlin", "description": "List files"}),
        ("web_search", {"query": "pond depth"}),
        ("broken_off", '{"code": "a redshank'),
        ("message_compose", {"subject": "Birds", "body": "Dear avocet", "variants": [{"x": 1}]}),
    ]
    blocks: list[dict[str, Any]] = [{"type": "text", "text": "Here you are.", "citations": []}]
    for name, arguments in calls:
        blocks += [
            {"type": "tool_use", "id": "toolu_1", "name": name, "input": arguments},
            {"type": "tool_result", "name": name, "content": [{"type": "text", "text": "OK"}]},
        ]
    pasted = {"file_name": "paste.txt", "file_type": "txt", "extracted_content": "my own curlew"}
    notes = {"file_name": "notes.pdf", "file_type": "pdf", "extracted_content": "a printed godwit"}
    question = {
        **{"uuid": "q", "sender": "human", "text": "Look", "attachments": [notes, pasted]},
        **{"content": [{"type": "text", "text": "Look"}], "files": [{"file_name": "notes.pdf"}]},
        **{"created_at": "2026-05-01T10:00:00Z"},
    }
    answer = {"uuid": "a", "sender": "assistant", "content": blocks, "parent_message_uuid": "q"}
    design = {"role": "assistant", "content": "A page of terns", "contentBlocks": [
        {"type": "tool_call", "toolCall": {"name": "write_file", "input": {"content": "<tern/>"}}}
    ]}  # fmt: skip
    document = {"uuid": "doc", "filename": "birds.md", "content": "# All birds\n\nwhimbrel"}
    project = {"uuid": "proj", "name": "Birds", "prompt_template": "Be brief", "docs": [document]}
    memory = "**Work context**\n\nAnn counts sandpipers.\n\n**Personal**\n\nShe lives in Ghent."
    return {
        "conversations.json": [{"uuid": "birds", "name": "B", "chat_messages": [question, answer]}],
        "memories.json": [{"conversations_memory": memory, "project_memories": {"proj": "Curt"}}],
        "projects/proj.json": {**project, "is_private": True, "description": ""},
        "design_chats/d.json": {"uuid": "d", "title": "Chat", "project": {"name": "Page"},
            "messages": [{"uuid": "d1", "role": "assistant", "content": design}]},
        "users.json": [{"uuid": "u", "full_name": "Ann"}],
    }  # fmt: skip


def build_open_webui_chat(id: str = "webui") -> dict[str, Any]:
    """Build a chat of Open WebUI's export, in which an answer was regenerated."""
    thought = '<details type="reasoning" done="true">\n<summary>Thought</summary>\nx\n</details>\n'
    rows: list[tuple[str, str | None, str, str, dict[str, Any]]] = [
        ("u1", None, "user", "Which boat?", {"files": [{"type": "file", "name": "boat.pdf"}]}),
        ("a1", "u1", "assistant", "The red one.", {"model": "llama3"}),
        ("a2", "u1", "assistant", f"{thought}The blue one.", {"model": "llama3", "done": True}),
        ("u2", "a2", "user", "Thank you", {}),
    ]
    messages = {
        key: {**{"id": key, "parentId": above, "childrenIds": [], "role": role, "content": text},
              **{"timestamp": int(START) + 10 * n}, **more}
        for n, (key, above, role, text, more) in enumerate(rows)
    }  # fmt: skip
    chat = {
        **{"id": "", "title": "Boats", "models": ["llama3"], "timestamp": int(START) * 1000},
        **{"history": {"messages": messages, "currentId": "u2"}, "tags": [], "params": {}},
        "messages": [{"id": key, **messages[key]} for key in ("u1", "a2", "u2")],
    }
    return {
        **{"id": id, "user_id": "00-11", "title": "Boats", "chat": chat, "archived": False},
        **{"created_at": int(START), "updated_at": int(START) + 90, "share_id": None, "meta": {}},
    }


def build_librechat_conversation(*, nested: bool = True) -> dict[str, Any]:
    """Build a conversation of LibreChat's export, in which an answer was regenerated."""
    root = "00000000-0000-0000-0000-000000000000"
    blocks = [{"type": "think", "think": "x"}, {"type": "text", "text": {"value": "The blue one."}}]
    rows: list[tuple[str, str, bool, dict[str, Any]]] = [
        ("u1", root, True, {"text": "Which boat?"}),
        ("a1", "u1", False, {"text": "The red one.", "model": "gpt-4o"}),
        ("a2", "u1", False, {"text": "", "content": blocks}),
        ("u2", "a2", True, {"text": "Thank you"}),
    ]
    flat = [
        {**{"messageId": key, "parentMessageId": above, "isCreatedByUser": is_user, **more},
         **{"conversationId": "libre", "sender": "User" if is_user else "GPT-4o"},
         **{"createdAt": f"2024-05-01T10:0{n}:00.000Z"}}
        for n, (key, above, is_user, more) in enumerate(rows)
    ]  # fmt: skip
    if nested:
        flat[2]["children"], flat[0]["children"] = [flat[3]], flat[1:3]
        flat = flat[:1]
    return {
        **{"conversationId": "libre", "endpoint": "openAI", "title": "Boats", "branches": True},
        **{"recursive": nested, "exportAt": "10:09", "options": {}, "messages": flat},
    }


def build_claude_code_session() -> list[dict[str, Any]]:
    """Build a session of Claude Code with an edited question and lines of a subagent."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls boats"}}
    edit = {"file_path": "/b.md", "old_string": "x", "new_string": "a yacht"}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "red blue"}
    rows: list[tuple[str, str | None, str, Any, dict[str, Any]]] = [
        ("c0", None, "user", "<command-name>/clear</command-name>", {}),
        ("c1", "c0", "user", "Which boat?", {}),
        ("c2", "c1", "assistant", [{"type": "thinking", "thinking": "x", "signature": "y"}], {}),
        ("c3", "c2", "assistant", [{"type": "text", "text": "Let me look."}], {}),
        ("c4", "c3", "assistant", [call], {}),
        ("c5", "c4", "user", [result], {"toolUseResult": {"stdout": "red blue"}}),
        ("s1", None, "user", "Search for boats", {"isSidechain": True}),
        ("c6", "c5", "assistant", [{"type": "text", "text": "The red one."}], {}),
        ("c7", "c5", "assistant", [{"type": "text", "text": "The blue one."}], {}),
        ("c8", "c7", "assistant", [{**call, "name": "Edit", "input": edit}], {}),
        ("c9", "c8", "user", [{"type": "text", "text": "Thank you"}], {}),
    ]
    lines: list[dict[str, Any]] = [{"type": "summary", "summary": "Boats", "leafUuid": "c9"}]
    for number, (key, above, kind, content, more) in enumerate(rows):
        message: dict[str, Any] = {"role": kind, "content": content}
        if kind == "assistant":
            message |= {"id": "msg_1", "type": "message", "model": "claude-opus-4-6", "usage": {}}
        lines.append({
            **{"parentUuid": above, "isSidechain": False, "userType": "external", "cwd": "/b"},
            **{"sessionId": "code", "version": "2.1.71", "gitBranch": "main", "type": kind},
            **{"message": message, "uuid": key, "timestamp": f"2026-03-09T08:{number:02}:00.145Z"},
            **more,
        })  # fmt: skip
    snapshot = {"type": "file-history-snapshot", "messageId": "c1", "snapshot": {}}
    return [*lines[:3], {**snapshot, "sessionId": "code"}, *lines[3:]]


def build_codex_session(*, old: bool = False) -> list[dict[str, Any]]:
    """Build a session of Codex, or with `old` one from before September 2025."""

    def build_message(role: str, text: str) -> dict[str, Any]:
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    shell = json.dumps({"command": ["bash", "-lc", "ls boats"]})
    patch = {
        "type": "custom_tool_call",
        "name": "apply_patch",
        "call_id": "2",
        "input": "+ a yacht",
    }
    items = [
        build_message("user", "<environment_context>\n<cwd>/b</cwd>"),
        build_message("user", "Which boat?"),
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "function_call", "name": "shell", "arguments": shell, "call_id": "1"},
        {"type": "function_call_output", "call_id": "1", "output": "red blue"},
        build_message("assistant", "The blue one."),
        patch,
    ]
    meta = {"id": "codex", "timestamp": "2026-03-09T08:00:00.145Z", "instructions": None}
    if old:
        return [meta, {"record_type": "state"}, *items]
    at = {"timestamp": "2026-03-09T08:00:00.145Z"}
    lines: list[dict[str, Any]] = [{**at, "type": "session_meta", "payload": {**meta, "cwd": "/b"}}]
    lines.append({**at, "type": "turn_context", "payload": {"cwd": "/b", "model": "gpt-5-codex"}})
    for item in items:
        lines.append({**at, "type": "response_item", "payload": item})
    event = {"type": "agent_message", "message": "The blue one."}
    return [*lines, {**at, "type": "event_msg", "payload": event}]


def build_thread_state(count: int, thread: str = "lg", day: int = 1) -> dict[str, Any]:
    """Build the state of a thread after `count` messages, in the form of LangGraph's server."""
    call = {"name": "depth", "args": {"m": 1}, "id": "call-1", "type": "tool_call"}
    plain: dict[str, Any] = {"additional_kwargs": {}, "response_metadata": {}, "name": None}
    messages = [
        {**plain, "type": "human", "content": "How deep is it?", "id": "h1", "example": False},
        {**plain, "type": "ai", "content": "", "id": "a1", "tool_calls": [call], "example": False},
        {**plain, "type": "tool", "content": "2 m", "id": "t1", "tool_call_id": "call-1"},
        {**plain, "type": "ai", "content": "Two metres.", "id": "a2", "tool_calls": []},
    ]
    place = {"thread_id": thread, "checkpoint_ns": "", "checkpoint_id": f"1f0-{day}"}
    return {
        **{"values": {"messages": messages[:count]}, "next": [], "tasks": [], "interrupts": []},
        **{"metadata": {"user_id": "ann", "step": count}, "checkpoint": place},
        **{"created_at": f"2024-05-0{day}T10:00:00.123456+00:00", "parent_checkpoint": None},
    }


def build_random_conversations(
    conversations: int = 300, messages: int = 7000, seed: int = 1
) -> list[dict[str, Any]]:
    """Build conversations of different lengths, with code, tools and regenerated answers."""
    chance = random.Random(seed)
    weights = [chance.lognormvariate(0, 1) for _ in range(conversations)]
    built = []

    def text(low: int, high: int) -> str:
        words = [chance.choice(WORDS) for _ in range(chance.randint(low, high))]
        return f"{' '.join(words)} {chance.randint(0, 10**6)}."

    for number, weight in enumerate(weights):
        talk = ChatGPTConversation(f"talk-{number:04}", START + number * 86_400)
        turns = max(1, round(messages * weight / sum(weights) / 2.3))
        for turn in range(turns):
            answer = text(30, 200)
            if turn % 7 == 3:
                answer += f"\n\n```python\nfor x in {turn}:\n    print(x)\n```"
            talk.add_turn(text(8, 40), answer)
            if turn % 11 == 5:
                talk.add_tool_call(
                    "python", f"print({turn})", {"content_type": "execution_output", "text": "1"}
                )
            if turn % 13 == 7:
                parent = talk.mapping[talk.last_key]["parent"]
                talk.add_message("assistant", text(30, 200), after=parent)
        built.append(talk.json)
    return built


def write_json(path: Path, value: Any) -> Path:
    """Write a JSON file and return its path."""
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
    return path


def write_jsonl(path: Path, values: list[dict[str, Any]]) -> Path:
    """Write a JSONL file and return its path."""
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def build_zip(files: Mapping[str, Any]) -> bytes:
    """Return the bytes of a ZIP with JSON files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, value in files.items():
            data = value if isinstance(value, str | bytes) else json.dumps(value)
            archive.writestr(name, data)
    return buffer.getvalue()
