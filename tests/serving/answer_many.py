"""Answer many requests in one process, which imports the engine once. Runs in the environment of the engine."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

program, request_path, answer_path = sys.argv[1:]
answer_to = runpy.run_path(program)["answer_to"]
requests = json.loads(Path(request_path).read_text(encoding="utf-8"))
answers = {name: answer_to(request) for name, request in requests.items()}
Path(answer_path).write_text(json.dumps(answers), encoding="utf-8")
