"""torchrun with two processes that are forked instead of started anew, so that what is loaded here is loaded there.

python forked_torchrun.py PORT PROGRAM WORDS...
"""

from __future__ import annotations

import runpy
import sys

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def follow(*words: str) -> None:
    sys.argv = list(words)
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="tests",
        rdzv_endpoint=f"127.0.0.1:{sys.argv[1]}",
        rdzv_backend="static",
        rdzv_configs={"rank": 0},
        start_method="fork",
        max_restarts=0,
    )
    elastic_launch(config, follow)(*sys.argv[2:])
