"""Load a model so that it runs on the device at hand: fla's kernels on a GPU, PyTorch ones on a CPU."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from slimstate.checkpoints.reader import read_json
from slimstate.families import FAMILIES, Family, family_of, language_of, logit_factor, tap_of
from slimstate.families.contract import Library
from slimstate.kernels.autotune import compile_side_by_side, leave_out_faulty, tune_briefly
from slimstate.kernels.patches import gated_backward_refused
from slimstate.system import distributed
from slimstate.system.errors import ModelError, PlanError

TOKENS_AT_ONCE = {"cpu": 2048, "cuda": 16384}  # of a forward pass over many windows
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """A model and its tokenizer, ready to run; `kernels` says in words what runs."""

    model: Any
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    kernels: str
    offloaded: int = 0  # weights that are fetched only while their layer runs
    scratch: Any = None  # the folder they are fetched from, removed with this object


def pick_device(name: str | None) -> torch.device:
    """`cpu`, `cuda`, or by default the GPU where there is one; each of several processes has its own."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise PlanError(f"unknown device {name!r}; there are cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise PlanError("no CUDA device here; use --device cpu")
    if name == "cuda" and distributed.count_here() > torch.cuda.device_count():
        here, cards = distributed.count_here(), torch.cuda.device_count()
        raise PlanError(f"{here} processes for {cards} GPUs: start at most one for each GPU, or use --device cpu")
    return distributed.local_device(name)


def pick_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU and float32 on a CPU unless said otherwise."""
    if name is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise PlanError(f"unknown dtype {name!r}; there are {', '.join(DTYPES)}")
    return DTYPES[name]


def describe_kernels(device: torch.device, dtype: torch.dtype, library: Library = "fla") -> str:
    precision = str(dtype).removeprefix("torch.")
    if device.type == "cpu":
        return f"PyTorch {torch.__version__} on the CPU, {precision}"
    gated = "; the gated backward in PyTorch, which fla refuses here" if gated_backward_refused() else ""
    card = torch.cuda.get_device_name(device)
    if library == "transformers":
        import transformers

        return f"what transformers {transformers.__version__} chooses on {card}, {precision}{gated}"
    import fla
    import triton

    return f"fla {fla.__version__} (Triton {triton.__version__}) on {card}, {precision}{gated}"


def prepare_fla() -> None:
    """Import fla and make its models run on this machine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fla remarks on missing GPUs and flash-attn, which the PyTorch kernels cover
        logging.getLogger("fla").setLevel(logging.ERROR)
        try:
            import fla  # noqa: F401
        except ImportError as error:
            raise ModelError(f"flash-linear-attention cannot be imported: {error}") from error
        from fla.utils import IS_NVIDIA_HOPPER

        from slimstate.kernels.fla_modules import install

        install()
        if torch.cuda.is_available():
            _tune_quickly()
            if IS_NVIDIA_HOPPER:
                leave_out_faulty()


def prepare(model_type: str) -> None:
    """Make the models of a family run on this machine, whatever their library would choose by itself."""
    family = FAMILIES.get(model_type) or family_of({"model_type": model_type})
    if family.library == "fla":
        prepare_fla()
        return
    from slimstate.kernels.fla_modules import use_reference

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        use_reference(tap_of(family))
        if torch.cuda.is_available():
            _tune_quickly()


def _tune_quickly() -> None:
    tune_briefly()
    mine = len(os.sched_getaffinity(0)) // distributed.count_here()
    compile_side_by_side(int(os.environ.get("SLIMSTATE_COMPILING", mine)))


def stock_class(family: Family, *, whole: bool = False) -> tuple[Any, Any]:
    """The config class and the model class of a family: a language model, or with `whole` all that the files hold.

    Transformers' own classes are taken by name: importing fla registers other ones for some model types.
    """
    import transformers
    from transformers.models.auto import configuration_auto, modeling_auto

    if family.library == "fla":
        return transformers.AutoConfig, transformers.AutoModelForCausalLM
    names, kind = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, language_of(family)
    if whole:
        names, kind = {**names, **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}, family.model_type
    try:
        found = configuration_auto.CONFIG_MAPPING_NAMES[family.model_type], names[kind]
    except KeyError as error:
        raise ModelError(f"transformers {transformers.__version__} has no {family.model_type}") from error
    return getattr(transformers, found[0]), getattr(transformers, found[1])


def tied_weights(model: Any) -> frozenset[str]:
    """The parameters that are others by another name, and need not be in the files."""
    return frozenset(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else frozenset()


Difference = tuple[str, list[int] | None, list[int]]


def stock_differences(config: Mapping[str, Any], shapes: Mapping[str, list[int]]) -> list[Difference]:
    """Where tensors of these shapes are not what the stock class asks for: name, shape or None, shape asked for.

    Nothing is allocated. Transformers loads tensors without contents, so that whatever it renames or joins is.
    """
    family = family_of(config)
    if family.library == "transformers":
        return _loading_differences(family, config, shapes)
    model = stock_model(config)
    tied = tied_weights(model)
    expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    return [
        (name, shapes.get(name), shape)
        for name, shape in expected.items()
        if shapes.get(name) != shape and not (name in tied and name not in shapes)
    ]


def _loading_differences(
    family: Family, config: Mapping[str, Any], shapes: Mapping[str, list[int]]
) -> list[Difference]:
    prepare(family.model_type)
    config_class, model_class = stock_class(family, whole=True)
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    with warnings.catch_warnings(), refusals():
        warnings.simplefilter("ignore")
        _quiet_transformers()
        model, report = model_class.from_pretrained(
            None,
            config=_settings(config_class, config),
            state_dict=empty,
            device_map="meta",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    asked = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    missing: list[Difference] = [(name, None, asked[name]) for name in sorted(report["missing_keys"])]
    return missing + [(name, list(found), list(want)) for name, found, want in sorted(report["mismatched_keys"])]


def _settings(config_class: Any, config: Mapping[str, Any]) -> Any:
    """A config as its class reads it from a file: numbers such as infinity are written in a way of their own there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(dict(config)), encoding="utf-8")
        return config_class.from_json_file(path)


def text_settings(family: Family, settings: Any) -> Any:
    """The part of a config of transformers that is about the language model.

    Where that has a class of another type, whether embeddings are tied is said by the config of the whole.
    """
    text = settings.get_text_config()
    if language_of(family) != family.model_type:
        text.tie_word_embeddings = settings.tie_word_embeddings
    return text


@contextmanager
def refusals() -> Iterator[None]:
    """What a stock class has against a config, as one line."""
    try:
        yield
    except (ValueError, AssertionError, TypeError, RuntimeError, StrictDataclassError) as error:
        raise ModelError(f"the stock class refuses this config: {' '.join(str(error).split())}") from error


def stock_model(config: Mapping[str, Any], device: torch.device | None = None) -> Any:
    """The stock language model of a config with random weights on a device; without one nothing is allocated."""
    family = family_of(config)
    prepare(family.model_type)
    config_class, model_class = stock_class(family)
    with warnings.catch_warnings(), device or torch.device("meta"), refusals():
        warnings.simplefilter("ignore")
        if family.library == "transformers":
            return model_class(text_settings(family, _settings(config_class, config)))
        others = {key: value for key, value in config.items() if key != "model_type"}
        return model_class.from_config(config_class.for_model(family.model_type, **others), trust_remote_code=False)


def load(folder: Path, *, device: str | None = None, dtype: str | None = None) -> Runtime:
    """The stock model class on the device, in evaluation mode, with its tokenizer."""
    where = pick_device(device)
    precision = pick_dtype(dtype, where)
    family = family_of(read_json(folder / "config.json"))
    prepare(family.model_type)
    config_class, model_class = stock_class(family)
    _quiet_transformers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = config_class.from_pretrained(folder, trust_remote_code=False)
        model, report = model_class.from_pretrained(
            folder,
            config=settings if family.library == "fla" else text_settings(family, settings),
            dtype=precision,
            output_loading_info=True,
        )
    wrong = [*report["missing_keys"], *report["mismatched_keys"]]
    if family.library == "fla":  # files of transformers may hold more, such as a vision tower
        wrong += report["unexpected_keys"]
    if wrong:
        raise ModelError(f"{folder}: the stock class does not load {len(wrong)} tensors, such as {wrong[0]}")
    return Runtime(
        model=model.to(where).eval(),
        tokenizer=load_tokenizer(folder),
        device=where,
        dtype=precision,
        kernels=describe_kernels(where, precision, family.library),
    )


def states_before_head(model: Any, ids: Tensor) -> Tensor:
    """What the output head makes the logits of tokens `ids` [B, T] from: logits are these times its weight alone."""
    hidden: Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    factor = logit_factor({"model_type": model.config.model_type, **vars(model.config)})
    return hidden if factor == 1 else hidden * factor


def _quiet_transformers() -> None:
    """Its progress bars and remarks are about loading, of which the reporter speaks."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def load_tokenizer(folder: Path | str) -> Any:
    """The tokenizer of a folder, or of a hub repository by its name."""
    from transformers import AutoTokenizer

    _quiet_transformers()
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder} has no usable tokenizer: {str(error).splitlines()[0]}") from error
