"""The ordered change feed."""
