"""The verbs as Python functions: for scripts and notebooks, with models and texts that are in memory or in files."""
