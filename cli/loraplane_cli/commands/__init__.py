"""The commands of `loraplane`, one module per subject."""
