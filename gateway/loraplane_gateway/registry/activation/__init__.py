"""The flip: which version of an adapter is served."""
