"""The kinds of database errors, and how each is described to a user.

Every database error is of one of three kinds:

* transient: the connection, a conflict or the state of the server; the same statement can succeed later.
  Some of these errors (see ``may_last``) can also be caused by a single row: after several such errors in
  succession, a worker searches for that row;
* installation: tables or functions are missing, a privilege is missing, or the login is rejected;
  nothing succeeds until an operator acts, so a worker stops;
* data: everything else. The rows that the statement writes or reads cause the error. Other tasks and runs are
  not affected, and a worker isolates the row responsible. This kind includes errors inside a foreign function
  (one that an operator's trigger or constraint calls), such as a missing object, privilege or connection.
"""

from __future__ import annotations

import re
from enum import Enum

import psycopg

from horsies.database_url import mask_url
from horsies.errors import HorsiesError

CONFLICTS = ("40001", "40P01")  # serialization failure, deadlock
_CONNECTION_ERRORS = (psycopg.OperationalError, psycopg.InterfaceError)
_TRANSIENT_CLASSES = ("08", "53")
_TRANSIENT_STATES = {
    *("57P01", "57P02", "57P03"),  # the server shuts down, has crashed or is starting
    *CONFLICTS,
    "25006",  # read-only: the server is not, or no longer, the primary
    *("57014", "55P03", "57P05", "25P03", "25P04"),  # the time limits that an administrator can set
}
# A general limit was exceeded. Usually the statement itself is the cause; the exception is a full
# notification queue.
_LIMIT_EXCEEDED = "54000"
# The server's C function that adds notifications to the queue. It identifies this error, because messages
# may be translated.
_QUEUES_NOTIFICATIONS = "PreCommit_Notify"
# Transient states that a single row can cause repeatedly: by its size, or through a trigger that is slow,
# needs much memory or raises such an error itself. A full disk, the number of connections and a lost
# connection affect the whole server.
_LASTING_STATES = {
    *("57014", "25P04"),  # a statement was cancelled, or a statement or transaction timed out
    *("53000", "53200", "53400"),  # the server lacks memory or exceeds a configured limit
    *CONFLICTS,
}
# No row can store this text: its characters, its length or its size are not allowed, or an operator's
# index or type cannot parse it.
_TEXT_STATES = {"22021", "22P05", "22001", "22P02", _LIMIT_EXCEEDED}
_TOO_LARGE = "invalid memory alloc request size"  # the server does not translate this message
_INSTALLATION_CLASSES = ("28", "3D", "3F")  # the login, the database or the schema is wrong
_INSTALLATION_STATES = {
    "42501",  # the role lacks a privilege
    # The tables and functions do not match this release.
    *("42P01", "42703", "42883", "42704", "42601"),
    *("26000", "42P05"),  # prepared statements fail behind an undeclared pooler
    "57P04",  # the database was dropped
}

# The lines of an error's CONTEXT contain the names of the language and of the function in every
# translation of the server's messages. PL/pgSQL writes the function with its arguments; SQL and the other
# languages write it in quotation marks. Chinese and Japanese put no space before the name.
_OWN_FUNCTION = re.compile(r"(?<![A-Za-z0-9_])horsies_\w+\(")
_QUOTED_NAME = re.compile(r"""[^"'«»„“]*["«»„“]\s?([^\s"'«»„“”.()]+)\s?["«»“”]""")
_NO_DATABASE = re.compile(r'database ".*" does not exist')
_NO_ROLE = re.compile(r'role ".*" does not exist')
_REFUSALS = ("password authentication failed", "no password supplied", "no pg_hba.conf entry")
_NO_RIGHT = (
    "The database role lacks a right; run `horsies migrate` as the owner of the tables, and grant the role "
    "its rights on them"
)
_NO_FREE_SLOT = "PostgreSQL has no free connection slot; lower the pool sizes or raise its limit"
_READS_ONLY = (
    "PostgreSQL takes only reads here, as a standby does; wait for its failover or correct the host"
)
_DISK_FULL = "The disk of the database server is full; free space there"
# Docker gives a container 64 MB of it, which parallel queries of the server use.
_SHARED_MEMORY_FULL = (
    "The shared memory of the database server is full; give its container more, for example by "
    "--shm-size"
)
_QUEUE_FULL = (
    "PostgreSQL's notification queue is full; end the session that listens and stays in a transaction, "
    "see pg_stat_activity"
)
_UNKNOWN_HOST = "The host name is unknown; correct the host in database_url"
_NO_ANSWER = "The server did not answer in time; check host, port and the network"


class StoreUnreachable(psycopg.OperationalError):
    """The external store of large payloads does not respond. Work that needs the store is retried, as after a
    lost connection.
    """


def is_transient(error: BaseException) -> bool:
    """Return whether a retry can succeed later.

    Connection failures have no SQLSTATE at all, not even "too many clients", so an OperationalError or
    InterfaceError without a SQLSTATE counts as transient.
    """
    state = getattr(error, "sqlstate", None)
    if isinstance(error, StoreUnreachable):
        return True
    if state is None:
        return isinstance(error, _CONNECTION_ERRORS) and not _is_permanent(str(error).lower())
    return _is_transient_state(state) or is_notification_queue_full(error)


def is_notification_queue_full(error: BaseException) -> bool:
    """Return whether a transaction could not commit because the server's notification queue is full.

    The whole server has a single queue. A session that has executed LISTEN and stays in a transaction
    keeps all later notifications in the queue.
    """
    return (
        isinstance(error, psycopg.Error)
        and error.sqlstate == _LIMIT_EXCEEDED
        and error.diag.source_function == _QUEUES_NOTIFICATIONS
    )


def _is_transient_state(state: str) -> bool:
    return state[:2] in _TRANSIENT_CLASSES or state in _TRANSIENT_STATES


def is_refusal(error: BaseException) -> bool:
    """Return whether the server rejected the connection because of a wrong password, or an unknown database
    or role.
    """
    return getattr(error, "sqlstate", None) is None and _is_permanent(str(error).lower())


class ErrorKind(Enum):
    """The kind of a database error, which decides who can remove its cause; see the module's
    docstring.
    """

    TRANSIENT = "transient"
    INSTALLATION = "installation"
    DATA = "data"


def kind_of(error: psycopg.Error) -> ErrorKind:
    state = error.sqlstate
    if _is_raised_elsewhere(error) and state is not None and not _is_of_session(state):
        return ErrorKind.DATA
    if is_transient(error):
        return ErrorKind.TRANSIENT
    if state is None:
        is_installation = isinstance(error, _CONNECTION_ERRORS)
    else:
        is_installation = state[:2] in _INSTALLATION_CLASSES or state in _INSTALLATION_STATES
    return ErrorKind.INSTALLATION if is_installation else ErrorKind.DATA


def _is_raised_elsewhere(error: psycopg.Error) -> bool:
    """Return whether the error occurred in a foreign function, that is, one called by an operator's trigger
    or constraint.
    """
    return any(_is_of_other_function(line) for line in (error.diag.context or "").splitlines())


def _is_of_other_function(line: str) -> bool:
    if "PL/pgSQL" in line:
        is_assignment = (
            "=" in line
        )  # this line quotes the function's code; the next line contains its name
        return not is_assignment and not _OWN_FUNCTION.search(line)
    name = _QUOTED_NAME.match(line) if "SQL" in line or "PL/" in line else None
    return name is not None and not name[1].startswith("horsies_")


def _is_of_session(state: str) -> bool:
    """Return whether the state of the server or session caused this error, regardless of which function
    raised it. Connection errors do not count, because inside a function they concern a connection that the
    function itself opened.
    """
    return _is_transient_state(state) and not state.startswith("08")


def is_of_data(error: psycopg.Error) -> bool:
    """Return whether single rows cause the error, which then affects no other tasks and runs."""
    return kind_of(error) is ErrorKind.DATA


def is_lock_timeout(error: psycopg.Error) -> bool:
    """Return whether another session held a lock for longer than this session was willing to wait.

    Such an error is transient, but a session that is idle in a transaction can keep a row locked for
    hours.
    """
    return error.sqlstate == "55P03"


def may_last(error: psycopg.Error) -> bool:
    """Return whether the error is usually transient, but may also recur with every change of one particular
    row.
    """
    return error.sqlstate in _LASTING_STATES


def is_time_limit(error: psycopg.Error) -> bool:
    """Return whether a statement or a transaction exceeded its time limit."""
    return error.sqlstate in ("57014", "25P04")


def lacks_right_on(error: psycopg.Error, table: str) -> bool:
    """Return whether the role lacks a privilege on this table. Every translation of the message contains
    the table's name.
    """
    is_right = isinstance(error, psycopg.errors.InsufficientPrivilege)
    return is_right and table in (error.diag.message_primary or "")


def is_of_text(error: psycopg.Error) -> bool:
    """Return whether the database rejects one of the texts that the statement stores.

    A trigger or constraint that an operator added rejects a row, not its text. An error without a
    SQLSTATE means that the statement was too large to send.
    """
    is_of_trigger = "PL/pgSQL" in (error.diag.context or "") or _is_raised_elsewhere(error)
    if is_of_trigger or not is_of_data(error):
        return False
    state = error.sqlstate
    return state is None or state in _TEXT_STATES or _text(error).startswith(_TOO_LARGE)


def _is_permanent(lowered: str) -> bool:
    """Return whether a retry cannot help because the message reports a wrong password, or an unknown
    database or role.
    """
    unknown = _NO_DATABASE.search(lowered) or _NO_ROLE.search(lowered)
    return bool(unknown) or any(mark in lowered for mark in _REFUSALS)


_REMEDIES = (
    (
        "password authentication failed",
        "PostgreSQL refused the user name or password; correct database_url",
    ),
    ("no password supplied", "PostgreSQL requires a password; add it to database_url"),
    (
        "no pg_hba.conf entry",
        "PostgreSQL does not let this user in from this host; see its pg_hba.conf",
    ),
    (
        "is not permitted to log in",
        "PostgreSQL does not let this user log in; grant the role LOGIN or correct database_url",
    ),
    ("in a read-only transaction", _READS_ONLY),
    ("during recovery", _READS_ONLY),
    ("too many clients", _NO_FREE_SLOT),
    ("too many connections", _NO_FREE_SLOT),
    ("remaining connection slots are reserved", _NO_FREE_SLOT),
    (
        "connection refused",
        "No server listens at this address; start PostgreSQL or correct host and port",
    ),
    (
        "no such file or directory",
        "No server owns this socket; start PostgreSQL or correct the host",
    ),
    ("could not translate host", _UNKNOWN_HOST),
    ("failed to resolve host", _UNKNOWN_HOST),
    ("timeout expired", _NO_ANSWER),
    ("timed out", _NO_ANSWER),
)
# libpq's message about a malformed URL quotes the part that may be the password.
_UNREADABLE_URL = re.compile(
    r"percent-encoded|unexpected spaces|\bURI\b|connection info string|in connection string"
)
# If the password contains an unencoded "@", its second half becomes part of the host.
_HALF_PASSWORD = re.compile(r"host '[^']*@")


def describe(error: BaseException) -> str:
    """Return one sentence that explains a database error and its remedy, without any password."""
    if isinstance(error, HorsiesError):
        remedy = f"; {error.help_text}" if error.help_text else ""
        return mask_url(f"{error.message.rstrip('.')}{remedy}.")
    text = _text(error)
    if isinstance(error, StoreUnreachable):
        return text
    if isinstance(error, psycopg.ProgrammingError) and _UNREADABLE_URL.search(text):
        return "database_url cannot be read; percent-encode the special characters of its password."
    if _HALF_PASSWORD.search(text):
        return (
            "The host name is unknown, because the password in database_url holds an '@'; "
            f"percent-encode its special characters, '@' as %40 ({text})."
        )
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return f"{_NO_RIGHT} ({text})."
    if isinstance(error, psycopg.errors.DiskFull):
        is_memory = '"/PostgreSQL.' in text
        return f"{_SHARED_MEMORY_FULL if is_memory else _DISK_FULL} ({text})."
    if is_notification_queue_full(error):
        return f"{_QUEUE_FULL} ({text})."
    if (explained := _remedy(text.lower())) is not None:
        return f"{explained} ({text})."
    return text or type(error).__name__


def _remedy(lowered: str) -> str | None:
    """Return the remedy for an error message, given in lower case; None if the message explains itself."""
    if _NO_DATABASE.search(lowered):
        return "The database does not exist; create it or correct database_url"
    if _NO_ROLE.search(lowered):
        return "The database user does not exist; create it or correct database_url"
    return next((remedy for mark, remedy in _REMEDIES if mark in lowered), None)


def describe_refusal(error: psycopg.Error) -> str:
    """Return an error's SQLSTATE and primary message. DETAIL and CONTEXT are omitted, because they may
    quote a row.
    """
    return f"{error.sqlstate or type(error).__name__} {_text(error).rstrip('.')}"


def _text(error: BaseException) -> str:
    """Return the server's primary message; its DETAIL may quote a whole row with task arguments."""
    primary = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    text = mask_url(" ".join((primary or str(error)).split()))
    return _HALF_PASSWORD.sub("host '***@", text)
