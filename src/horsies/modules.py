"""Imports the user's modules by dotted name or by file, so that each file runs once.

Producers, workers, children and `check` all find tasks through `import_entry`. A file imported here by
path and elsewhere by `from tasks import add` must be the same module; otherwise its tasks would exist
twice.

`Deferred` is for modules of horsies that most processes never need.
"""

from __future__ import annotations

import glob
import importlib
import importlib.util
import inspect
import logging
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

from horsies.database_url import mask_url
from horsies.errors import ConfigurationError, ErrorCode, HorsiesError, SourceLocation

logger = logging.getLogger("horsies.modules")

DEFAULT_EXCLUDES = ("test_*.py", "*_test.py", "conftest.py")
PROJECT_FILES = ("pyproject.toml", "setup.cfg", "setup.py")

_PACKAGE_DIRECTORY = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARY_DIRECTORIES = tuple(
    sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


_OWN_NAME_PREFIX = "horsies_file_"
_imported_by_path: set[str] = set()


class Deferred:
    """Represents a module that is imported when one of its names is first used. The using module imports
    the real module under ``TYPE_CHECKING``, and creates a ``Deferred`` otherwise.
    """

    __slots__ = ("_module_name",)

    def __init__(self, module_name: str) -> None:
        self._module_name = module_name

    def __getattr__(self, name: str) -> Any:
        # Do not cache the value, because tests replace module attributes; a lookup takes 0.5 µs.
        return getattr(importlib.import_module(self._module_name), name)


class MissingModuleFile(FileNotFoundError):
    """The file that names a module does not exist."""


def expand_module_globs(patterns: Sequence[str], exclude: Sequence[str] | None = None) -> list[str]:
    """Return the absolute paths of the Python files that match the patterns, each once.

    `**` matches directories at any depth. Dotted module names are returned unchanged. Left out are
    directories, missing files, files without the suffix .py, and files that match `exclude`, by default
    test files (`test_*.py`, `*_test.py`, `conftest.py`).

    Example:
        app.discover_tasks(app.expand_module_globs(["shop/**/tasks.py", "billing.tasks"]))
    """
    excluded = tuple(exclude or DEFAULT_EXCLUDES)
    entries: dict[str, None] = {}
    for pattern in patterns:
        is_pattern = names_file(pattern) or glob.has_magic(pattern)
        found = _matching_files(pattern, excluded) if is_pattern else [pattern]
        entries |= dict.fromkeys(found)
    return list(entries)


def _matching_files(pattern: str, excluded: Sequence[str]) -> Iterator[str]:
    # An existing path is taken literally, because it may contain characters that are special in
    # patterns.
    found = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
    for path in map(os.path.abspath, found):
        is_excluded = any(
            fnmatch(path, os.path.abspath(one))
            if "/" in one
            else fnmatch(os.path.basename(path), one)
            for one in excluded
        )
        if path.endswith(".py") and os.path.isfile(path) and not is_excluded:
            yield path


def names_file(entry: str) -> bool:
    """Return whether an entry names a file instead of a dotted module."""
    return entry.endswith(".py") or "/" in entry or os.sep in entry


def import_entry(entry: str) -> ModuleType:
    """Import one module by its dotted name or its file, and return it.

    A file is imported under the name that other code would use for it: its directory, or the directory
    above its outermost package, is added to `sys.path`. If that name belongs to another module, the file
    gets another name instead. An imported file is not run again. Raises MissingModuleFile if the file
    does not exist; exceptions of the import propagate.
    """
    if not names_file(entry):
        return importlib.import_module(entry)
    path = os.path.abspath(os.path.expanduser(entry))
    if not os.path.isfile(path):
        raise MissingModuleFile(f"There is no file {entry}.")
    root, name = _natural_name(path)
    return _already_imported(path, name) or _import_file(path, root, name)


def importing_module() -> str | None:
    """Return the name of the module whose top-level code makes this call, directly or through functions."""
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and not code.co_filename.startswith(_PACKAGE_DIRECTORY):
            return str(frame.f_globals.get("__name__"))
        frame = frame.f_back
    return None


def module_of(name: str | None, member: object) -> ModuleType | None:
    """Return the imported module of this name if it contains the member under any name."""
    module = sys.modules.get(name or "")
    is_home = module is not None and any(one is member for one in list(vars(module).values()))
    return module if is_home else None


def shared_name(module_name: str) -> str:
    """Return the name under which all processes import a module; raise ValueError with the reason if it
    has no such name.

    The main module gets the name that `import_entry` gives to its file.
    """
    module = sys.modules.get(module_name)
    file, spec = getattr(module, "__file__", None), getattr(module, "__spec__", None)
    if module_name not in ("__main__", "__mp_main__"):
        return _name_of_import(module_name, file)
    if spec is not None and spec.name != "__main__":
        return str(spec.name)  # python -m package.module
    if file is None or file.startswith("<"):  # python -c, and python - < file
        raise ValueError("it was not defined in a file that a worker can import")
    name = _natural_name(os.path.abspath(file))[1]
    top = name.partition(".")[0]
    if "." in Path(file).stem or top in sys.stdlib_module_names or name == "__main__":
        raise ValueError(f"no worker can import {Path(file).name} under the name {name!r}")
    return name


def _name_of_import(module_name: str, file: str | None) -> str:
    if module_name.startswith(_OWN_NAME_PREFIX):
        raise ValueError(f"another module has the name of its file {file}")
    if file is None:
        return module_name
    root, name = _natural_name(os.path.abspath(file))
    if name.endswith(f".{module_name}"):
        # The file was imported from inside its package; when imported by path, it has the full
        # name.
        return name
    if module_name in _imported_by_path and (other := _dotted_name(root, name)):
        raise ValueError(
            f"its file can be imported as {module_name!r} and as {other!r}; name the module instead of "
            "the file, or add __init__.py"
        )
    return module_name


def _dotted_name(root: str, name: str) -> str | None:
    """Return the longer module name if one `sys.path` directory is inside another."""
    for entry in map(os.path.abspath, sys.path):
        below = os.path.relpath(root, entry).split(os.sep)
        if entry != root and all(part.isidentifier() for part in below):
            return ".".join([*below, name])
    return None


def import_entries(entries: Sequence[str]) -> list[str]:
    """Import all entries and return the imported modules; skip a missing file with a warning."""
    imported = []
    for entry in entries:
        try:
            import_entry(entry)
        except MissingModuleFile:
            logger.warning("task module %s does not exist; skipped", entry)
        else:
            imported.append(entry)
    return imported


def refuse_single_module(modules: Sequence[str]) -> None:
    """Reject a string in place of a list of strings, because each letter would count as a module."""
    if isinstance(modules, str):
        raise ConfigurationError(
            f"discover_tasks takes a list of modules, not the text {modules!r}.",
            code=ErrorCode.CLI_INVALID_ARGS,
            help_text=f"app.discover_tasks([{modules!r}])",
        )


def _natural_name(path: str) -> tuple[str, str]:
    """Return the directory that must be on `sys.path`, and the module's dotted name relative to the
    directory.
    """
    file = Path(path)
    parts = [] if file.name == "__init__.py" else [file.stem]
    root = file.parent
    while (root / "__init__.py").is_file() and root != root.parent:
        parts.insert(0, root.name)
        root = root.parent
    return str(root), ".".join(parts)


def _already_imported(path: str, natural_name: str) -> ModuleType | None:
    # A child's main module is the code that started the child, even if the module claims another
    # file.
    is_child = os.environ.get("HORSIES_CHILD_PROCESS") == "1"
    skipped = ("__main__", "__mp_main__") if is_child else ()
    for name in [natural_name, *sys.modules]:
        module = None if name in skipped else sys.modules.get(name)
        # Check the object's type, because cffi libraries only pretend to be modules.
        if issubclass(type(module), ModuleType):
            # Do not access an attribute, because that would import a lazily loaded module.
            file = ModuleType.__getattribute__(module, "__dict__").get("__file__")
            if isinstance(file, str) and _is_same_file(file, path):
                return module
    return None


def _is_same_file(one: str, other: str) -> bool:
    # Compare the names first, to avoid a disk access for hundreds of modules.
    if os.path.basename(one) != os.path.basename(other):
        return False
    return os.path.realpath(one) == os.path.realpath(other)


def _import_file(path: str, root: str, name: str) -> ModuleType:
    top = name.partition(".")[0]
    # Add the directory in front, as Python does for a script, unless a file in it would replace a
    # standard library module.
    _add_to_path(root, first=top not in sys.stdlib_module_names)
    # Check the outermost package first, because a further search imports the package, which may
    # belong to another project.
    is_ours = name == top or _has_origin(top, os.path.join(root, top, "__init__.py"))
    if is_ours and _has_origin(name, path):
        _imported_by_path.add(name)
        return importlib.import_module(name)
    return _load_under_own_name(path)


def _add_to_path(directory: str, *, first: bool) -> None:
    if directory not in sys.path:
        sys.path.insert(0 if first else len(sys.path), directory)


def _has_origin(name: str, path: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:
        return False  # The name belongs to a module that was created in code, without a spec.
    return spec is not None and spec.origin is not None and _is_same_file(spec.origin, path)


def _load_under_own_name(path: str) -> ModuleType:
    file = Path(path)
    stem = file.parent.name if file.name == "__init__.py" else file.stem
    import hashlib  # Imported here, because it loads OpenSSL, which most programs do not need.

    digest = hashlib.sha256(path.encode()).hexdigest()[:8]
    name = f"{_OWN_NAME_PREFIX}{digest}_{re.sub(r'[^A-Za-z0-9_]', '_', stem)}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file", path=path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def add_project_root() -> None:
    """Make the working directory importable, as `python -m` does.

    In Python's safe-path mode, the directory is added only if it contains a project file.
    """
    directory = os.getcwd()
    holds_project = any(os.path.isfile(os.path.join(directory, name)) for name in PROJECT_FILES)
    if holds_project or not sys.flags.safe_path:
        _add_to_path(directory, first=True)


_CIRCULAR_HELP = (
    "name the module in discover_tasks, which imports it after the application exists, "
    "instead of importing it beside the application"
)


def import_problem(entry: str, error: BaseException) -> HorsiesError:
    """Return the error for a failed import: HRS-206, or HRS-210 if the module's code raised.

    A HorsiesError is returned unchanged. The original exception is attached as the cause, for its
    traceback.
    """
    if isinstance(error, HorsiesError):
        return error
    problem = _describe_failure(entry, error)
    problem.__cause__ = error
    return problem


def _describe_failure(entry: str, error: BaseException) -> HorsiesError:
    if isinstance(error, MissingModuleFile):
        return failure_at(
            None,
            f"There is no file {entry!r}.",
            help_text=f"correct the path, or run from another directory than {os.getcwd()}",
        )
    if entry.startswith(".") and not names_file(entry):
        return failure_at(
            None,
            f"{entry!r} is a relative module name, but there is no package around it.",
            help_text="write package.module, or path/to/file.py",
        )
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and f"{entry}.".startswith(f"{missing}."):
        within = "" if missing == entry else f", so {entry!r} cannot be imported"
        return failure_at(
            None,
            f"There is no module {missing!r}{within}.",
            help_text="correct the name, run from the directory above it, or install the project",
        )
    return _describe_raised(entry, error)


def _describe_raised(entry: str, error: BaseException) -> HorsiesError:
    # Omit the text of a syntax error, because it repeats the file and line of the report.
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    first, *rest = mask_url(text).strip().splitlines() or [""]
    what = f"{type(error).__name__}: {first}" if first else type(error).__name__
    is_import = isinstance(error, ImportError)
    return failure_at(
        _user_location(error),
        f"Importing {entry!r} failed with {what}",
        code=ErrorCode.CLI_INVALID_ARGS if is_import else ErrorCode.MODULE_EXEC_ERROR,
        notes=[line for line in rest if line.strip()],
        help_text=_CIRCULAR_HELP
        if "circular import" in first
        else "set HORSIES_DEBUG_IMPORTS=1 to see the traceback",
    )


def failure_at(
    location: SourceLocation | None,
    message: str,
    *,
    code: ErrorCode = ErrorCode.CLI_INVALID_ARGS,
    notes: Sequence[str] = (),
    help_text: str | None = None,
) -> ConfigurationError:
    """Create an error with this location or without one, but never with the caller's line."""
    error = ConfigurationError(message, code=code, notes=notes, help_text=help_text)
    error.location = location
    return error


def _user_location(error: BaseException) -> SourceLocation | None:
    """Return the innermost line in the user's project that led to the error."""
    if isinstance(error, SyntaxError) and os.path.isfile(error.filename or ""):
        return SourceLocation(str(error.filename), error.lineno or 1)
    ours = ("<", _PACKAGE_DIRECTORY)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(ours) and frame.filename != importlib.__file__
    ]
    if not frames:
        return None
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARY_DIRECTORIES)]
    # The lines of an installed project look like library lines; in that case, return the module's
    # own line, the outermost one.
    frame = own[-1] if own else frames[0]
    return SourceLocation(frame.filename, frame.lineno or 1, frame.name)
