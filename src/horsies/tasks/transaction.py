"""``tx``: a task's transaction, which commits its effects and its outcome together.

A task that declares a parameter of type ``TaskTransaction`` receives the transaction from its worker. The
connection is opened at its first use by the task; ``worker/child/transact.py`` begins and ends the
transaction.
"""

from __future__ import annotations

from typing import Any, NoReturn, Protocol, TypeVar

from psycopg import AsyncConnection, Connection

from horsies.errors import TransactionMisuse

R = TypeVar("R")

CALLED_DIRECTLY = (
    "This task does not run in a worker, so it has no transaction; send it to a worker, or run it with "
    "run_pending in a test."
)


class _Session(Protocol):
    """The child's side of a task's transaction: it opens the connection and records the outcome."""

    def connection(self) -> Connection[Any]: ...

    def record_in(self, transaction: object, result: object) -> None: ...


class TaskTransaction:
    """A running task's transaction: its rows and its outcome are committed together, or not at all.

    If the function returns a success, the outcome, the attempt, the progress of its run and the tasks
    sent with ``transaction=tx`` commit with the rows that it wrote through ``tx.connection``. If it
    returns an error or raises, all of this is rolled back, and only the failure is recorded. For a task
    that never uses ``connection``, none is opened.

    Example:
        @app.task("book_payment", retry_policy=RetryPolicy.fixed([1, 5], auto_retry_for=["WORKER_CRASHED"]))
        def book_payment(order_id: int, tx: TaskTransaction = INJECTED) -> int:
            row = tx.connection.execute(
                "UPDATE orders SET paid = true WHERE id = %s RETURNING total", (order_id,)
            ).fetchone()
            receipt.with_options(transaction=tx).send(order_id)
            return row[0]
    """

    is_task_transaction = True
    is_asynchronous = False
    no_argument = "a worker passes the transaction of a task; leave it out"

    def __init__(self, attempt: int, fencing_token: int, session: _Session) -> None:
        self._attempt = attempt
        self._fencing_token = fencing_token
        self._session = session

    def __repr__(self) -> str:
        return f"TaskTransaction(attempt={self._attempt}, fencing_token={self._fencing_token})"

    @property
    def connection(self) -> Connection[Any]:
        """The psycopg connection, inside the open transaction.

        The library commits it: ``commit()``, ``rollback()``, ``close()``, autocommit and the statements
        COMMIT and ROLLBACK are rejected, and so is any use after the task has ended. To undo a part,
        use ``with tx.connection.transaction():``. The isolation level is the database's, or the one set
        by ``SET TRANSACTION ISOLATION LEVEL ...`` as the first statement.
        """
        return self._session.connection()

    def record_in(self, transaction: object, result: R) -> R:
        """Record the task's success in your own transaction, and return `result`.

        `transaction` is a SQLAlchemy session or connection, Django's connection or a psycopg
        connection, on the application's database. Commit it right afterwards and return the same
        result: until then the task's row is locked, and after two idle seconds the server ends the
        session. If the transaction does not commit, the task fails with TRANSACTION_NOT_COMMITTED.

        Example:
            with Session(engine) as session, session.begin():
                session.add(Payment(order_id))
                return tx.record_in(session, order_id)
        """
        self._session.record_in(transaction, result)
        return result

    @property
    def attempt(self) -> int:
        """The number of this attempt, starting at 1."""
        return self._attempt

    @property
    def fencing_token(self) -> int:
        """A number that is higher for every later start of this task, for systems outside this database.

        A system that remembers the highest token it has seen and rejects lower ones is safe from an
        attempt that continues although its task was given to another worker.
        """
        return self._fencing_token


class _AsyncSession(Protocol):
    async def connection(self) -> AsyncConnection[Any]: ...

    async def record_in(self, transaction: object, result: object) -> None: ...


class AsyncTaskTransaction:
    """The version of ``TaskTransaction`` for an ``async def`` task.

    Example:
        @app.task("book_payment")
        async def book_payment(order_id: int, tx: AsyncTaskTransaction = INJECTED) -> None:
            connection = await tx.connection()
            await connection.execute("UPDATE orders SET paid = true WHERE id = %s", (order_id,))
            await receipt.with_options(transaction=tx).send_async(order_id)
    """

    is_task_transaction = True
    is_asynchronous = True
    no_argument = TaskTransaction.no_argument

    def __init__(self, attempt: int, fencing_token: int, session: _AsyncSession) -> None:
        self._attempt = attempt
        self._fencing_token = fencing_token
        self._session = session

    def __repr__(self) -> str:
        return f"AsyncTaskTransaction(attempt={self._attempt}, fencing_token={self._fencing_token})"

    async def connection(self) -> AsyncConnection[Any]:
        """Return the psycopg connection, inside the open transaction; see ``TaskTransaction.connection``.

        A child has four sessions for such transactions; further tasks wait for a free session.
        """
        return await self._session.connection()

    async def record_in(self, transaction: object, result: R) -> R:
        """Like ``TaskTransaction.record_in``, but for an AsyncSession or another asynchronous connection."""
        await self._session.record_in(transaction, result)
        return result

    @property
    def attempt(self) -> int:
        """The number of this attempt, starting at 1."""
        return self._attempt

    @property
    def fencing_token(self) -> int:
        """A number that is higher for every later start of this task; see ``TaskTransaction``."""
        return self._fencing_token


class _Injected:
    """The default of a parameter that a worker passes. Only a direct call, which is a mistake, can use this
    default.
    """

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TransactionMisuse(CALLED_DIRECTLY)

    def __repr__(self) -> str:
        return "INJECTED"


INJECTED: Any = _Injected()
"""The default of a parameter that the worker passes: ``tx: TaskTransaction = INJECTED``. With it, a type
checker accepts a ``send`` without the parameter."""
