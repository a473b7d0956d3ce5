"""Measure models: perplexity, tasks, recall, their states, and sweeps over many cuts."""
