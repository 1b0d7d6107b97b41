"""One object claims one adapter; what objects register."""
