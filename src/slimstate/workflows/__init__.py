"""Workflows: one module for each command, with the function that composes its steps; `options` has all configs.

Parameters of all functions:
    config: The config of the command, such as a `PruneConfig`.
    options: Options of the config by name, with a config or without; they override it.
    tokenizer: The tokenizer of models in memory.
    progress: Whether to show progress, or a `Reporter` of your own.
"""
