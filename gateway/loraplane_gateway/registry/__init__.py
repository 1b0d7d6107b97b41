"""The registry: tenants, keys, claims, versions, activation, artifacts and the change feed. Owns Postgres."""
