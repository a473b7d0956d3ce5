"""The registry of formats of quantised checkpoints. A format says how a weight is stored and where its rows are.

A new format is one module of this package, which lists one or more instances of `Format` as FORMATS = (...).
"""

import sys
from collections.abc import Mapping
from typing import Any

from slimstate.checkpoints.formats.contract import Format, Module, QuantisedWeight, Settings
from slimstate.system.errors import ModelError, quoted
from slimstate.system.plugins import Registry
from slimstate.system.value import Value

__all__ = [
    "FORMATS", "Format", "Module", "Quantisation", "QuantisedWeight", "quantisation_of", "unquantised",
    "with_plain_modules",
]  # fmt: skip

FORMATS: Registry[Format] = Registry(
    Format, sys.modules[__name__], "FORMATS", name=lambda each: each.method, order=lambda each: each.method
)
FIELDS = ("quantization_config", "quantization")  # the second is that of MLX


class Quantisation(Value):
    """What a config says about the quantisation of its model; `format` is None for one that is not known."""

    method: str
    settings: Settings
    format: Format | None

    @property
    def in_transformers(self) -> bool:
        return self.format is not None and self.format.in_transformers

    def read(self, module: Module, inputs: int) -> QuantisedWeight:
        """Return the weight of a module that is not plain, or refuse it."""
        if self.format is None:
            part = min(module.tensors, key=lambda name: (name != "weight", name))
            known = ", ".join(FORMATS)
            raise ModelError(
                f"{quoted(module.name(part))} is quantised by {quoted(self.method)}, which cannot be cut ({known} can):"
                " cut the unquantised model and quantise the result"
            )
        return self.format.read(module, inputs, self.settings)

    def values(self, module: Module) -> int:
        """Return the number of weights in the tensors of a module."""
        if self.format is None or module.is_plain:
            return sum(info.elements for info in module.tensors.values())
        return self.format.values(module, self.settings)


def quantisation_of(config: Mapping[str, Any]) -> Quantisation | None:
    """Return the quantisation that a config describes, or None."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, Mapping) else {}):
        for field in FIELDS:
            if (settings := part.get(field)) is None:
                continue
            if not isinstance(settings, Mapping):
                raise ModelError(f"config.json: {field} must have the settings of a method, got {quoted(settings)}")
            method = _method(settings)
            return Quantisation(method=method, settings=settings, format=FORMATS.get(method))
    return None


def _method(settings: Settings) -> str:
    """Return the name of a format for what configs call it."""
    method, producer = settings.get("quant_method"), settings.get("producer")
    if method is None and isinstance(producer, Mapping):
        method = producer.get("name")
    if method is None and {"bits", "group_size"} <= settings.keys():
        return "mlx"
    name = str(method or "a method without a name").lower()
    if name == "auto-round":  # stores weights as one of the others does
        return next((kind for kind in ("gptq", "awq") if kind in str(settings.get("packing_format"))), name)
    return "modelopt" if name.startswith("modelopt") else name


def unquantised(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config of the same model with plain weights."""
    plain = {name: value for name, value in config.items() if name not in FIELDS}
    if isinstance(config.get("text_config"), Mapping):
        plain["text_config"] = {name: value for name, value in config["text_config"].items() if name not in FIELDS}
    return plain


def with_plain_modules(config: Mapping[str, Any], modules: list[str]) -> dict[str, Any]:
    """Return a config that lists more modules as not quantised."""
    quantisation = quantisation_of(config)
    assert quantisation is not None
    assert quantisation.format is not None
    field = quantisation.format.unquantised
    assert field is not None, f"{quantisation.method} stores no scales of blocks"

    def extended(part: Mapping[str, Any]) -> dict[str, Any]:
        result = dict(part)
        for name in FIELDS:
            if (settings := part.get(name)) is not None:
                key = "ignored_layers" if field not in settings and "ignored_layers" in settings else field
                listed = settings.get(key) or []
                if not isinstance(listed, list):
                    raise ModelError(f"config.json: {name}.{key} must be a list of modules, got {quoted(listed)}")
                result[name] = {**settings, key: [*listed, *modules]}
        return result

    after = extended(config)
    if isinstance(config.get("text_config"), Mapping):
        after["text_config"] = extended(config["text_config"])
    return after
