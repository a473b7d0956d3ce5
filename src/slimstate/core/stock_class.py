"""The class that loads a model with no code of ours, and the lines of Python that do so: for cards and reports."""

from slimstate.system.value import Value


class StockClass(Value):
    """The library that registers an architecture, and the class of transformers that loads it."""

    library: str
    name: str

    def loading_code(self, folder: str, *others: str) -> str:
        """Return Python code that loads a model from `folder`, an expression, and also imports the classes `others`."""
        registration = "import fla  # registers the architecture\n" if self.library == "fla" else ""
        classes = ", ".join((self.name, *others))
        return f"{registration}from transformers import {classes}\n\nmodel = {self.name}.from_pretrained({folder})"


FLA = StockClass(library="fla", name="AutoModelForCausalLM")
