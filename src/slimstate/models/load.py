"""Load a model so that it runs on this device: kernels of fla on a GPU, functions of PyTorch on a CPU.

A model larger than the device is loaded by accelerate: layers on GPUs, in host memory and on disk, all run on the
device. accelerate fetches weights when the module that holds them is called. Some layers use the weights of a submodule
without calling it, and would silently compute with undefined memory: so all of a layer is fetched when it is entered.
"""

import io
import logging
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimstate.checkpoints.reader import Checkpoint
from slimstate.families import family_of
from slimstate.models.devices import free_bytes, pick_device, pick_dtype
from slimstate.models.options import LoadOptions, RunOptions, parse_limits
from slimstate.models.prepare import describe_kernels, prepare
from slimstate.models.stock import (
    quiet_transformers,
    refusals,
    stock_class,
    stock_model,
    text_settings,
    tied_weights,
    without_tower,
)
from slimstate.system.errors import ModelError, PlanError, quoted, reason_of
from slimstate.system.input_files import check_name, files_inside
from slimstate.system.json_files import read_json
from slimstate.system.tested_versions import warn_about_untested
from slimstate.system.value import Value

TOKENIZER_CONFIG = "tokenizer_config.json"
PACKAGES = {"compressed-tensors": "compressed_tensors", "fp8": "", "gptq": "gptqmodel", "awq": "gptqmodel"}
DEQUANTISED = ("compressed-tensors", "fp8")  # by transformers, when it loads them
HALF = (torch.bfloat16, torch.float16)
USE_PLAIN = "use the unquantised model, whose plan a cut takes with `apply` and `same_model`"
SHARE_FOR_WEIGHTS = 0.8  # of the free memory of a device; the rest is for activations


class Runtime(Value):
    """A model and its tokenizer, ready to run; `kernels` describes what computes."""

    model: Any
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    kernels: str
    offloaded: int = 0  # weights that are fetched while their layer runs
    scratch: Any = None  # the folder that they are fetched from, removed with this object


def load(folder: Path, *, device: str | None = None, dtype: str | None = None) -> Runtime:
    """Load the stock model on the device, in evaluation mode, with its tokenizer."""
    where = pick_device(device)
    precision = pick_dtype(dtype, where)
    checkpoint = Checkpoint.open(folder)
    family = checkpoint.family
    _check_vocabulary_size(checkpoint)
    warn_about_untested()
    prepare(family.model_type)
    config_class, model_class = stock_class(family)
    quiet_transformers()
    check_runnable(checkpoint)
    with refusals(f"{quoted(folder)} cannot be loaded"):
        settings = config_class.from_pretrained(folder, trust_remote_code=False)
        config = settings if family.library == "fla" else text_settings(family, settings)
        if checkpoint.quantisation is not None and checkpoint.quantisation.method in DEQUANTISED:
            config.quantization_config = {**config.quantization_config, "dequantize": True}
        model, report = model_class.from_pretrained(folder, config=config, dtype=precision, output_loading_info=True)
    if checkpoint.quantisation is not None:  # transformers leaves plain weights beside quantised ones as they are
        for parameter in model.parameters():
            if parameter.dtype in HALF:
                parameter.data = parameter.data.to(precision)
    wrong = [*report["missing_keys"], *report["mismatched_keys"]]
    if family.library == "fla":  # files of transformers may have more, such as a vision tower
        wrong += report["unexpected_keys"]
    if wrong:
        raise _not_loaded(folder, wrong)
    tokenizer = load_tokenizer(folder)
    guard_vocabulary(model, tokenizer, where)
    kernels = describe_kernels(where, precision, family.library)
    model = without_tower(family, model)
    return Runtime(model=model.to(where).eval(), tokenizer=tokenizer, device=where, dtype=precision, kernels=kernels)


def check_runnable(checkpoint: Checkpoint, advice: str = USE_PLAIN) -> None:
    """Refuse a quantised model that no stock class loads on this machine, with advice."""
    quantisation = checkpoint.quantisation
    if quantisation is None:
        return
    package = PACKAGES.get(quantisation.method)
    if quantisation.in_transformers and package is not None and (not package or find_spec(package) is not None):
        return
    problem = f"transformers does not run {quantisation.method} checkpoints here"
    install = f" (it needs {package})" if package else ""
    raise ModelError(f"{quoted(checkpoint.folder)}: {problem}{install}; {advice}")


def load_with(options: RunOptions, folder: Path) -> Runtime:
    """Load the model where and how the options say."""
    if isinstance(options, LoadOptions) and options.device_map is not None:
        return load_spread(folder, options)
    return load(folder, device=options.device, dtype=options.dtype)


def load_spread(folder: Path, options: LoadOptions) -> Runtime:
    """Load the stock model with its layers where there is room: on GPUs first, on disk last.

    Layers on disk are copied to a scratch folder in the temporary directory.
    """
    from accelerate import infer_auto_device_map, load_checkpoint_and_dispatch

    where, precision, limits = options.place, options.precision, parse_limits(options.max_memory)
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    checkpoint = Checkpoint.open(folder)
    checkpoint.check_plain("spread with `device_map`")
    model = stock_model(checkpoint.config).to(precision).eval()
    renamed = model.state_dict().keys() - checkpoint.tensors.keys() - tied_weights(model)
    if renamed:
        raise PlanError(f"`device_map` cannot load {folder}: its files do not have {min(renamed)} under this name")
    blocks = sorted(model._no_split_modules or ())
    try:
        places = infer_auto_device_map(
            model, _memory_limits(where, limits), no_split_module_classes=blocks, dtype=precision
        )
    except ValueError as error:
        raise PlanError(f"`max_memory`: {error}") from error
    if set(places.values()) == {"disk"}:
        raise PlanError("not even the embeddings fit into the memory for `device_map`: allow more with `max_memory`")
    scratch = tempfile.TemporaryDirectory(prefix="slimstate-")
    with redirect_stderr(io.StringIO()), refusals(f"{quoted(folder)} cannot be loaded"):  # a progress bar
        model = load_checkpoint_and_dispatch(
            model, str(folder), device_map=places, offload_folder=scratch.name, dtype=precision,
            preload_module_classes=blocks,
        )  # fmt: skip
    model.requires_grad_(False)
    tokenizer = load_tokenizer(folder)
    guard_vocabulary(model, tokenizer, where)
    counts = Counter(f"cuda:{place}" if isinstance(place, int) else str(place) for place in places.values())
    parts = ", ".join(f"{count} on {place}" for place, count in counts.items())
    kernels = f"{describe_kernels(where, precision, checkpoint.family.library)}; parts of the model: {parts}"
    return Runtime(
        model=model, tokenizer=tokenizer, device=where, dtype=precision, kernels=kernels, scratch=scratch,
        offloaded=sum(weight.is_meta for weight in model.parameters()),
    )  # fmt: skip


def _memory_limits(where: torch.device, limits: Mapping[str, int] | None) -> dict[int | str, Any]:
    """Return the bytes that weights may take on every device; without limits, most of the free memory."""
    if limits is not None:
        return {int(place) if place.isdigit() else place: size for place, size in limits.items()}
    gpus = range(torch.cuda.device_count() if where.type == "cuda" else 0)
    devices: dict[int | str, torch.device] = {gpu: torch.device("cuda", gpu) for gpu in gpus}
    devices["cpu"] = torch.device("cpu")
    return {place: int(SHARE_FOR_WEIGHTS * free_bytes(device)) for place, device in devices.items()}


def _not_loaded(folder: Path, names: Sequence[str]) -> ModelError:
    tensors = f"{len(names)} of its tensors, such as {quoted(names[0])}"
    return ModelError(f"{quoted(folder)}: the stock class does not load {tensors}")


def check_tensor_names(checkpoint: Checkpoint) -> None:
    """Check that the stock class has all tensors of the files, as `load` does, without loading the model."""
    if checkpoint.family.library != "fla":
        return
    if unknown := sorted(checkpoint.tensors.keys() - stock_model(checkpoint.config).state_dict().keys()):
        raise _not_loaded(checkpoint.folder, unknown)


def _check_vocabulary_size(checkpoint: Checkpoint) -> None:
    """Refuse a vocabulary larger than the files, for which a library would allocate random embeddings."""
    hidden, vocabulary = checkpoint.mixers[0].input_size, checkpoint.language_config.get("vocab_size", 0)
    if isinstance(vocabulary, int) and vocabulary * hidden > checkpoint.parameters:
        size = f"{checkpoint.parameters:,} parameters in the files"
        raise ModelError(f"config.json: embeddings of {vocabulary:,} tokens are more than the {size}")


def states_before_head(model: Any, ids: Tensor) -> Tensor:
    """Return the hidden states of tokens `ids` [B, T] that give the logits when multiplied by the head's weight."""
    hidden: Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    config = {"model_type": model.config.model_type, **vars(model.config)}
    factor = family_of(config).logit_factor(config)
    return hidden if factor == 1 else hidden * factor


def guard_vocabulary(model: Any, tokenizer: Any, device: torch.device) -> None:
    """Refuse tokens without an embedding when the model is called.

    Reading the tokens would make a GPU wait, so it is done there only if the tokenizer has more tokens than the model.
    """
    embeddings = model.get_input_embeddings()
    rows = embeddings.weight.shape[0]

    def check(_: Any, args: tuple[Any, ...]) -> None:
        if args and args[0].numel():
            check_embedded(args[0], rows)

    if device.type == "cpu" or max(tokenizer.get_vocab().values(), default=0) >= rows:
        embeddings.register_forward_pre_hook(check)


def check_embedded(tokens: Tensor, rows: int) -> None:
    """Refuse tokens beyond the rows of an embedding."""
    if int(tokens.max()) >= rows:
        sizes = f"the text has token {int(tokens.max())}, and the model embeddings of {rows}"
        raise ModelError(f"{sizes}: use the tokenizer of this model")


def load_tokenizer(folder: Path | str) -> Any:
    """Load the tokenizer of a folder, or of a hub repository by its name."""
    from transformers import AutoTokenizer

    quiet_transformers()
    if Path(folder).is_dir():
        for _ in files_inside(Path(folder), ModelError):
            pass
        path = Path(folder) / TOKENIZER_CONFIG
        for name, value in (read_json(path) if path.exists() else {}).items():  # which may name no file outside
            if name.endswith(("_file", "_files")) and value is not None:
                for file in value if isinstance(value, list) else [value]:
                    check_name(Path(folder), file, ModelError)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if len(tokenizer) < 1 or not isinstance(tokenizer.eos_token_id, int | None):
            raise ValueError("it has no tokens, or its end-of-text token is not one of them")
        return tokenizer
    except Exception as error:
        raise ModelError(f"{quoted(folder)} has no usable tokenizer: {reason_of(error)}") from error
