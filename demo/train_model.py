"""Train the small DeltaNet that the demo cuts: tokenizer, tokens, model, from one text file.

    python demo/train_model.py --text train.txt.xz --out demo/model

Needs a CUDA GPU; about four minutes on an H200. The text is split into documents by <|endoftext|>.
B sequences of T tokens are drawn at random positions of the token stream at every step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import lzma
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

END_OF_TEXT = "<|endoftext|>"
CONFIG = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 4,
    "num_heads": 4,
    "expand_k": 2.0,  # key width 128
    "expand_v": 1.0,  # value width 64
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def documents(path: Path) -> Iterator[str]:
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        yield from (piece.strip() for piece in file.read().split(END_OF_TEXT) if piece.strip())


def train_tokenizer(texts: Iterator[str], vocab_size: int, folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def tokenize(texts: Iterator[str], folder: Path) -> torch.Tensor:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(END_OF_TEXT)
    batch: list[str] = []
    pieces: list[np.ndarray] = []

    def flush() -> None:
        for encoding in tokenizer.encode_batch_fast(batch):
            pieces.append(np.array([*encoding.ids, end], dtype=np.int32))
        batch.clear()

    for text in texts:
        batch.append(text)
        if len(batch) == 4096:
            flush()
    flush()
    return torch.from_numpy(np.concatenate(pieces))


def learning_rate(step: int, steps: int, peak: float, warmup: int = 200) -> float:
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))))


def train(
    tokens: torch.Tensor,
    config: dict[str, object],
    *,
    steps: int,
    batch: int = 64,
    length: int = 1024,
    peak: float = 3e-3,
    seed: int = 0,
) -> torch.nn.Module:
    from fla.models import DeltaNetConfig, DeltaNetForCausalLM

    torch.manual_seed(seed)
    tokens = tokens.cuda()
    model = DeltaNetForCausalLM(DeltaNetConfig(**config)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    window = torch.arange(length, device="cuda")
    started = time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak)
        starts = torch.randint(len(tokens) - length, (batch, 1), device="cuda")
        ids = tokens[starts + window].long()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 250 == 0 or step == steps - 1:
            rate = (step + 1) * batch * length / (time.perf_counter() - started)
            print(f"step {step:5d}  loss {loss.item():.4f}  {rate / 1e3:.0f}k tokens/s", flush=True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not (options.out / "tokenizer.json").exists():
        every_fourth = itertools.islice(documents(options.text), 0, None, 4)
        train_tokenizer(every_fourth, int(str(CONFIG["vocab_size"])), options.out)
    tokens = tokenize(documents(options.text), options.out)
    print(f"{len(tokens):,} tokens", flush=True)
    model = train(tokens, CONFIG, steps=options.steps, seed=options.seed)
    model.to(torch.bfloat16).save_pretrained(options.out)


if __name__ == "__main__":
    main()
