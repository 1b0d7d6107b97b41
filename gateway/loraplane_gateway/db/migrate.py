"""Run the migrations as the owner, one process at a time."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

import loraplane_gateway
from loraplane_gateway.db.engine import CONNECT_SECONDS, driver_url

LOCK_SECONDS = 60
_LOCK = 5498691725


def migrations_folder() -> Path:
    """Inside the package in a wheel; beside it in a checkout."""
    package = Path(loraplane_gateway.__file__).parent
    packaged = package / "migrations"
    return packaged if packaged.is_dir() else package.parent.parent / "migrations"


def migrate(owner_url: str, revision: str = "head") -> None:
    """Bring the schema to the newest revision in one transaction; a second caller waits for the first."""
    engine = create_engine(driver_url(owner_url), poolclass=NullPool, connect_args={"connect_timeout": CONNECT_SECONDS})
    with engine.begin() as connection:
        connection.execute(text(f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'"))
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        config = Config()
        config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
