"""Which replica a request goes to: endpoints and `/state` streams in, a counted lease out."""
