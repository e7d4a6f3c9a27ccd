"""Writes docs/reference.md, the signatures and docstrings of perdure's public names.

python docs/reference.py
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "reference.md"
PACKAGES = ("checkpointers", "stores", "memory", "memory.adapters", "graphs", "errors")
WIDTH = 96
HEAD = """# Reference

The public names of perdure, from their docstrings; `python docs/reference.py` writes this page.
The guides show how to use them: [threads](threads.md), [the store](store.md),
[short-term memory](memory.md), [long-term memory](long_term.md). `perdure` itself exports
`SQLiteCheckpointer`, `SQLiteStore` and `PerdureError`. Each async form begins with `a`.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(reference(), encoding="utf-8")


def reference() -> str:
    """The page."""
    names = [f"perdure.{name}" for name in PACKAGES]
    links = " · ".join(f"[`{name}`](#{name.replace('.', '')})" for name in names)
    return "\n\n".join([HEAD, links, *map(_package, names)]).replace("\n\n\n", "\n\n") + "\n"


def _package(name: str) -> str:
    module = importlib.import_module(name)
    text = _markdown(module.__doc__)
    if name == "perdure.errors":  # its docstring lists them
        return f"## {name}\n\n{text}"
    public = getattr(module, "__all__", None) or [each for each in vars(module) if each[0] != "_"]
    found = {each: getattr(module, each) for each in public if _ours(getattr(module, each))}
    counted = Counter(base for each in found.values() for base in _bases(each)[1:])
    shared = {base for base, uses in counted.items() if uses > 1 and base not in found.values()}
    found |= {base.__name__: base for base in shared if any(_methods(base, ()))}
    parts = [f"## {name}", text.split("\n\n")[0]]
    for each, value in sorted(found.items(), key=lambda pair: (pair[0].lower(), pair[0])):
        if each[0] == "a" and each[1:] in found:
            continue
        apart = {other.__name__: other for other in found.values() if other in _bases(value)[1:]}
        parts += [f"### `{each}`"]
        parts += _class(each, value, apart) if inspect.isclass(value) else _function(each, value)
    return "\n\n".join(part for part in parts if part)


def _ours(value: Any) -> bool:
    return callable(value) and str(getattr(value, "__module__", "")).startswith("perdure")


def _bases(value: Any) -> list[type]:
    """A class and its bases in perdure."""
    return [base for base in getattr(value, "__mro__", ()) if _ours(base)]


def _function(name: str, value: Any) -> Iterator[str]:
    yield _signature(name, _source(value))
    yield _markdown(value.__doc__)


def _class(name: str, cls: type, apart: dict[str, type]) -> Iterator[str]:
    bases = _bases(cls)
    init = next((vars(base)["__init__"] for base in bases if _written(base, "__init__")), None)
    if init is not None:
        yield _signature(name, _source(init))
    elif fields := [field for base in reversed(bases) for field in _fields(base)]:
        yield _fenced(name, fields, "")
    yield _markdown(cls.__doc__)
    if apart:
        others = ", ".join(f"`{each}`" for each in apart)
        yield f"It also has the methods of {others}."
    methods = dict(_methods(cls, tuple(apart.values())))
    for method, value in sorted(methods.items()):
        if not (method[0] == "a" and method[1:] in methods):
            yield from _method(cls, method, value, f"a{method}" in methods)


def _methods(cls: type, apart: tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    """The public methods of a class and of its bases, but for those that are shown apart."""
    for base in reversed(_bases(cls)):
        if not any(issubclass(other, base) for other in apart):
            for name, value in vars(base).items():
                if name[0] != "_" and _written(base, name):
                    yield name, value


def _method(cls: type, name: str, value: Any, awaited: bool) -> Iterator[str]:
    function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    node = _source(function)
    if isinstance(value, property):
        yield f"```py\n{cls.__name__}.{name}: {ast.unparse(node.returns)}\n```"
    else:
        yield _signature(name, node, cls.__name__)
    docs = (getattr(vars(base).get(name), "__doc__", None) for base in _bases(cls))
    text = _markdown(next(filter(None, docs), ""))
    yield f"{text} Async: `a{name}`." if awaited and "\n" not in text else text
    if awaited and "\n" in text:
        yield f"Async: `a{name}`."


def _written(cls: type, name: str) -> bool:
    """Whether a class has a public method, or property, of that name in its source."""
    value = vars(cls).get(name)
    function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    if code is None or code.co_filename[0] == "<" or not _ours(function):
        return False
    internal = str(getattr(function, "__annotations__", {}).get("return", "")).startswith("Effects")
    return not internal or hasattr(function, "__wrapped__")  # `blocking` wraps public methods


def _source(value: Any) -> Any:
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(value)))).body[0]


def _fields(cls: type) -> Iterator[str]:
    """The fields that a data class, named tuple or TypedDict declares."""
    for node in _source(cls).body:
        if isinstance(node, ast.AnnAssign) and (name := ast.unparse(node.target))[0] != "_":
            default = f" = {ast.unparse(node.value)}" if node.value else ""
            yield f"{name}: {ast.unparse(node.annotation)}{default}"


def _signature(name: str, node: Any, owner: str = "") -> str:
    given = node.args
    places = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(places) - len(given.defaults)) + given.defaults
    shown = [_parameter(*pair) for pair in zip(places, defaults, strict=True)]
    if given.vararg or given.kwonlyargs:
        shown.append("*" + (_parameter(given.vararg) if given.vararg else ""))
    shown += [_parameter(*pair) for pair in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    shown += [f"**{_parameter(given.kwarg)}"] if given.kwarg else []
    shown = [each for each in shown if each not in ("self", "cls")]
    returned = ast.unparse(node.returns) if node.returns and node.name != "__init__" else ""
    returned = re.sub(r"^Effects\[(.*)\]$", r"\1", returned)
    name = f"{owner}.{name}" if owner else name
    return _fenced(name, shown, f" -> {returned}" if returned else "")


def _parameter(arg: ast.arg, default: ast.expr | None = None) -> str:
    name = f"{arg.arg}: {ast.unparse(arg.annotation)}" if arg.annotation else arg.arg
    return f"{name} = {ast.unparse(default)}" if default else name


def _fenced(name: str, parameters: list[str], returned: str) -> str:
    line = f"{name}({', '.join(parameters)}){returned}"
    if len(line) > WIDTH:
        line = "\n    ".join([f"{name}(", *(f"{each}," for each in parameters)]) + f"\n){returned}"
    return f"```py\n{line}\n```"


def _markdown(docstring: str | None) -> str:
    """A docstring with its sections as lists and its examples as blocks."""
    text = inspect.cleandoc(docstring or "")
    text = re.sub(r"(?ms)^>>> .+?(?=\n\n|\Z)", lambda found: f"```pycon\n{found[0]}\n```", text)
    titles = "Args|Attributes|Raises|Returns|Yields"
    head, *sections = re.split(rf"(?m)^(?={titles}:\n)", text)
    for section in sections:
        section = re.sub(rf"^({titles}):\n", r"**\1**\n\n", section)
        section = re.sub(r"(?m)^        ", "  ", section)
        head += re.sub(r"(?m)^    (\*{0,2}[\w.]+): ", r"- `\1`: ", section)
    return head.strip()


if __name__ == "__main__":
    main()
