"""Adapter artifacts before any engine sees them: digest, layout and preflight. Torch-free."""
