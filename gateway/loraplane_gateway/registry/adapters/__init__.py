"""Adapters and their versions, as they are."""
