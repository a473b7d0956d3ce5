"""slimstate makes the recurrent state of trained linear-attention language models smaller.

The verbs of the command are functions here: `inspect`, `prune`, `reconstruct`, `recover`, `train`, `evaluate`,
`analyze`, `sweep`, `verify`, `report`, `bench_mixer`, `bench_model`, `bench_decode`, `bench_calibrate`.

`__init__.pyi` lists all names. Each is loaded at its first use: most need torch, which takes seconds.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
