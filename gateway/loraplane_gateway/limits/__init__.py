"""Redis: the in-flight ledger, demand counters, revocation notices. Nothing here can hold a request up."""
