"""API keys: made, listed, revoked."""
