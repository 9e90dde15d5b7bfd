"""From a locator on the command line to the application it names.

The command line and every process a worker starts come through here: `pkg.mod:app`, `pkg.mod`,
`path/file.py:app` or `path/file.py`. Stands before the line producer -> SQL -> turn -> child ->
report -> result.
"""

from __future__ import annotations

import difflib
import os
from types import ModuleType

from horsies.app import Horsies
from horsies.errors import HorsiesError
from horsies.modules import failure_at, import_entry, import_problem, names_file


def load_app(locator: str) -> Horsies:
    """Import the module a locator names and return its application.

    Without a name after the colon the module must hold exactly one. Raises a HorsiesError that
    says what is wrong with the locator (HRS-206) or with the module (HRS-210).

    Example:
        app = load_app("shop.background:app")
    """
    module_name, attribute = _split(locator)
    module = _import(module_name)
    if attribute is None:
        return _only_app(module, module_name)
    return _named_app(module, module_name, attribute)


def _split(locator: str) -> tuple[str, str | None]:
    """Split at the last colon; a path may hold others."""
    before, colon, after = locator.strip().rpartition(":")
    module_name, attribute = (before, after) if colon else (after, None)
    if not module_name or attribute == "":
        raise _malformed(locator)
    _refuse_mixture(module_name, colon + (attribute or ""))
    return module_name, attribute


def _malformed(locator: str) -> HorsiesError:
    return failure_at(
        None,
        f"The locator {locator!r} does not name an application.",
        help_text="write package.module:app, or path/to/file.py:app",
    )


def _refuse_mixture(module_name: str, suffix: str) -> None:
    """Refuse `pkg.mod.py`, half a module name and half a path, unless there is such a file."""
    stem = module_name.removesuffix(".py")
    is_mixture = stem != module_name and "/" not in stem and "." in stem.strip(".")
    if not is_mixture or os.path.isfile(module_name):
        return
    raise failure_at(
        None,
        f"{module_name!r} is neither a module name nor a path.",
        help_text=f"write {stem}{suffix} for the module, "
        f"or {stem.replace('.', '/')}.py{suffix} for the file",
    )


def _import(module_name: str) -> ModuleType:
    try:
        return import_entry(module_name)
    except HorsiesError:
        raise
    except (Exception, SystemExit) as error:
        problem = import_problem(module_name, error)
        if names_file(module_name) and os.path.isfile(f"{module_name}.py"):
            problem.help_text = f"did you mean {module_name}.py?"
        raise problem from error


def _named_app(module: ModuleType, module_name: str, attribute: str) -> Horsies:
    missing = object()
    found = getattr(module, attribute, missing)
    if isinstance(found, Horsies):
        return found
    if found is missing:
        message = f"The module {module_name!r} has no attribute {attribute!r}."
    else:
        message = f"{module_name}:{attribute} is of type {type(found).__name__}, not Horsies."
    raise failure_at(None, message, help_text=_suggestion(module, module_name, attribute))


def _suggestion(module: ModuleType, module_name: str, attribute: str) -> str:
    names = list(_apps_by_name(module))
    if len(names) > 1:
        names = difflib.get_close_matches(attribute, names, n=1, cutoff=0.5) or names
    if len(names) == 1:
        return f"did you mean {module_name}:{names[0]}?"
    if names:
        return f"choose one of: {_choices(module_name, names)}"
    return "create the application in this module: app = Horsies(AppConfig(...))"


def _only_app(module: ModuleType, module_name: str) -> Horsies:
    apps = _apps_by_name(module)
    distinct = {id(app): app for app in apps.values()}
    if len(distinct) == 1:
        return next(iter(distinct.values()))
    raise _wrong_count(module_name, list(apps), len(distinct))


def _wrong_count(module_name: str, names: list[str], count: int) -> HorsiesError:
    if count == 0:
        return failure_at(
            None,
            f"The module {module_name!r} holds no Horsies application.",
            help_text="name the module that creates one with Horsies(...)",
        )
    return failure_at(
        None,
        f"The module {module_name!r} holds {count} Horsies applications.",
        help_text=f"choose one of: {_choices(module_name, names)}",
    )


def _apps_by_name(module: ModuleType) -> dict[str, Horsies]:
    return {name: value for name, value in vars(module).items() if isinstance(value, Horsies)}


def _choices(module_name: str, names: list[str]) -> str:
    return ", ".join(f"{module_name}:{name}" for name in names)
