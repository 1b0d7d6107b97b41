"""Alembic's entry. `loraplane_gateway.db.migrate` opens the connection, takes the lock and owns the transaction."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
with context.begin_transaction():
    context.run_migrations()
