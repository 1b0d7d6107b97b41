"""Weighted traffic, activation that waits for warmth, a claim's present source, counted parameters.

Only adds columns, with defaults for rows that the previous release writes.
"""

from pathlib import Path

from alembic import op

revision = "r0002"
down_revision = "r0001"
branch_labels = None
depends_on = None

_SQL = Path(__file__).parent.parent / "sql" / "r0002_activation.sql"


def upgrade() -> None:
    connection = op.get_bind().connection.driver_connection
    if connection is None:
        raise RuntimeError("the migration was given a closed connection")
    connection.execute(_SQL.read_text())


def downgrade() -> None:
    raise NotImplementedError("the registry is rolled back by restoring a backup, never by dropping its columns")
