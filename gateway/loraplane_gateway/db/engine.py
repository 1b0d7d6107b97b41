"""Async engines in which every wait has a deadline, and which errors mean that Postgres is away."""

import psycopg
from sqlalchemy import event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from loraplane_gateway.db import times
from loraplane_gateway.urls import check_url

CONNECT_SECONDS = 3
STATEMENT_SECONDS = 5
LOCK_SECONDS = 4
POOL_WAIT_SECONDS = 5.0
#: What says nothing about the statement: Postgres cannot be reached, stops, or takes too long. Trying later may help.
#: Any other error of the database is a defect of ours, or of the schema.
AWAY: tuple[type[Exception], ...] = (
    OperationalError,
    InterfaceError,
    PoolTimeout,
    psycopg.OperationalError,
    psycopg.InterfaceError,
    TimeoutError,
)
#: The same for a connection of one's own, whose socket may fail under it.
LOST: tuple[type[Exception], ...] = (*AWAY, OSError)


def is_unmigrated(error: BaseException) -> bool:
    """Whether the statement failed since the migrations of this release have not run yet."""
    return isinstance(getattr(error, "orig", error), psycopg.errors.UndefinedTable | psycopg.errors.UndefinedColumn)


def named(error: BaseException) -> str:
    """The driver's name of a database error, for logs: its text may hold values."""
    return type(getattr(error, "orig", None) or error).__name__


def driver_url(url: str) -> URL:
    """A plain postgresql:// URL for SQLAlchemy with psycopg. Raises ValueError, without the URL, for any other."""
    check_url(url, ("postgresql",), "postgresql://USER:PASSWORD@HOST:PORT/DATABASE")
    return make_url(url).set(drivername="postgresql+psycopg")


def create_engine(url: str, *, application: str, pool_size: int = 8) -> AsyncEngine:
    """The caller disposes of the engine. `application` is what pg_stat_activity shows.

    Connections are not tried before use; `sessions.transaction` copes with one that was lost.
    """
    engine = create_async_engine(
        driver_url(url),
        pool_size=pool_size,
        max_overflow=0,
        pool_use_lifo=True,  # the connections in use have prepared what is asked often
        pool_timeout=POOL_WAIT_SECONDS,
        hide_parameters=True,  # a logged statement must not show what was bound to it
        connect_args={
            "connect_timeout": CONNECT_SECONDS,
            "application_name": application,
            # A server that vanished without a word: the kernel gives up instead of waiting for minutes.
            "tcp_user_timeout": STATEMENT_SECONDS * 1000,
            "options": f"-c statement_timeout={STATEMENT_SECONDS}s -c lock_timeout={LOCK_SECONDS}s"
            " -c idle_in_transaction_session_timeout=15s",
        },
    )
    event.listen(engine.sync_engine, "connect", times.register)
    return engine
