"""Base models in plain torch, one module per family."""
