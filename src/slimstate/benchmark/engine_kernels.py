"""An engine's own Triton kernels, from an unpacked wheel and without the engine: what it runs where people serve.

What the kernels import of the rest of their engine, a logger, a platform, a few lines about devices, is stood in for.

B sequences, T tokens, H key heads, G value heads, K key dim, V value dim; states [slots, G, V, K] in float32. Slot 0 is
left free: some engines never use it.
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

Given = Mapping[str, Tensor]
StandIns = Mapping[str, Mapping[str, object]]


def _rearranged(x: Tensor, pattern: str, **sizes: int) -> Tensor:
    """The two patterns of einops that the scans use, where einops is not installed."""
    known = {
        "... p n -> ... (p n)": lambda: x.flatten(-2),
        "... (p n) -> ... p n": lambda: x.unflatten(-1, (-1, sizes["n"])),
    }
    return known[pattern]()


@dataclass(frozen=True, kw_only=True)
class Package:
    """Where an engine has its kernels: `modules` are files without their ending, by what they are for.

    `stand_ins` are other modules of the engine, by what the kernels take from them.
    """

    name: str
    title: str
    modules: Mapping[str, str]
    stand_ins: Callable[[], StandIns]

    def load(self, path: str | Path) -> tuple[str, dict[str, ModuleType]]:
        """The version and the modules; once a process, in which the engine cannot be imported any more."""
        folder = self._folder(Path(path))
        ours = sys.modules.get(self.name)
        if ours is not None and getattr(ours, "__path__", None) != [str(folder)]:
            raise PlanError(f"{self.title}, or another folder of its kernels, is already imported in this process")
        if ours is None:
            self._install(folder)
        modules = {
            role: importlib.import_module(f"{self.name}.{place.replace('/', '.')}")
            for role, place in self.modules.items()
        }
        return self._version(folder), modules

    def _folder(self, path: Path) -> Path:
        for folder in (path, path / self.name):
            if all((folder / f"{place}.py").is_file() for place in self.modules.values()):
                return folder.resolve()
        parts = ", ".join(dict.fromkeys(f"{self.name}/{Path(place).parent}" for place in self.modules.values()))
        way = f"unpack {parts} of a wheel of {self.title}, and name the folder that holds {self.name}"
        raise PlanError(f"`kernels`: {path} holds none of {self.title}'s: {way}")

    def _version(self, folder: Path) -> str:
        before, after = f"{self.name}-", ".dist-info"
        found = sorted(folder.parent.glob(f"{before}*{after}"))
        return found[0].name.removeprefix(before).removesuffix(after) if found else "of an unknown version"

    def _install(self, folder: Path) -> None:
        """Packages without what their files would import, and the stand-ins inside of them."""
        given = dict(self.stand_ins())
        packages = {parent for place in self.modules.values() for parent in Path(place).parents}
        for name in given:
            place = Path(*name.split(".")[1:])
            packages |= {place, *place.parents}
        for package in sorted(packages, key=lambda each: len(each.parts)):
            name = ".".join((self.name, *package.parts))
            module = ModuleType(name)
            module.__path__ = [str(folder / package)]
            sys.modules[name] = module
        if importlib.util.find_spec("einops") is None:
            given["einops"] = {"rearrange": _rearranged}
        for name, members in given.items():
            vars(sys.modules.setdefault(name, ModuleType(name))).update(members)


@dataclass(frozen=True, kw_only=True)
class EngineKernels(ABC):
    """The modules whose functions an engine's layers call; those for one token are called alike in all engines."""

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

    def gated_decode(self, given: Given, state: Tensor) -> Tensor:
        """One token of each sequence; `state` goes on in place. The kernel makes the gate and normalises queries."""
        out = given["out"]
        self.decode.fused_recurrent_gated_delta_rule_packed_decode(
            mixed_qkv=given["mixed"],
            a=given["a"],
            b=given["b"],
            A_log=given["A_log"],
            dt_bias=given["dt_bias"],
            scale=state.shape[-1] ** -0.5,
            initial_state=state,
            out=out,
            ssm_state_indices=given["slots"],
            use_qk_l2norm_in_kernel=True,
        )
        return out

    def mamba_decode(self, given: Given, state: Tensor) -> Tensor:
        """One token of each sequence; `state` goes on in place."""
        out = given["out"]
        self.update.selective_state_update(
            state,
            given["x"],
            given["dt"],
            given["A"],
            given["B"],
            given["C"],
            D=given["D"],
            dt_bias=given["dt_bias"],
            dt_softplus=True,
            state_batch_indices=given["slots"],
            out=out,
        )
        return out

    @abstractmethod
    def gated_prefill(self, given: Given) -> tuple[Tensor, Tensor]:
        """Sequences end to end [1, T, ...], from states of zeros: outputs and last states."""

    @abstractmethod
    def mamba_prefill(self, given: Given, chunk: int) -> tuple[Tensor, Tensor]:
        """Sequences end to end [T, ...], each of whole chunks, from states of zeros: outputs and last states."""
