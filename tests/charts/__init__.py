"""The chart, rendered: no cluster needed, but helm."""
