"""Benchmarks: each prints JSON lines and names the command and the machine; peers run side by side."""
