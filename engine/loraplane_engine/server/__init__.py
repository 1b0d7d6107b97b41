"""The engine's server process: HTTP, text, fetching of artifacts and the disk tier."""
