"""Workflows: one module for each command, with its config and the function that composes the steps."""
