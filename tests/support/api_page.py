"""The reference of the Python API: every public name with its signature and docstring.

Everything is read from the source, not from the imported objects, so that the page does not depend
on the version of Python.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "horsies"
INIT = SOURCE / "__init__.py"

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_EXAMPLE = re.compile(r"^Examples?:\n((?:(?: .*)?(?:\n|\Z))+)", re.MULTILINE)


@cache
def _tree(module: str) -> ast.Module:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).read_text("utf-8"))


@cache
def _imports(module: str) -> dict[str, str]:
    """The module that each imported name of this module comes from."""
    return {
        alias.asname or alias.name: node.module
        for node in ast.walk(_tree(module))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("horsies")
        for alias in node.names
    }


def _groups() -> Iterator[tuple[str, list[str]]]:
    """The comments of ``__all__`` and the names below each."""
    text = INIT.read_text("utf-8").partition("__all__ = [")[2].partition("]")[0]
    for part in re.split(r"^\s*# ", text, flags=re.MULTILINE)[1:]:
        heading, _, names = part.partition("\n")
        yield heading.strip(), re.findall(r'"(\w+)"', names)


def api_reference() -> str:
    """Return a section per group of names and a paragraph per name."""
    parts = []
    for heading, names in _groups():
        parts.append(f"## {heading[0].upper()}{heading[1:]}")
        parts += [_entry(name) for name in names if name != "__version__"]
    return "\n\n".join(parts)


def _entry(name: str) -> str:
    module = _imports("horsies")[name]
    node = _find(module, name)
    if isinstance(node, ast.ClassDef):
        body = [_prose(ast.get_docstring(node)), *_members(module, node)]
        return "\n\n".join([f"### {name}", *filter(None, body)])
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        text = _prose(ast.get_docstring(node))
        return f"### {name}\n\n```text\n{_signature(node, is_method=False)}\n```\n\n{text}"
    return f"### {name}\n\n```text\n{_shortened(ast.unparse(node))}\n```\n\n{_after(module, node)}"


def _find(module: str, name: str) -> ast.stmt:
    for node in _tree(module).body:
        if isinstance(node, Definition) and node.name == name:
            return node
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(one, ast.Name) and one.id == name for one in targets):
            return node
    return _find(_imports(module)[name], name)


def _after(module: str, node: ast.stmt) -> str:
    """Return the docstring that follows an assignment."""
    body = _tree(module).body
    following = dict(pairwise(body))
    return _prose(_constant(following.get(node)))


def _constant(node: ast.stmt | None) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return str(node.value.value)
    return None


def _members(module: str, node: ast.ClassDef) -> Iterator[str]:
    """Return the fields, the values of an enumeration, and the public methods, inherited ones last."""
    rows = list(_fields(node))
    if rows:
        yield "\n".join(["| Field | Type | Meaning |", "| --- | --- | --- |", *rows])
    values = [
        ast.unparse(one.targets[0])
        for one in node.body
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]).isupper()
    ]
    if values:
        yield "Values: " + ", ".join(f"`{value}`" for value in values) + "."
    methods = dict(_methods(module, node))
    if methods:
        yield "\n".join(methods.values())


def _fields(node: ast.ClassDef) -> Iterator[str]:
    for field, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and not ast.unparse(field.target).startswith("_"):
            kind = ast.unparse(field.annotation).strip("'\"").replace("|", "\\|")
            meaning = " ".join(_plain(_constant(after) or "").split()).replace("|", "\\|")
            yield f"| `{ast.unparse(field.target)}` | `{kind}` | {meaning} |"


def _methods(module: str, node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for one in node.body:
        if not isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) or one.name.startswith("_"):
            continue
        decorators = {ast.unparse(decorator) for decorator in one.decorator_list}
        if text := ast.get_docstring(one):
            is_property = bool(decorators & {"property", "cached_property"})
            shown = one.name if is_property else _signature(one, is_method=True)
            first = " ".join(_plain(text.split("\n\n", 1)[0]).split())
            yield one.name, f"- `{shown}`: {first}"
    for base in node.bases:
        name = ast.unparse(base).partition("[")[0]
        if name in _imports(module):
            inherited = _find(_imports(module)[name], name)
            assert isinstance(inherited, ast.ClassDef)
            yield from _methods(_imports(module)[name], inherited)


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, *, is_method: bool) -> str:
    arguments = ast.unparse(node.args)
    if is_method:
        arguments = re.sub(r"^(self|cls)(: [^,]+)?(, /)?(, )?", "", arguments)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    prefix = "await " if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{prefix}{node.name}({arguments}){returns}"


def _shortened(text: str) -> str:
    return text if len(text) <= 400 else f"{text[:400]} ..."


def _plain(text: str) -> str:
    return text.replace("``", "`")


def _prose(docstring: str | None) -> str:
    """Return a docstring as Markdown, its example as a block of code."""
    return _EXAMPLE.sub(_block, _plain(textwrap.dedent(docstring or ""))).strip()


def _block(found: re.Match[str]) -> str:
    return f"```python no-run\n{textwrap.dedent(found[1]).strip()}\n```\n\n"
