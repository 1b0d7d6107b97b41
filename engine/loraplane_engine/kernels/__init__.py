"""Grouped LoRA: one contract, several forms."""
