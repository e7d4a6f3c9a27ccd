"""`make docs` writes docs/reference.md: the signatures and docstrings of perdure's public names."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from perdure import effects

PAGE = Path(__file__).parent / "reference.md"
PACKAGES = ("checkpointers", "stores", "memory", "memory.adapters", "graphs", "errors")
WIDTH = 96
_NOTE = re.compile(r"(?m)^    ([a-z]\w*): [^#\n]+  # (.+)$")
HEAD = """# Reference

The public names of perdure, from their docstrings; `make docs` writes this page.
The guides show how to use them: [threads](threads.md), [the store](store.md),
[short-term memory](memory.md), [long-term memory](long_term.md). `perdure` itself exports
`SQLiteCheckpointer`, `SQLiteStore` and `PerdureError`. Each async form begins with `a`."""


def reference() -> str:
    """Build the reference page."""
    names = [f"perdure.{name}" for name in PACKAGES]
    links = " · ".join(f"[`{name}`](#{name.replace('.', '')})" for name in names)
    return "\n\n".join([HEAD, links, *map(_package, names)]) + "\n"


def _package(name: str) -> str:
    module = importlib.import_module(name)
    head = f"## {name}\n\n{_markdown(module.__doc__)}"
    if name == "perdure.errors":  # its docstring lists them
        return head
    public = getattr(module, "__all__", None) or [name for name in vars(module) if name[0] != "_"]
    values = {name: value for name in public if _ours(value := getattr(module, name))}
    uses = Counter(base for value in values.values() for base in _bases(value)[1:])
    shared = {base for base in uses if uses[base] > 1} - {*values.values()}
    values |= {base.__name__: base for base in shared if any(_methods(base, []))}
    parts = [head.split("\n\n")[0], head.split("\n\n")[1]]
    for name, value in sorted(values.items(), key=lambda pair: (pair[0].lower(), pair[0])):
        if not (name[0] == "a" and name[1:] in values):
            apart = [base for base in _bases(value)[1:] if base in values.values()]
            parts += [f"### `{name}`", *_entry(name, value, apart)]
    return "\n\n".join(filter(None, parts))


def _ours(value: Any) -> bool:
    return callable(value) and str(getattr(value, "__module__", "")).startswith("perdure")


def _bases(value: Any) -> list[Any]:
    """Return a class and its base classes in perdure."""
    return [base for base in getattr(value, "__mro__", ()) if _ours(base)]


def _entry(name: str, value: Any, apart: list[Any]) -> Iterator[str]:
    """Describe a function, or a class with its methods except those of the bases `apart`."""
    bases = _bases(value)
    init = next((i for base in bases if (i := dict(_written(base)).get("__init__"))), None)
    fields = [field for base in reversed(bases) for field in _fields(base)]
    if inspect.isfunction(value) or init is not None:
        yield _signature(name, init or value)
    elif fields:
        yield _fenced(name, fields, "")
    yield _markdown(value.__doc__)
    yield _notes(bases)
    if apart:
        yield f"It also has the methods of {', '.join(f'`{base.__name__}`' for base in apart)}."
    methods = dict(_methods(value, apart))
    for method, function in sorted(methods.items()):
        if not (method[0] == "a" and method[1:] in methods):
            shown = _signature(f"{value.__name__}.{method}", function)
            is_property = isinstance(inspect.getattr_static(value, method), property)
            yield shown.replace("() -> ", ": ") if is_property else shown
            docs = (getattr(vars(base).get(method), "__doc__", None) for base in bases)
            twin = f"\n\nAsync: `a{method}`." if f"a{method}" in methods else ""
            yield _markdown(next(filter(None, docs), "")) + twin


def _methods(cls: Any, apart: list[Any]) -> Iterator[tuple[str, Any]]:
    for base in reversed(_bases(cls)):
        if not any(issubclass(other, base) for other in apart):
            yield from (pair for pair in _written(base) if pair[0][0] != "_")


def _written(cls: Any) -> Iterator[tuple[str, Any]]:
    """Return the functions in the source of a class, except operations.

    Operations are run by `run_operation`.
    """
    for name, value in vars(cls).items():
        made = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if inspect.isfunction(made) and _ours(made) and made.__code__.co_filename[0] != "<":
            is_twin = hasattr(made, "__wrapped__") or name[1:] in vars(cls)
            if is_twin or not inspect.iscoroutinefunction(made):
                yield name, made


def _source(value: Any) -> Any:
    if inspect.isfunction(value) and value.__code__.co_filename == effects.__file__:
        *owners, name = value.__qualname__.split(".")
        owner = reduce(getattr, owners, sys.modules[value.__module__])
        value = vars(owner).get(f"_{name}", value)  # of `get` the operation `_get`
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(value)))).body[0]


def _fields(cls: Any) -> Iterator[str]:
    """Return the fields that a dataclass, named tuple or TypedDict declares."""
    for node in _source(cls).body:
        if isinstance(node, ast.AnnAssign) and not ast.unparse(node.target).startswith("_"):
            default = f" = {ast.unparse(node.value)}" if node.value else ""
            yield f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}{default}"


def _notes(bases: list[Any]) -> str:
    """Return the comments beside the fields of dataclasses."""
    sources = (inspect.getsource(base) for base in reversed(bases) if is_dataclass(base))
    notes = [pair for source in sources for pair in _NOTE.findall(source)]
    listed = "\n".join(f"- `{name}`: {note[0].upper()}{note[1:]}." for name, note in notes)
    return f"**Attributes**\n\n{listed}" if notes else ""


def _signature(name: str, function: Any) -> str:
    node = _source(function)
    arguments, places = node.args, [*node.args.posonlyargs, *node.args.args]
    defaults = [None] * (len(places) - len(arguments.defaults)) + arguments.defaults
    pairs = [*zip(places, defaults, strict=True)]
    pairs += [*zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    shown = [ast.unparse(a) + (f" = {ast.unparse(value)}" if value else "") for a, value in pairs]
    if arguments.vararg or arguments.kwonlyargs:
        star = "*" + (ast.unparse(arguments.vararg) if arguments.vararg else "")
        shown.insert(len(places), star)
    shown += [f"**{ast.unparse(arguments.kwarg)}"] if arguments.kwarg else []
    returned = ast.unparse(node.returns) if node.returns and node.name != "__init__" else ""
    parameters = [parameter for parameter in shown if parameter not in ("self", "cls")]
    return _fenced(name, parameters, f" -> {returned}" if returned else "")


def _fenced(name: str, parameters: list[str], returned: str) -> str:
    line = f"{name}({', '.join(parameters)}){returned}"
    if len(line) > WIDTH:
        line = (
            "\n    ".join([f"{name}(", *(f"{parameter}," for parameter in parameters)])
            + f"\n){returned}"
        )
    return f"```py\n{line}\n```"


def _markdown(docstring: str | None) -> str:
    """Render a docstring with its sections as lists and its examples as blocks."""
    text = inspect.cleandoc(docstring or "")
    text = re.sub(r"(?ms)^>>> .+?(?=\n\n|\Z)", lambda match: f"```pycon\n{match[0]}\n```", text)
    titles = "Args|Attributes|Raises|Returns|Yields"
    head, *sections = re.split(rf"(?m)^(?={titles}:\n)", text)
    for section in sections:
        section = re.sub(rf"^({titles}):\n", r"**\1**\n\n", section)
        section = re.sub(r"(?m)^        ", "  ", section)
        head += re.sub(r"(?m)^    (\*{0,2}[\w.]+): ", r"- `\1`: ", section)
    return head.strip()


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
