"""The registry's first schema: tables, triggers, access (design §6)."""

from pathlib import Path

from alembic import op

revision = "r0001"
down_revision: str | None = None
branch_labels = None
depends_on = None

_SQL = Path(__file__).parent.parent / "sql"


def upgrade() -> None:
    # The driver's own cursor: the files hold several statements and literal percent signs.
    connection = op.get_bind().connection.driver_connection
    if connection is None:
        raise RuntimeError("the migration was given a closed connection")
    for part in ("tables", "triggers", "access"):
        connection.execute((_SQL / f"{revision}_{part}.sql").read_text())


def downgrade() -> None:
    raise NotImplementedError("the registry is rolled back by restoring a backup, never by dropping its tables")
