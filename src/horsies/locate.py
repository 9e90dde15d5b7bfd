"""Locators: finds an application from `pkg.mod:app`, `pkg.mod`, `path/file.py:app` or `path/file.py`."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from horsies.app import SUPPRESSION_VARIABLES, Horsies
from horsies.errors import HorsiesError
from horsies.modules import failure_at, import_entry, import_problem, names_file


def load_app(locator: str) -> Horsies:
    """Import the module that a locator names and return its application.

    If the locator has no name after a colon, the module must contain exactly one application. Raises
    HorsiesError for a wrong locator (HRS-206) or a module that cannot be imported (HRS-210).

    Example:
        app = load_app("shop.background:app")
    """
    module_name, attribute = _split(locator)
    module = _import(module_name)
    if attribute is None:
        return _only_app(module, module_name)
    return _named_app(module, module_name, attribute)


@contextmanager
def sends_suppressed() -> Iterator[None]:
    """Suppress sends through the environment, because the application does not exist before the import."""
    name = SUPPRESSION_VARIABLES[0]
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _split(locator: str) -> tuple[str, str | None]:
    """Split at the last colon, because a path may contain further colons."""
    before, colon, after = locator.strip().rpartition(":")
    module_name, attribute = (before, after) if colon else (after, None)
    if not module_name or attribute == "":
        raise failure_at(
            None,
            f"The locator {locator!r} does not name an application.",
            help_text="write package.module:app, or path/to/file.py:app",
        )
    _refuse_mixture(module_name, colon + (attribute or ""))
    return module_name, attribute


def _refuse_mixture(module_name: str, suffix: str) -> None:
    """Reject `pkg.mod.py`, which mixes a module name and a path, unless such a file exists."""
    stem = module_name.removesuffix(".py")
    is_mixture = stem != module_name and "/" not in stem and "." in stem.strip(".")
    if is_mixture and not os.path.isfile(module_name):
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
    found = getattr(module, attribute, None)
    if isinstance(found, Horsies):
        return found
    message = (
        f"{module_name}:{attribute} is of type {type(found).__name__}, not Horsies."
        if hasattr(module, attribute)
        else f"The module {module_name!r} has no attribute {attribute!r}."
    )
    names = list(_apps_by_name(module))
    if len(names) > 1:
        names = difflib.get_close_matches(attribute, names, n=1, cutoff=0.5) or names
    if len(names) == 1:
        help_text = f"did you mean {module_name}:{names[0]}?"
    elif names:
        help_text = _choices(module_name, names)
    else:
        help_text = "create the application in this module: app = Horsies(AppConfig(...))"
    raise failure_at(None, message, help_text=help_text)


def _only_app(module: ModuleType, module_name: str) -> Horsies:
    apps = _apps_by_name(module)
    count = len({id(app) for app in apps.values()})
    if count == 1:
        return next(iter(apps.values()))
    if count == 0:
        message = f"The module {module_name!r} holds no Horsies application."
        raise failure_at(
            None, message, help_text="name the module that creates one with Horsies(...)"
        )
    message = f"The module {module_name!r} holds {count} Horsies applications."
    raise failure_at(None, message, help_text=_choices(module_name, list(apps)))


def _apps_by_name(module: ModuleType) -> dict[str, Horsies]:
    return {name: value for name, value in vars(module).items() if isinstance(value, Horsies)}


def _choices(module_name: str, names: list[str]) -> str:
    return "choose one of: " + ", ".join(f"{module_name}:{name}" for name in names)
