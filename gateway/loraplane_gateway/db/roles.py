"""The two service roles. The installer makes them; migrations only grant to them."""

import psycopg
from psycopg import sql

REGISTRY_ROLE = "loraplane_registry"
DATA_ROLE = "loraplane_data"
CONNECT_SECONDS = 10


def create_roles(owner_url: str, *, registry_password: str, data_password: str) -> None:
    """Create both roles, or give them new passwords. `owner_url` needs the right to create roles.

    Passwords leave this process only as SCRAM verifiers, so no server log can hold one.
    """
    with psycopg.connect(owner_url, connect_timeout=CONNECT_SECONDS, options="-c statement_timeout=10s") as connection:
        # Two installers at once must not both find a role missing.
        connection.execute("SELECT pg_advisory_xact_lock(5498691724)")
        for role, password in ((REGISTRY_ROLE, registry_password), (DATA_ROLE, data_password)):
            verifier = connection.pgconn.encrypt_password(password.encode(), role.encode(), b"scram-sha-256").decode()
            known = connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (role,)).fetchone()
            # An owner that is no superuser may only name these attributes while it creates the role.
            head = "ALTER ROLE {} LOGIN" if known else "CREATE ROLE {} LOGIN NOSUPERUSER NOBYPASSRLS"
            connection.execute(sql.SQL(head + " PASSWORD {}").format(sql.Identifier(role), sql.Literal(verifier)))
