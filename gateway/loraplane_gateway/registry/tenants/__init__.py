"""Tenants and the namespaces that may claim for them."""
