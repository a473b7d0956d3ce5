"""One module for each command: its config, and one function that composes steps."""
