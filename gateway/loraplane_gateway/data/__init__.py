"""The data gateway: the OpenAI port. Authenticates, resolves, routes by residency, streams through."""
