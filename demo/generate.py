"""Load a checkpoint with the stock class and let it write on: python demo/generate.py FOLDER "The first words" """

from __future__ import annotations

import sys
import warnings

warnings.simplefilter("ignore")

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from transformers.utils import logging  # noqa: E402

import slimstate  # noqa: E402

logging.disable_progress_bar()


def main() -> None:
    folder, prompt = sys.argv[1], sys.argv[2]
    slimstate.prepare_fla()  # imports fla; on a CPU it also gives fla's layers kernels that run there
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    written = model.generate(ids, max_new_tokens=40, do_sample=False, repetition_penalty=1.3)
    print(f"{type(model).__module__}.{type(model).__name__}, key dim {model.model.layers[0].attn.head_k_dim}:")
    print(" ".join(tokenizer.decode(written[0], skip_special_tokens=True).split()))


main()
