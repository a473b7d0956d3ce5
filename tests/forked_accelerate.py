"""`accelerate launch`, except that its processes are forks of this one, which has torch and transformers loaded."""

import runpy
import sys
from dataclasses import replace

from accelerate.commands.launch import main
from torch.distributed import run

launch = run.elastic_launch


def module(_: str, flag: str, name: str, *words: str) -> None:
    """`python -u -m NAME WORDS`."""
    sys.argv = [flag, *words]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


run.elastic_launch = lambda config, entrypoint: launch(replace(config, start_method="fork"), module)
main()
