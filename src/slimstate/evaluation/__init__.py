"""What a model is worth: perplexity, tasks, recall, its states, and every cut that could be made of it."""
