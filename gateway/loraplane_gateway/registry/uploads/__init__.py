"""Resumable uploads of the two files of an artifact."""
