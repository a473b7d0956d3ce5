"""Names of the files that lie beside the weights of a model, for code that must not import torch."""

PLAN = "slimstate_plan.json"
CONFIG = "slimstate_config.json"  # the config of the run that wrote the folder
