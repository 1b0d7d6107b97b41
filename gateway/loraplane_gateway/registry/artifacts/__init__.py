"""The content-addressed store and the listener that engines fetch from."""
