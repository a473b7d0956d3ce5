"""Recurrences, layers and losses as functions on tensors, and what puts them in the place of a library's own."""
