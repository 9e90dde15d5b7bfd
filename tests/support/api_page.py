"""The reference of the Python API: every public name with its signature, its members and their meanings.

The generator parses the source instead of importing it, so that the pages do not depend on the version
of Python. `without_meaning` names the fields, values and methods that have no docstring.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "horsies"
INIT = SOURCE / "__init__.py"

# The page of each group of names in `__all__` of `horsies`, and of the other public modules.
PAGES = {
    "the application": "application",
    "tasks and their handles": "tasks",
    "inside a task": "inside-a-task",
    "sending": "sending",
    "outcomes": "outcomes",
    "workflows": "workflows",
    "workflow runs": "workflow-runs",
    "durable functions": "durable-functions",
    "schedules": "schedules",
    "configuration": "configuration",
    "the broker": "operations",
    "health and operations": "operations",
    "results as values": "values-and-mistakes",
    "mistakes": "values-and-mistakes",
    "names of horsies.testing": "testing",
    "names of horsies.web": "dashboard",
    "names of horsies.django": "django",
}
OF_MODULE = "names of "
# Enumerations whose members explain themselves.
PLAIN_VALUES = {"Weekday", "Month"}

# Marks the target of a link in a docstring until the page's folder is known.
_FROM_DOCS = "docs:"

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.ClassDef | Function
_EXAMPLE = re.compile(r"^Examples?:\n((?:(?: .*)?(?:\n|\Z))+)", re.MULTILINE)


@dataclass(frozen=True)
class Member:
    """A field, an enumeration value or a method: its notation and its meaning."""

    name: str
    shown: str
    meaning: str


@cache
def _tree(module: str) -> ast.Module:
    place = SOURCE.parent.joinpath(*module.split("."))
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return ast.parse(path.read_text("utf-8"))


@cache
def _imports(module: str) -> dict[str, str]:
    """Return the source module of each imported name of this module."""
    return {
        alias.asname or alias.name: node.module
        for node in ast.walk(_tree(module))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("horsies")
        for alias in node.names
    }


@cache
def groups() -> dict[str, list[str]]:
    """Return the comments of ``__all__`` with the names below each, then the names of the other modules."""
    text = INIT.read_text("utf-8").partition("__all__ = [")[2].partition("]")[0]
    parts = [one.partition("\n") for one in re.split(r"^\s*# ", text, flags=re.MULTILINE)[1:]]
    own = {
        heading.strip(): [name for name in re.findall(r'"(\w+)"', names) if name != "__version__"]
        for heading, _, names in parts
    }
    others = [group for group in PAGES if group.startswith(OF_MODULE)]
    return own | {group: _names_of(group.removeprefix(OF_MODULE)) for group in others}


def _names_of(module: str) -> list[str]:
    """Return the names in ``__all__`` of a module."""
    node = _find(module, "__all__")
    assert isinstance(node, ast.Assign)
    return [str(name) for name in ast.literal_eval(node.value)]


@cache
def package_of(name: str) -> str:
    """Return the module from which users import a public name."""
    group = next(group for group, names in groups().items() if name in names)
    return group.removeprefix(OF_MODULE) if group.startswith(OF_MODULE) else "horsies"


def _home(name: str) -> str:
    """Return the module that defines a public name."""
    return _imports(package_of(name))[name]


@cache
def page_of(name: str) -> str:
    """Return the page of a public name, without its folder and ending."""
    return next(PAGES[group] for group, names in groups().items() if name in names)


def address(name: str, page: str | None = None) -> str:
    """Return the link to a public name from a page of the reference, or from the parent folder."""
    if page == page_of(name):
        return f"#{name.lower()}"
    folder = "" if page else "api/"
    return f"{folder}{page_of(name)}.md#{name.lower()}"


def reference(page: str) -> str:
    """Return a section per group of names of this page, and a paragraph per name."""
    parts = []
    for group, names in groups().items():
        if PAGES[group] == page:
            parts.append(f"## {group[0].upper()}{group[1:]}")
            parts += [_entry(name) for name in names]
    return "\n\n".join(parts).replace(_FROM_DOCS, "../")


def index() -> str:
    """Return one row per public name: a link to its entry, and its first sentence."""
    rows = [
        f'| <a id="{name.lower()}"></a>[`{name}`]({address(name)}) | {_first_sentence(name)} |'
        for names in groups().values()
        for name in sorted(names, key=str.lower)
    ]
    return "\n".join(["| Name | Purpose |", "| --- | --- |", *rows]).replace(_FROM_DOCS, "")


def other_names() -> str:
    """Return one row per non-public name that signatures use: its meaning or its definition."""
    public = {name for names in groups().values() for name in names}
    text = "\n".join(reference(page) for page in dict.fromkeys(PAGES.values()))
    signatures = " ".join(re.findall(r"`[^`\n]*`", text))
    used = set(re.findall(r"\b[A-Z]\w+\b", signatures)) - public
    rows = [
        f"| `{name}` | {meaning} |"
        for name, meaning in sorted(_definitions().items(), key=lambda one: one[0].lower())
        if name in used
    ]
    return "\n".join(["| Name | Meaning |", "| --- | --- |", *rows]).replace(_FROM_DOCS, "")


@cache
def _definitions() -> dict[str, str]:
    """Return the first sentence, or the right-hand side, of each class and alias at the top of the
    modules.
    """
    found: dict[str, str] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and (text := ast.get_docstring(node)):
                found[node.name] = _cell(text)
            elif isinstance(node, ast.AnnAssign) and "TypeAlias" in ast.unparse(node.annotation):
                value = ast.unparse(node.value) if node.value else ""
                found[ast.unparse(node.target)] = f"`{value}`".replace("|", "\\|")
    return found


def _cell(text: str) -> str:
    """Return the first sentence of a text, for a table."""
    plain = " ".join(_plain(text).split("\n\n", 1)[0].split()).replace("|", "\\|")
    return re.split(r"(?<=\.)(?: |$)", plain, maxsplit=1)[0]


def without_meaning() -> list[str]:
    """Return the public names, and their fields, values and methods, that have no docstring."""
    missing = []
    for name in (name for names in groups().values() for name in names):
        module = _home(name)
        node = _find(module, name)
        if not _first_sentence(name):
            missing.append(name)
        if isinstance(node, ast.ClassDef):
            members = [*_fields(module, node), *_values(node), *_methods(module, node)]
            missing += [f"{name}.{one.name}" for one in members if not one.meaning]
    return missing


def values_of(name: str) -> dict[str, tuple[str, str]]:
    """Return the values of an enumeration, each with its member's name and its meaning."""
    node = _find(_home(name), name)
    assert isinstance(node, ast.ClassDef)
    return {one.shown: (one.name, one.meaning.replace(_FROM_DOCS, "")) for one in _values(node)}


def _first_sentence(name: str) -> str:
    return _cell(_text_of(name))


def _text_of(name: str) -> str:
    module = _home(name)
    node = _find(module, name)
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return _plain(ast.get_docstring(node) or "")
    return _after(_imports(module).get(name, module), node)


def _entry(name: str) -> str:
    module = _home(name)
    node = _find(module, name)
    if isinstance(node, ast.ClassDef):
        body = [_prose(ast.get_docstring(node)), *_members(name, module, node)]
        return "\n\n".join([f"### {name}", *filter(None, body)])
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        shown, text = _signature(node, is_method=False), _prose(ast.get_docstring(node))
    else:
        shown, text = _shortened(ast.unparse(node)), _prose(_text_of(name))
    types = _linked(shown, name)
    return "\n\n".join(filter(None, [f"### {name}", f"```text\n{shown}\n```", text, types]))


def _find(module: str, name: str) -> ast.stmt:
    for node in _tree(module).body:
        if isinstance(node, Definition) and node.name == name:
            return node
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(one, ast.Name) and one.id == name for one in targets):
            return node
    return _find(_imports(module)[name], name)


def _after(module: str, node: ast.stmt) -> str:
    """Return the docstring below an assignment."""
    following = dict(pairwise(_tree(module).body))
    return _plain(_constant(following.get(node)) or "")


def _constant(node: ast.stmt | None) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return str(node.value.value)
    return None


def _members(name: str, module: str, node: ast.ClassDef) -> Iterator[str]:
    """Return the fields, enumeration values and methods, including inherited ones."""
    if fields := _fields(module, node):
        rows = [
            f"| `{one.name}` | {_type_cell(one.shown, name)} | {one.meaning} |" for one in fields
        ]
        yield "\n".join(["| Field | Type | Meaning |", "| --- | --- | --- |", *rows])
    values = list(_values(node))
    if name in PLAIN_VALUES:
        yield "Values: " + ", ".join(f"`{one.name}`" for one in values) + "."
    elif values:
        rows = [f"| `{_value_cell(one)}` | {one.meaning} |" for one in values]
        yield "\n".join(["| Value | Meaning |", "| --- | --- |", *rows])
    if methods := _methods(module, node):
        yield "\n".join(f"- {one.shown}: {one.meaning}{_types(one.shown, name)}" for one in methods)


def _value_cell(value: Member) -> str:
    return value.name if value.name == value.shown else f"{value.name}` = `{value.shown}"


def _bases(module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
    """Return the bases of a class that belong to the package, with their modules."""
    for base in node.bases:
        name = ast.unparse(base).partition("[")[0]
        place = _imports(module).get(name, module)
        try:
            found = _find(place, name)
        except KeyError:  # The base is a class of Python or of another library.
            continue
        if isinstance(found, ast.ClassDef):
            yield place, found


def _fields(module: str, node: ast.ClassDef) -> list[Member]:
    found: dict[str, Member] = {}
    for place, base in _bases(module, node):
        found |= {one.name: one for one in _fields(place, base)}
    is_base = {one.name for one in found.values()}
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and _is_shown(statement):
            name = ast.unparse(statement.target)
            meaning = " ".join(_plain(_constant(after) or "").split()).replace("|", "\\|")
            meaning = meaning or (found[name].meaning if name in is_base else "")
            found[name] = Member(name, ast.unparse(statement.annotation).strip("'\""), meaning)
    return list(found.values())


def _is_shown(field: ast.AnnAssign) -> bool:
    """Return whether a caller can set or read a field: it is not private and not set only by the class
    itself.
    """
    name = ast.unparse(field.target)
    made_inside = field.value is not None and "init=False" in ast.unparse(field.value)
    return not (name.startswith("_") or made_inside or name == "no_argument")


def _values(node: ast.ClassDef) -> Iterator[Member]:
    if not any("Enum" in ast.unparse(base) for base in node.bases):
        return
    for one, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]).isupper():
            name = ast.unparse(one.targets[0])
            value = ast.literal_eval(one.value) if isinstance(one.value, ast.Constant) else name
            meaning = " ".join(_plain(_constant(after) or "").split()).replace("|", "\\|")
            meaning = meaning or (name if node.name in PLAIN_VALUES else "")
            yield Member(name, str(value), meaning)


def _methods(module: str, node: ast.ClassDef) -> list[Member]:
    """Return the public methods and properties, inherited ones last, each with its async version."""
    functions = _functions(module, node)
    return [
        _method(function, functions.get(f"{name}_async"))
        for name, function in functions.items()
        if not (name.endswith("_async") and name.removesuffix("_async") in functions)
    ]


def _functions(module: str, node: ast.ClassDef) -> dict[str, Function]:
    found: dict[str, Function] = {}
    for one in node.body:
        if isinstance(one, Function) and not one.name.startswith("_") and not _is_setter(one):
            found[one.name] = _widest(found.get(one.name), one)
    for place, base in _bases(module, node):
        found = {**found, **{k: v for k, v in _functions(place, base).items() if k not in found}}
    return found


def _is_setter(function: Function) -> bool:
    return any(ast.unparse(one).endswith(".setter") for one in function.decorator_list)


def _widest(before: Function | None, function: Function) -> Function:
    """Return the overload with the most parameters, with the docstring of the implementation."""
    if before is None:
        return function
    is_overload = any(ast.unparse(one) == "overload" for one in function.decorator_list)
    body = before.body if ast.get_docstring(before) else function.body
    shown = function if is_overload and _width(function) > _width(before) else before
    copy = ast.FunctionDef if isinstance(shown, ast.FunctionDef) else ast.AsyncFunctionDef
    return copy(  # type: ignore[call-arg, unused-ignore]
        name=shown.name,
        args=shown.args,
        body=body,
        decorator_list=shown.decorator_list,
        returns=shown.returns,
        type_comment=None,
    )


def _width(function: Function) -> int:
    return len(function.args.args) + len(function.args.kwonlyargs)


def _method(function: Function, coroutine: Function | None) -> Member:
    decorators = {ast.unparse(one) for one in function.decorator_list}
    is_property = bool(decorators & {"property", "cached_property"})
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    shown = (
        f"`{function.name}{returns}`"
        if is_property
        else f"`{_signature(function, is_method=True)}`"
    )
    if coroutine is not None:
        prefix = "await " if isinstance(coroutine, ast.AsyncFunctionDef) else ""
        shown += f", `{prefix}{coroutine.name}(...)`"
    text = ast.get_docstring(function) or (coroutine and ast.get_docstring(coroutine)) or ""
    return Member(function.name, shown, " ".join(_plain(text.split("\n\n", 1)[0]).split()))


def _signature(node: Function, *, is_method: bool) -> str:
    arguments = ast.unparse(_without_self(node.args) if is_method else node.args)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    prefix = "await " if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{prefix}{node.name}({arguments})".replace("(/, ", "(") + returns


def _without_self(arguments: ast.arguments) -> ast.arguments:
    before, others = list(arguments.posonlyargs), list(arguments.args)
    first = before or others
    if first and first[0].arg in ("self", "cls"):
        del first[0]
    return ast.arguments(
        posonlyargs=before,
        args=others,
        vararg=arguments.vararg,
        kwonlyargs=arguments.kwonlyargs,
        kw_defaults=arguments.kw_defaults,
        kwarg=arguments.kwarg,
        defaults=arguments.defaults,
    )


def _public_types(shown: str, owner: str) -> list[str]:
    """Return the public names in a signature or type, except the signature's own name."""
    packages = {package_of(owner)} if page_of(owner) == "django" else {"horsies", package_of(owner)}
    public = {name for names in groups().values() for name in names if package_of(name) in packages}
    words = dict.fromkeys(re.findall(r"\b[A-Z]\w+\b", shown))
    return [word for word in words if word in public and word != owner]


def _links(shown: str, owner: str) -> str:
    page = page_of(owner)
    return ", ".join(f"[{name}]({address(name, page)})" for name in _public_types(shown, owner))


def _types(shown: str, owner: str) -> str:
    links = _links(shown, owner)
    return f" See {links}." if links else ""


def _linked(shown: str, owner: str) -> str:
    links = _links(shown, owner)
    return f"See {links}." if links else ""


def _type_cell(kind: str, owner: str) -> str:
    """Format a type as a table cell: a link if it is one public name, otherwise code followed by links."""
    names = _public_types(kind, owner)
    if names == [kind]:
        return f"[`{kind}`]({address(kind, page_of(owner))})"
    links = f" ({_links(kind, owner)})" if names else ""
    return f"`{kind}`".replace("|", "\\|") + links


def _shortened(text: str) -> str:
    return text if len(text) <= 400 else f"{text[:400]} ..."


def _plain(text: str) -> str:
    """Convert a docstring to Markdown; its links are relative to the documentation's folder."""
    return re.sub(r"\]\((?=[\w-]+\.md)", f"]({_FROM_DOCS}", text.replace("``", "`"))


def _prose(docstring: str | None) -> str:
    """Convert a docstring to Markdown, with its example as a block of code."""
    return _EXAMPLE.sub(_block, _plain(textwrap.dedent(docstring or ""))).strip()


def _block(found: re.Match[str]) -> str:
    return f"```python with-setting\n{textwrap.dedent(found[1]).strip()}\n```\n\n"
