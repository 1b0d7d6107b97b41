"""Why an activation that waits for warmth cannot come true. Only adds columns, with defaults."""

from pathlib import Path

from alembic import op

revision = "r0003"
down_revision = "r0002"
branch_labels = None
depends_on = None

_SQL = Path(__file__).parent.parent / "sql" / "r0003_refusal.sql"


def upgrade() -> None:
    connection = op.get_bind().connection.driver_connection
    if connection is None:
        raise RuntimeError("the migration was given a closed connection")
    connection.execute(_SQL.read_text())


def downgrade() -> None:
    raise NotImplementedError("the registry is rolled back by restoring a backup, never by dropping its columns")
