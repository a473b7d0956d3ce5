"""Run an engine in a process of its own, and compare its log-probabilities with those of transformers."""
