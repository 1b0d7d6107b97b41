"""Adapters inside one engine: their image on disk, their tiers, their rows of the device table."""
