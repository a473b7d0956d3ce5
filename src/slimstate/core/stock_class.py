"""How a model is loaded by its stock class, as lines of Python: for model cards and for reports."""

from __future__ import annotations

from collections.abc import Mapping

Loader = Mapping[str, str]  # `library`, where the class is registered, and `class`, as transformers names it
FLA: Loader = {"library": "fla", "class": "AutoModelForCausalLM"}
CODE = """{registration}from transformers import {classes}

model = {loader}.from_pretrained({folder})"""
REGISTRATION = "import fla  # registers the architecture\n"


def loading_code(loader: Loader, folder: str, *others: str) -> str:
    """Python that loads a model from `folder`, an expression, with other classes imported beside its own."""
    registration = REGISTRATION if loader["library"] == "fla" else ""
    classes = ", ".join((loader["class"], *others))
    return CODE.format(registration=registration, classes=classes, loader=loader["class"], folder=folder)
