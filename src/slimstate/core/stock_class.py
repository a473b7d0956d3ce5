"""The class that loads a model with no code of ours, and the lines of Python that do so: for cards and reports."""

from slimstate.system.value import Value

CODE = """{registration}from transformers import {classes}

model = {loader}.from_pretrained({folder})"""
REGISTRATION = "import fla  # registers the architecture\n"


class StockClass(Value):
    """The library that registers an architecture, and the class of transformers that loads it."""

    library: str
    name: str

    def loading_code(self, folder: str, *others: str) -> str:
        """Return Python code that loads a model from `folder`, an expression, and also imports the classes `others`."""
        registration = REGISTRATION if self.library == "fla" else ""
        classes = ", ".join((self.name, *others))
        return CODE.format(registration=registration, classes=classes, loader=self.name, folder=folder)


FLA = StockClass(library="fla", name="AutoModelForCausalLM")
