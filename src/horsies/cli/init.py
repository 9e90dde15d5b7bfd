"""`horsies init`: write a small project that runs."""

from __future__ import annotations

import keyword
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from horsies._version import __version__
from horsies.cli.options import exit_with

TEMPLATE = Path(__file__).with_name("template")
# A directory that contains only these entries counts as empty.
ALLOWED = {".git", ".venv", "wheels"}
# The file name of this release's wheel; by name alone, pip would install another project.
WHEEL = f"horsies-{__version__}-py3-none-any.whl"
# The file has another name in the template, because Git would apply a .gitignore to this repository.
RENAMED = {"gitignore": ".gitignore"}


def init(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The directory to create, or an empty one.")
    ],
) -> None:
    """Write a project that runs: tasks, a workflow, a schedule, tests and a Dockerfile.

    The package is named after the directory. The project's README lists the next commands.

    Exit codes: 0 written, 1 failure, or the directory is not empty.

    Example:
        horsies init shop
    """
    try:
        refuse_used_directory(directory)
        name = package_name(directory.resolve().name)
        for target, text in project_files(name).items():
            path = directory / target
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
    except OSError as error:
        exit_with(f"{error.filename} cannot be written: {error.strerror}.", 1)
    typer.echo(f"{directory} is ready. Next:\n")
    for command in (
        f"cd {shlex.quote(str(directory))}",
        "export HORSIES_DATABASE_URL=embedded://",
        f"horsies worker {name}.app --with-scheduler",
        f"python -m {name}    # in another terminal, after the same export",
    ):
        typer.echo(f"  {command}")
    typer.echo(f"\nhorsies dev {name}.app also serves the dashboard, and restarts on changes.")
    typer.echo("README.md explains the files.")


def refuse_used_directory(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        exit_with(f"{directory} is a file; name a new or an empty directory.", 1)
    if directory.is_dir() and any(entry.name not in ALLOWED for entry in directory.iterdir()):
        exit_with(f"{directory} is not empty; name a new or an empty directory.", 1)


def package_name(directory_name: str) -> str:
    """Return the package name for a directory with this name: my-shop becomes my_shop."""
    name = re.sub(r"\W", "_", directory_name).lower()
    # The project's distribution has the same name, so its rules apply too.
    is_valid = re.fullmatch(r"[a-z](\w*[a-z0-9])?", name, re.ASCII) and not keyword.iskeyword(name)
    if not is_valid or _is_taken(name):
        exit_with(
            f"{directory_name!r} cannot be the name of a package; name a directory of ASCII letters, digits "
            "and '-' that begins with a letter and is not called like an installed module.",
            1,
        )
    return name


def _is_taken(name: str) -> bool:
    if name in sys.stdlib_module_names or name == "tests":
        return True
    found = find_spec(name)
    return found is not None and found.origin is not None  # A plain directory has no origin.


def project_files(name: str) -> dict[Path, str]:
    files = {}
    for source in sorted(path for path in TEMPLATE.rglob("*") if path.is_file()):
        if "__pycache__" in source.parts:
            continue
        target = source.relative_to(TEMPLATE)
        renamed = target.with_name(RENAMED.get(target.name, target.name))
        text = source.read_text("utf-8").replace("HORSIES_WHEEL", WHEEL)
        files[Path(str(renamed).replace("project_name", name))] = text.replace("project_name", name)
    return files
