"""Run in an engine's environment: the answers to many requests from one process, which imports the engine once."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

program, asked, answered = sys.argv[1:]
answer_to = runpy.run_path(program)["answer_to"]
requests = json.loads(Path(asked).read_text(encoding="utf-8"))
answers = {name: answer_to(request) for name, request in requests.items()}
Path(answered).write_text(json.dumps(answers), encoding="utf-8")
