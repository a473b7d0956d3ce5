"""Estimate how long a cut takes and how much memory it needs, from tensor headers and a second of measuring.

It measures a matrix product of the model's size and the reading speed of the disk. The factors below turn these into
whole passes; they come from an H200 and a two-core CPU, so expect errors up to a factor of two.
"""

from slimstate.checkpoints.safetensors_io import BLOCK
from slimstate.checkpoints.tensor_cut import TensorCut
from slimstate.checkpoints.writer import WRITERS
from slimstate.core.evidence import BACKWARD
from slimstate.core.surgery import outline
from slimstate.models.devices import TOKENS_AT_ONCE
from slimstate.models.speed import EFFICIENCY, measure_speed
from slimstate.pruning.calibration import TIMES_FORWARD
from slimstate.pruning.planning import SelectionJob
from slimstate.records.cut import EstimateRecord

FORWARD_COPIES = {"cuda": 15, "cpu": 30}  # of the hidden states of a pass, alive at once
BACKWARD_COPIES = {"cuda": 18, "cpu": 40}  # of the hidden states, stored for each layer until its gradient is computed
INTERPRETER = 0.6 * 2**30  # bytes of Python with torch and fla


def estimate_cut(job: SelectionJob) -> EstimateRecord:
    """Return the seconds and bytes of every stage of a cut; no model is loaded."""
    checkpoint, needs, run = job.checkpoint, job.needs, job.run
    tokens = 0 if job.windows is None else job.windows.tokens.numel()
    device = run.place
    speed = measure_speed(checkpoint, device, run.precision)
    stored = sum(info.size for info in checkpoint.tensors.values())
    cut = TensorCut(checkpoint, outline(checkpoint.mixers, checkpoint.mixers[0].axis.width))
    largest = max(info.size for name, info in checkpoint.tensors.items() if cut.touches(name))
    seconds = {"fingerprint and writing": 3 * stored / speed.read_bytes_per_second}
    device_bytes: dict[str, float] = {}
    host: dict[str, float] = {"Python and torch": INTERPRETER, "tensors being written": WRITERS * (2 * largest + BLOCK)}
    if needs - {"weight"}:
        forward = 2 * checkpoint.parameters * tokens / (speed.flops_per_second * EFFICIENCY[device.type])
        seconds["calibration"] = forward * max(TIMES_FORWARD.get(need, 0) for need in needs)
        seconds["loading"] = stored / speed.read_bytes_per_second
        device_bytes = _bytes_on_device(job)
    if device.type == "cpu":
        host, device_bytes = host | device_bytes, {}
    return EstimateRecord(
        model=checkpoint.source,
        method=job.selector.name,
        key_dim=job.request.keep,
        value_dim=job.value_dim,
        device=str(device),
        dtype=run.precision_name,
        tokens=tokens,
        measured=speed,
        seconds=seconds | {"total": sum(seconds.values())},
        gpu_bytes=device_bytes | {"total": sum(device_bytes.values())},
        host_bytes=host | {"total": sum(host.values())},
        disk_bytes=stored,
    )


def _bytes_on_device(job: SelectionJob) -> dict[str, float]:
    checkpoint, needs, kind, size = job.checkpoint, job.needs, job.run.place.type, job.run.precision.itemsize
    tokens = TOKENS_AT_ONCE[kind]
    states = tokens * checkpoint.mixers[0].input_size * size
    sizes: dict[str, float] = {
        "weights": checkpoint.parameters * size,
        "a pass": FORWARD_COPIES[kind] * states,
        "evidence": sum(16 * mixer.axis.heads * mixer.axis.width**2 for mixer in checkpoint.mixers),
    }
    if BACKWARD & needs:
        config = checkpoint.language_config
        vocabulary = int(config.get("vocab_size", 0))
        layers = int(config.get("num_hidden_layers", len(checkpoint.mixers)))
        sizes["a pass"] = BACKWARD_COPIES[kind] * layers * states + 12 * tokens * vocabulary
    if "gradient" in needs:
        rows = sum(mixer.axis.heads * mixer.axis.width * mixer.input_size for mixer in checkpoint.mixers)
        sizes["evidence"] = 8 * rows
    return sizes
