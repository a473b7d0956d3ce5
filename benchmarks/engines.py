"""What an engine makes of tiny random models of key dim 128, uncut and cut by l1, beside transformers; writes a record.

python benchmarks/engines.py mlx --python MLX_ENV/bin/python --out docs/records/verify-mlx.json
python benchmarks/engines.py llama.cpp --python LLAMA_ENV/bin/python --converter llama.cpp/convert_hf_to_gguf.py \
    --key-dims 128,96,64,32 --out docs/records/verify-llama.json
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

from slimstate import EngineOptions, RunOptions, VerifyOptions, verify  # noqa: E402
from slimstate.records.base import versions  # noqa: E402
from slimstate.system.json_files import JsonObject  # noqa: E402


def row_of(folder: Path, name: str, key_dim: int, engine: EngineOptions, dtype: str) -> tuple[str | None, JsonObject]:
    options = VerifyOptions(samples=2, length=48, tokens=8)
    record = verify(folder, engine, options=options, run=RunOptions(device="cpu", dtype=dtype))
    found, outcome = record.outcome.differences, record.outcome
    measured = {} if found is None else {name: getattr(found, name) for name in ("prefill", "decoding", "same")}
    words = {} if outcome.words is None else {"words": outcome.words, "reason": outcome.reason}
    return record.engine_version, {
        "model": name, "key_dim": key_dim, "verdict": outcome.verdict, **measured, **words
    }  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("engine", nargs="?", default="transformers")
    parser.add_argument("--python", type=Path)
    parser.add_argument("--converter", type=Path)
    parser.add_argument("--settings", type=json.loads, default={}, help="what the engine is told beside the model")
    parser.add_argument("--models", default=",".join(engine_models.MODELS))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--key-dims", default="128,96,64,32,77")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    engine = EngineOptions(engine=given.engine, python=given.python, converter=given.converter, settings=given.settings)
    names = ["mamba2"] if given.toy else given.models.split(",")
    key_dims = [64] if given.toy else [int(text) for text in given.key_dims.split(",")]
    version, rows = None, []
    with tempfile.TemporaryDirectory() as place:
        for name in names:
            model = engine_models.uncut(name, Path(place) / name)
            for key_dim in key_dims:
                folder = model if key_dim == 128 else engine_models.cut(model, key_dim)
                version, row = row_of(folder, name, key_dim, engine, given.dtype)
                rows.append(row)
                print(row, flush=True)
    if given.out is not None:
        more = " --converter convert_hf_to_gguf.py" if given.converter else ""
        more += "".join(
            f" --{name} {value}"
            for name, value in (("models", given.models), ("dtype", given.dtype))
            if value != parser.get_default(name)
        )
        more += f" --settings '{json.dumps(given.settings)}'" if given.settings else ""
        again = f"python benchmarks/engines.py {given.engine} --python ENV/bin/python --key-dims {given.key_dims}"
        about = {"command": again + more, "engine": given.engine, "version": version, "versions": versions()}
        given.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
