"""Compare an engine with transformers on tiny random models of key dim 128, uncut and cut by l1; writes a record.

python benchmarks/engines.py mlx --python MLX_ENV/bin/python --out docs/records/verify-mlx.json
python benchmarks/engines.py llama.cpp --python LLAMA_ENV/bin/python --converter llama.cpp/convert_hf_to_gguf.py \
    --key-dims 128,96,64,32 --out docs/records/verify-llama.json        # 64x64 also cuts the values to 64
python benchmarks/engines.py vllm --python VLLM_ENV/bin/python --settings '{"gpu_memory_utilization": 0.2}' \
    --key-dims 128,64 --out docs/records/verify-vllm.json
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "serving")]

import engine_models  # noqa: E402
from harness import arguments  # noqa: E402

from slimstate import VerifyConfig, verify  # noqa: E402
from slimstate.records.base import versions  # noqa: E402
from slimstate.system.json_files import JsonObject  # noqa: E402


def verify_row(folder: Path, name: str, key_dim: int | str, config: VerifyConfig) -> tuple[str | None, JsonObject]:
    """Return the version of the engine and a row of the record."""
    record = verify(folder, config, progress=False)
    outcome, row = record.outcome, {"model": name, "key_dim": key_dim, "verdict": record.outcome.verdict}
    if outcome.differences is not None:
        row |= {name: getattr(outcome.differences, name) for name in ("prefill", "decoding", "same")}
    if outcome.words is not None:
        row |= {"words": outcome.words, "reason": outcome.reason}
    return record.engine_version, row


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("engine", nargs="?", default="transformers")
    parser.add_argument("--python", type=Path)
    parser.add_argument("--converter", type=Path)
    parser.add_argument("--settings", help="JSON with settings of the engine itself")
    parser.add_argument("--models", default=",".join(engine_models.MODELS))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--key-dims", default="128,96,64,32,77")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    values = {name: getattr(options, name) for name in ("engine", "python", "converter", "dtype")}
    sizes = {"samples": 2, "length": 48, "tokens": 8}
    config = VerifyConfig.from_values({**values, **sizes, "engine_settings": options.settings, "device": "cpu"})
    names = ["mamba2"] if options.toy else options.models.split(",")
    key_dims = ["64"] if options.toy else options.key_dims.split(",")
    version, rows = None, []
    with tempfile.TemporaryDirectory() as temporary:
        for name in names:
            model = engine_models.uncut(name, Path(temporary) / name)
            for key_dim in key_dims:
                width, _, values = key_dim.partition("x")
                cut = (int(width), "state_dim" if values else "key_dim")
                folder = model if key_dim == "128" else engine_models.cut(model, *cut)
                version, row = verify_row(folder, name, key_dim if values else int(width), config)
                rows.append(row)
                print(row, flush=True)
    if options.out is not None:
        command = f"python benchmarks/engines.py {options.engine} --python ENV/bin/python --key-dims {options.key_dims}"
        command += " --converter convert_hf_to_gguf.py" if options.converter else ""
        for name in ("models", "dtype"):
            value = getattr(options, name)
            command += f" --{name} {value}" if value != parser.get_default(name) else ""
        command += f" --settings '{options.settings}'" if options.settings else ""
        facts = {"command": command, "engine": options.engine, "version": version, "versions": versions()}
        options.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
