"""Async engines in which every wait has a deadline."""

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

CONNECT_SECONDS = 3
STATEMENT_SECONDS = 5
LOCK_SECONDS = 4
POOL_WAIT_SECONDS = 5.0


def driver_url(url: str) -> URL:
    """A plain postgresql:// URL for SQLAlchemy with psycopg. Raises ValueError for any other kind."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        parsed = None
    if parsed is None or parsed.drivername != "postgresql":
        raise ValueError("a database URL reads postgresql://USER:PASSWORD@HOST:PORT/DATABASE")
    return parsed.set(drivername="postgresql+psycopg")


def create_engine(url: str, *, application: str, pool_size: int = 8) -> AsyncEngine:
    """The caller disposes of the engine. `application` is what pg_stat_activity shows."""
    return create_async_engine(
        driver_url(url),
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=POOL_WAIT_SECONDS,
        pool_pre_ping=True,
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
