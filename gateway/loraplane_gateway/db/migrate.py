"""Run the migrations as the owner, one process at a time."""

import logging
import re
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.pool import NullPool

import loraplane_gateway
from loraplane_gateway.db.engine import CONNECT_SECONDS, driver_url

LOCK_SECONDS = 60
_LOCK = 5498691725
_REVISION = re.compile("r[0-9]{4}")
log = logging.getLogger(__name__)


def migrations_folder() -> Path:
    """Inside the package in a wheel; beside it in a checkout."""
    package = Path(loraplane_gateway.__file__).parent
    packaged = package / "migrations"
    return packaged if packaged.is_dir() else package.parent.parent / "migrations"


def migrate(owner_url: str, revision: str = "head") -> None:
    """Bring the schema to the newest revision in one transaction; a second caller waits for the first.

    One of a newer release stays as it is: whoever rolls back comes to it, and it is readable by the release before.
    Raises ValueError for a database that somebody else migrates.
    """
    engine = create_engine(driver_url(owner_url), poolclass=NullPool, connect_args={"connect_timeout": CONNECT_SECONDS})
    with engine.begin() as connection:
        connection.execute(text(f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'"))
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        config = Config()
        config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
        config.attributes["connection"] = connection
        if newer := _newer(connection, ScriptDirectory.from_config(config)):
            log.warning("the database's schema is %s, of a newer release: it stays as it is", newer)
        else:
            command.upgrade(config, revision)


def _newer(connection: Connection, scripts: ScriptDirectory) -> str:
    """The database's revision where this release does not know it, else ""."""
    known = {script.revision for script in scripts.walk_revisions()}
    unknown = set(MigrationContext.configure(connection).get_current_heads()) - known
    for revision in unknown:
        if not _REVISION.fullmatch(revision):
            raise ValueError(f"the database is migrated by somebody else (to {revision}): use one of its own")
    return max(unknown, default="")
