"""Load an engine's own Triton kernels from an unpacked wheel, without the engine.

Stand-ins replace what the kernels import from the rest of their engine: a logger, a platform, facts about the device.

B sequences, T tokens, H key heads, G value heads, K key dim, V value dim; states [slots, G, V, K] in float32. Slot 0
stays unused because some engines reserve it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from torch import Tensor

from slimstate.system.errors import PlanError

Inputs = Mapping[str, Tensor]  # keyword arguments of a kernel
StandIns = Mapping[str, Mapping[str, object]]  # members by module name


def _rearrange(x: Tensor, pattern: str, **sizes: int) -> Tensor:
    """Replace einops where it is not installed: the two patterns that the scans use."""
    if pattern == "... p n -> ... (p n)":
        return x.flatten(-2)
    if pattern == "... (p n) -> ... p n":
        return x.unflatten(-1, (-1, sizes["n"]))
    raise ValueError(f"install einops: the pattern {pattern!r} is not supported without it")


@dataclass(frozen=True, kw_only=True)
class Package:
    """An engine's Python package: the files of its kernels by role, without `.py`, and its stand-ins."""

    name: str
    title: str
    modules: Mapping[str, str]
    stand_ins: Callable[[], StandIns]

    def load(self, path: str | Path) -> tuple[str, dict[str, ModuleType]]:
        """Return the version and the modules by role; the engine itself cannot be imported in this process any more."""
        folder = self._find_folder(Path(path))
        package = sys.modules.get(self.name)
        if package is None:
            self._install(folder)
        elif getattr(package, "__path__", None) != [str(folder)]:
            raise PlanError(f"{self.title} is already imported in this process, from another folder than {folder}")
        modules = {
            role: importlib.import_module(f"{self.name}.{path.replace('/', '.')}")
            for role, path in self.modules.items()
        }
        return self._version(folder), modules

    def _find_folder(self, path: Path) -> Path:
        for folder in (path, path / self.name):
            if all((folder / f"{module}.py").is_file() for module in self.modules.values()):
                return folder.resolve()
        parts = ", ".join(dict.fromkeys(f"{self.name}/{Path(module).parent}" for module in self.modules.values()))
        advice = f"unpack {parts} from a wheel of {self.title} and pass the folder that contains {self.name}"
        raise PlanError(f"`kernels`: {path} contains no kernels of {self.title}; {advice}")

    def _version(self, folder: Path) -> str:
        prefix, suffix = f"{self.name}-", ".dist-info"
        metadata = sorted(folder.parent.glob(f"{prefix}*{suffix}"))
        return metadata[0].name.removeprefix(prefix).removesuffix(suffix) if metadata else "of an unknown version"

    def _install(self, folder: Path) -> None:
        """Register empty packages, so that no `__init__.py` of the engine runs, and the stand-ins inside them."""
        stand_ins = dict(self.stand_ins())
        packages = {parent for module in self.modules.values() for parent in Path(module).parents}
        for name in stand_ins:
            path = Path(*name.split(".")[1:])
            packages |= {path, *path.parents}
        for path in sorted(packages, key=lambda package: len(package.parts)):
            name = ".".join((self.name, *path.parts))
            module = ModuleType(name)
            module.__path__ = [str(folder / path)]
            sys.modules[name] = module
        if importlib.util.find_spec("einops") is None:
            stand_ins["einops"] = {"rearrange": _rearrange}
        for name, members in stand_ins.items():
            vars(sys.modules.setdefault(name, ModuleType(name))).update(members)


@dataclass(frozen=True, kw_only=True)
class EngineKernels(ABC):
    """The modules whose functions an engine's layers call. Engines differ only in how prefill is called."""

    PACKAGE: ClassVar[Package]

    version: str
    decode: ModuleType
    prefill: ModuleType
    update: ModuleType
    scan: ModuleType

    @classmethod
    def load(cls, path: str | Path) -> EngineKernels:
        version, modules = cls.PACKAGE.load(path)
        return cls(version=version, **modules)

    @property
    def title(self) -> str:
        return f"{self.PACKAGE.title} {self.version}"

    @abstractmethod
    def gated_prefill(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return outputs and final states of concatenated sequences [1, T, ...] that start from zero states."""

    @abstractmethod
    def mamba_prefill(self, inputs: Inputs, chunk: int) -> tuple[Tensor, Tensor]:
        """Return outputs and final states of concatenated sequences [T, ...], each a whole number of chunks."""
