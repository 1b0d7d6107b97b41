"""Postgres: engines, tables, scopes, roles, migrations. With the repositories, the only place that holds SQL."""
