"""Named SQL statements with typed parameters and rows.

Every statement lives in a ``.sql`` file under ``db/statements``, below a ``-- name:`` heading, and is
declared once in the catalogue module of the same name. The declaration is a function without a body: its
parameters are the parameters of the SQL, and its return annotation is the type of one row, a named tuple or a
dataclass. The module cannot be imported if a statement and its declaration do not match. A search for the
name finds the SQL, the declaration and the callers. Parameters that the code handles as a single value, such
as the row of a send, form a named tuple.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import defaultdict
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager, nullcontext
from copy import copy
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache, partial
from hashlib import sha256
from importlib.resources import files
from operator import call
from types import CodeType
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor, DataError, OperationalError
from psycopg.rows import args_row

from horsies.database_url import DEFAULT_SCHEMA
from horsies.db.database import Installation, installation_of
from horsies.db.schema import in_schema
from horsies.encryption import Payloads, masked, masked_text

# Type variables for the parameters of a statement and for one of its rows. Rows are named tuples; rows that
# are part of the public API may be dataclasses.
P = ParamSpec("P")
Row = TypeVar("Row")
Answer = TypeVar("Answer")

logger = logging.getLogger("horsies.sql")
UNLOGGED = nullcontext()
_NAMED_PARAMETER = re.compile(r"%\((\w+)\)s")
_AUTOCOMMIT = nullcontext()


class Nothing(NamedTuple):
    """Placeholder for a statement without parameters or without rows."""


class Statement(Generic[P, Row]):
    """One SQL statement. A call with the statement's parameters returns a step of a script or pipeline."""

    def __init__(
        self, name: str, text: str, signature: Callable[P, object], row_type: type[Row]
    ) -> None:
        self.name = name
        self.text = text
        self.signature = signature
        self.row_type = row_type
        self.prepared_name = f"horsies_{name}".encode()
        self.parameters = parameter_names(signature)
        defaults: tuple[Any, ...] = getattr(signature, "__defaults__", None) or ()
        self._defaults = dict(zip(self.parameters[::-1], defaults[::-1], strict=False))
        self.has_rows = bool(field_names(row_type))
        # The positions of parameters and columns that are annotated as payload.
        self._sent_payload = _SentPayload.of(signature, self.parameters)
        self._read_payload = _ReadPayload.of(row_type)
        # Parameters that `bound` has replaced by literals in the text.
        self._constants: dict[str, str] = {}
        self._queries: dict[str, bytes] = {}
        self._numbered: dict[str, bytes] = {}
        self.make_row: Callable[[Sequence[Any]], Row] = (
            (lambda values: row_type(*values))
            if is_dataclass(row_type)
            # Works like a named tuple's `_make`, without a Python call for each row.
            else partial(tuple.__new__, row_type)  # type: ignore[type-var]
        )
        self._row_factory = args_row(row_type)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> tuple[Statement[Any, Row], Any]:
        """Return the step that executes this statement with these parameters."""
        given = self.signature(*args, **kwargs)  # wrong arguments raise TypeError
        if isinstance(given, tuple):
            return self, given
        if kwargs or len(args) < len(self.parameters):
            named = self._defaults | dict(zip(self.parameters, args, strict=False)) | kwargs
            return self, tuple([named[name] for name in self.parameters])
        return self, args

    def bound(self, **constants: Any) -> Statement[Any, Row]:
        """Return this statement with some parameters inlined as literals. This suits values that do not
        change during a session, because writing, sending and reading a parameter costs about 1 µs in all.
        """
        found = copy(self)
        found._constants = {name: _literal(value) for name, value in constants.items()}
        found.parameters = tuple([name for name in self.parameters if name not in constants])
        found._queries, found._numbered = {}, {}
        digest = sha256(repr(found._constants).encode()).hexdigest()[:16]
        found.prepared_name = self.prepared_name + b"_" + digest.encode()
        return found

    def query(self, schema: str = DEFAULT_SCHEMA) -> bytes:
        """Return the text with this schema's names, in the form that psycopg takes."""
        if (known := self._queries.get(schema)) is None:
            text = in_schema(self.text, schema)
            for name, literal in self._constants.items():
                text = text.replace(f"%({name})s", literal)
            known = self._queries[schema] = text.encode()
        return known

    def numbered(self, schema: str = DEFAULT_SCHEMA) -> bytes:
        """Return the text with ``$n`` for the parameters, which is PostgreSQL's own form."""
        if (known := self._numbered.get(schema)) is None:
            known = self._numbered[schema] = _numbered(self.query(schema).decode(), self.parameters)
        return known

    def stored(self, params: tuple[Any, ...], payloads: Payloads | None) -> tuple[Any, ...]:
        """Return the parameters in the form in which they are stored: payload is encrypted if there is a
        codec, and large payload is replaced by references if there is a store.
        """
        if payloads is None or not self._sent_payload.places:
            return params
        places, owner_place = self._sent_payload
        values = list(params)
        owner = None if owner_place is None else values[owner_place]
        for place, is_lines in places.items():
            change: Callable[[str], str]
            if owner is not None:
                stored = payloads.stored_lines if is_lines else payloads.stored
                change = partial(_with_owner, stored, owner)
            else:
                change = payloads.encrypt_lines if is_lines else payloads.encrypt
            values[place] = _each_text(change, values[place])
        return tuple(values)

    async def stored_async(
        self, params: tuple[Any, ...], payloads: Payloads | None
    ) -> tuple[Any, ...]:
        """Like ``stored``, but without blocking the event loop during requests to a store."""
        if payloads is None or self._sent_payload.owner is None or not payloads.has_store:
            return self.stored(params, payloads)
        return await asyncio.to_thread(self.stored, params, payloads)

    def read(self, rows: list[Row], payloads: Payloads | None) -> list[Row]:
        """Return the rows with their payload decrypted, if the codec has the keys. Texts that are shown to
        people are masked if they cannot be decrypted or if their store does not respond.
        """
        columns, has_masks = self._read_payload
        if not columns or (payloads is None and not has_masks):
            return rows
        return [self._read_row(row, payloads) for row in rows]

    async def read_async(self, rows: list[Row], payloads: Payloads | None) -> list[Row]:
        """Like ``read``, but without blocking the event loop during requests to a store."""
        if payloads is None or not self._read_payload.columns or not payloads.has_store:
            return self.read(rows, payloads)
        return await asyncio.to_thread(self.read, rows, payloads)

    def _read_row(self, row: Row, payloads: Payloads | None) -> Row:
        values: dict[str, Any] = {}
        for name, column in self._read_payload.columns.items():
            value = getattr(row, name)
            if payloads is not None:
                value = _each_text(partial(column.decrypted, payloads), value)
            if column.mask is not None:
                value = _each_text(column.mask, value)
            values[name] = value
        changed: Row = (
            replace(row, **values)  # type: ignore[type-var]
            if is_dataclass(row)
            else row._replace(**values)  # type: ignore[attr-defined]
        )
        return changed

    def mapping(self, params: tuple[Any, ...]) -> dict[str, Any]:
        """Return the parameters under the names that the SQL text uses."""
        return dict(zip(self.parameters, params, strict=True))

    def positional(self, params: tuple[Any, ...], schema: str) -> tuple[str, tuple[Any, ...]]:
        """Return the text with ``%s`` for the parameters, and their values in that order."""
        values, text = self.mapping(params), self.query(schema).decode()
        names = _NAMED_PARAMETER.findall(text)
        return _NAMED_PARAMETER.sub("%s", text), tuple(values[name] for name in names)

    def rows(self, found: Iterable[Sequence[Any]]) -> list[Row]:
        """Return rows of another driver as rows of this statement."""
        return [self.make_row(values) for values in found] if self.has_rows else []

    def texts(self, params: tuple[Any, ...]) -> list[bytes | None]:
        """Return the parameters as PostgreSQL's text input, in the order of ``numbered``."""
        # One C call for all parameters: a loop would take 14 bytecodes for each, a tenth of a turn's in all.
        return list(map(call, map(_WRITER_OF, map(type, params)), params))

    def fetch(self, connection: Connection[Any], *args: P.args, **kwargs: P.kwargs) -> list[Row]:
        """Execute with these parameters on a synchronous connection and return the rows."""
        return self.run(connection, self(*args, **kwargs)[1])

    def run(
        self,
        connection: Connection[Any],
        params: tuple[Any, ...],
        within: Installation | None = None,
    ) -> list[Row]:
        """Execute on a synchronous connection and return the rows, if the statement returns any.

        ``within`` replaces the installation of the connection. Behind a pooler, sessions keep no settings, so
        the statement runs in a transaction that begins by setting them.
        """
        installation = within or installation_of(connection)
        payloads = installation.payloads
        query, values = (
            self.query(installation.schema),
            self.mapping(self.stored(params, payloads)),
        )
        with (
            _pooled_transaction(connection, installation)
            if installation.is_pooled
            else _AUTOCOMMIT,
            Cursor(connection, row_factory=self._row_factory) as cursor,
        ):
            cursor.execute(query, values)
            return self.read(cursor.fetchall(), payloads) if self.has_rows else []

    async def run_async(
        self,
        connection: AsyncConnection[Any],
        params: tuple[Any, ...],
        within: Installation | None = None,
    ) -> list[Row]:
        """Like ``run``, but on an asynchronous connection."""
        installation = within or installation_of(connection)
        payloads = installation.payloads
        query, values = (
            self.query(installation.schema),
            self.mapping(await self.stored_async(params, payloads)),
        )
        async with (
            _pooled_transaction_async(connection, installation)
            if installation.is_pooled
            else _AUTOCOMMIT,
            AsyncCursor(connection, row_factory=self._row_factory) as cursor,
        ):
            await cursor.execute(query, values)
            if not self.has_rows:
                return []
            return await self.read_async(await cursor.fetchall(), payloads)


@contextmanager
def _pooled_transaction(connection: Connection[Any], installation: Installation) -> Iterator[None]:
    # In a pipeline, BEGIN, the settings and the statement share one round trip.
    with connection.pipeline(), connection.transaction():
        connection.execute(installation.settings)
        yield


@asynccontextmanager
async def _pooled_transaction_async(
    connection: AsyncConnection[Any], installation: Installation
) -> AsyncIterator[None]:
    async with connection.pipeline(), connection.transaction():
        await connection.execute(installation.settings)
        yield


class StatementFile:
    """One ``.sql`` file and its declarations."""

    def __init__(self, file_name: str) -> None:
        self.file_name = file_name
        text = files("horsies.db.statements").joinpath(file_name).read_text("utf-8")
        parts = [part.partition("\n") for part in text.split("-- name: ")[1:]]
        self.texts = {name.strip(): body.strip() for name, _, body in parts}
        self.statements: dict[str, Statement[Any, Any]] = {}

    def statement(self, signature: Callable[P, Row]) -> Statement[P, Row]:
        """Declare the statement with this name: its parameters and the type of its rows, or None if it
        returns no rows.
        """
        function: Any = signature
        row_name = function.__annotations__["return"]
        row_type: Any = Nothing if row_name == "None" else function.__globals__[row_name]
        return self._declared(function.__name__, signature, row_type)

    def declare(
        self, name: str, params_type: Callable[P, tuple[Any, ...]], row_type: type[Row]
    ) -> Statement[P, Row]:
        """Declare a statement whose parameters form a single value, a named tuple."""
        return self._declared(name, params_type, row_type)

    def _declared(
        self, name: str, signature: Callable[P, object], row_type: type[Row]
    ) -> Statement[P, Row]:
        if name not in self.texts:
            raise LookupError(f"{self.file_name} has no statement named {name!r}")
        statement = Statement(name, self.texts[name], signature, row_type)
        self.statements[name] = statement
        return statement

    def complete(self) -> None:
        """Raise an error if a statement in the file was never declared."""
        undeclared = sorted(set(self.texts) - set(self.statements))
        if undeclared:
            raise LookupError(f"{self.file_name}: no declaration for {', '.join(undeclared)}")


def parameter_names(signature: Callable[..., object]) -> tuple[str, ...]:
    if isinstance(signature, type):
        return field_names(signature)
    code: CodeType = signature.__code__
    return code.co_varnames[: code.co_argcount]


class _SentPayload(NamedTuple):
    """The positions of the parameters that contain payload, each with a flag for payload of several rows;
    and the position of the owner's id.
    """

    places: dict[int, bool]
    owner: int | None

    @classmethod
    def of(cls, declared: Callable[..., object], names: tuple[str, ...]) -> _SentPayload:
        annotations = getattr(declared, "__annotations__", {})
        texts = [str(annotations.get(name, "")) for name in names]
        places = {
            place: "PayloadLines" in text for place, text in enumerate(texts) if "Payload" in text
        }
        owners = (place for place, text in enumerate(texts) if "Owner" in text)
        return cls(places, next(owners, None))


def _with_owner(stored: Callable[[str, str], str], owner: str, text: str) -> str:
    return stored(text, owner)


class _PayloadColumn(NamedTuple):
    """How a payload column is read. A column that is shown to people has a mask. ``must_answer`` is set if a
    program or a search needs the value, so a failure of the store raises an error.
    """

    mask: Callable[[str], str] | None = None
    must_answer: bool = True

    def decrypted(self, payloads: Payloads, text: str) -> str:
        try:
            return payloads.decrypt(text)
        except OperationalError:
            if self.must_answer:
                raise
            return text


# The kinds of columns, by a word in the annotation; the first matching word decides.
_COLUMNS = {
    "ShownText": _PayloadColumn(masked_text),
    "ShownPayload": _PayloadColumn(masked, must_answer=False),
    "SearchedPayload": _PayloadColumn(masked),
    "Payload": _PayloadColumn(),
}


class _ReadPayload(NamedTuple):
    """The columns that contain payload, and whether any of them are masked."""

    columns: dict[str, _PayloadColumn]
    has_masks: bool

    @classmethod
    def of(cls, row_type: type[Any]) -> _ReadPayload:
        annotations = {name: str(one) for name, one in row_type.__annotations__.items()}
        # The annotations of public row types do not contain these names, so such types list their shown
        # texts.
        annotations |= dict.fromkeys(getattr(row_type, "_shown_texts", ()), "ShownText")
        columns = {
            name: column
            for name, one in annotations.items()
            if (column := next((_COLUMNS[word] for word in _COLUMNS if word in one), None))
        }
        return cls(columns, any(one.mask for one in columns.values()))


def _each_text(change: Callable[[str], str], value: Any) -> Any:
    """Apply a function to a text or to each text of an array; None stays None."""
    if isinstance(value, str):
        return change(value)
    return value if value is None else [_each_text(change, one) for one in value]


def field_names(value_type: type[Any]) -> tuple[str, ...]:
    if is_dataclass(value_type):
        return tuple(field.name for field in fields(value_type))
    names: tuple[str, ...] = value_type._fields
    return names


def _numbered(text: str, names: tuple[str, ...]) -> bytes:
    """Rewrite ``%(name)s`` as ``$n``, in parameter order."""
    for number, name in enumerate(names, start=1):
        text = text.replace(f"%({name})s", f"${number}")
    return text.replace("%%", "%").encode()


def _literal(value: Any) -> str:
    """Return a value as an untyped SQL literal, which is equivalent to a parameter with this text."""
    text = _WRITERS[type(value)](value)
    if text is None:
        return "NULL"
    # The literal must not contain a percent sign, which would begin a parameter.
    escaped = text.decode().replace("\\", r"\\").replace("'", "''").replace("%", r"\x25")
    return f"E'{escaped}'"


def _written(value: Any) -> bytes:
    """Return the text of a value of a rare type, such as a time or an enum member."""
    return _encoded(_plain(value))


def _plain(value: Any) -> str:
    """Return a value's text; for an enum member, the text of its value."""
    if isinstance(value, str):
        return str.__str__(value)
    return int.__repr__(value) if isinstance(value, int) else str(value)


# Arrays that recur, such as a worker's queues, are cached. The cache is typed, because True equals 1 but has
# a different text.
@lru_cache(maxsize=256, typed=True)
def _constant_array(*values: Any) -> bytes:
    return _array(values)


def _array(values: Sequence[Any]) -> bytes:
    if not values:
        return b"{}"
    kinds = set(map(type, values))
    if kinds == _INTEGERS:
        return f"{{{','.join(map(repr, values))}}}".encode()
    if kinds == _TEXTS:
        joined = '","'.join(values)
        if "\\" in joined or joined.count('"') > 2 * len(values) - 2:
            joined = _joined_escaped(values)
        return _encoded(f'{{"{joined}"}}')
    elements = [_ELEMENTS.get(type(value), _element)(value) for value in values]
    return _encoded(f"{{{','.join(elements)}}}")


def _joined_escaped(values: Sequence[str]) -> str:
    """Join the elements of an array, and escape all of them at once: they are first joined by NUL characters,
    which no text that PostgreSQL accepts contains.
    """
    joined = "\0".join(values)
    if joined.count("\0") >= len(values):
        return joined  # the caller refuses texts with NUL characters
    return _escaped(joined).replace("\0", '","')


def _element(value: Any) -> str:
    return _quoted(_plain(value)) if isinstance(value, str) else _plain(value)


def _quoted(text: str) -> str:
    return f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _encoded(text: str) -> bytes:
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        raise DataError("a text parameter contains a lone surrogate") from error
    if b"\0" in encoded:  # libpq would truncate the text there
        raise DataError("a text parameter contains a NUL character")
    return encoded


_INTEGERS, _TEXTS = {int}, {str}
# The writer is selected by the exact type: a turn writes about thirty values, and a chain of type checks
# for each value took 7 % of the turn's time.
_WRITERS: dict[type, Callable[[Any], bytes | None]] = defaultdict(
    lambda: _written,
    {
        type(None): {None: None}.__getitem__,
        bool: {True: b"true", False: b"false"}.__getitem__,
        int: b"%d".__mod__,
        str: _encoded,
        list: _array,
        tuple: lambda values: _constant_array(*values) if values else b"{}",
    },
)
_WRITER_OF = _WRITERS.__getitem__
_ELEMENTS: dict[type, Callable[[Any], str]] = {
    type(None): {None: "NULL"}.__getitem__,
    bool: bool.__repr__,
    int: int.__repr__,
    str: _quoted,
}


def one_or_none(rows: list[Row]) -> Row | None:
    """Return the single row of a statement that changes or finds at most one row."""
    return rows[0] if rows else None


# A script decides which statements to run but never waits; the functions below wait for the results. In this
# way, synchronous and asynchronous methods share their logic.
Step = tuple[Statement[Any, Any], Any]
Script = Generator[Step, list[Any], Answer]


def read_rows(step: tuple[Statement[Any, Row], Any]) -> Script[list[Row]]:
    """Return a script with one statement; the script's result is the list of the statement's rows."""
    rows: list[Row] = yield step
    return rows


# Executes one statement and returns its rows.
Execute = Callable[[Statement[Any, Any], Any], list[Any]]
ExecuteAsync = Callable[[Statement[Any, Any], Any], Awaitable[list[Any]]]


def run_script(
    connection: Connection[Any], script: Script[Answer], *, logged: bool = False
) -> Answer:
    """Run a script's statements on a synchronous connection and return the script's result."""
    return drive(lambda statement, params: statement.run(connection, params), script, logged=logged)


async def run_script_async(
    connection: AsyncConnection[Any], script: Script[Answer], *, logged: bool = False
) -> Answer:
    """Like ``run_script``, but on an asynchronous connection."""

    def execute(statement: Statement[Any, Any], params: Any) -> Awaitable[list[Any]]:
        return statement.run_async(connection, params)

    return await drive_async(execute, script, logged=logged)


def drive(execute: Execute, script: Script[Answer], *, logged: bool = False) -> Answer:
    """Execute a script's statements and return the script's result."""
    rows: Any = None
    try:
        while True:
            step = script.send(rows)
            with log_statements([step]) if logged else UNLOGGED:
                rows = execute(*step)
    except StopIteration as finished:
        answer: Answer = finished.value
        return answer


async def drive_async(
    execute: ExecuteAsync, script: Script[Answer], *, logged: bool = False
) -> Answer:
    """Like ``drive``, but without blocking the event loop."""
    rows: Any = None
    try:
        while True:
            step = script.send(rows)
            with log_statements([step]) if logged else UNLOGGED:
                rows = await execute(*step)
    except StopIteration as finished:
        answer: Answer = finished.value
        return answer


@contextmanager
def log_statements(steps: Iterable[Step]) -> Iterator[None]:
    """Log the names and the total duration of statements sent in one round trip, but never their values."""
    started, verb = time.perf_counter(), "failed after"
    try:
        yield
        verb = "took"
    finally:
        names = ", ".join(statement.name for statement, _ in steps)
        logger.info("%s %s %.1f ms", names, verb, (time.perf_counter() - started) * 1000)
