"""Whether an engine computes what transformers computes: ask it in a process of its own, compare, give a verdict."""
