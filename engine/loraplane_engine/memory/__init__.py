"""The device arena and the pages in it."""
