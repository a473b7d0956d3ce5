"""Results are pushed to the hub with its own client, which here speaks to a stand-in on this machine."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from slimstate.system import hub

NAME = "delta_net-plain"
REFUSALS = [
    ("a name", "x", "is not a repository name"),
    ("me/slim", None, "you are not logged in"),
    ("me/slim", "x", "refuses the login"),
]


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as an upload asks for; what it is told stays in `told`."""

    told: dict[str, object]

    def answer(self, body: object, code: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            found = b""
            while size := int(self.rfile.readline(), 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_GET(self) -> None:
        if "whoami" in self.path:
            self.answer({"name": "me", "type": "user", "auth": {"accessToken": {"role": "write"}}})
        else:
            self.answer({"id": "me/slim", "sha": "0" * 40, "siblings": []})

    def do_POST(self) -> None:
        asked, url = self.body(), f"http://127.0.0.1:{self.server.server_port}"
        if "repos/create" in self.path:
            self.told["private"] = json.loads(asked).get("private", json.loads(asked).get("visibility"))
            self.answer({"url": f"{url}/me/slim", "name": "me/slim", "id": "me/slim"})
        elif "validate-yaml" in self.path:
            self.told["card"] = json.loads(asked)["content"]
            self.answer({"errors": [], "warnings": []})
        elif "preupload" in self.path:
            files = json.loads(asked)["files"]
            rest = {"uploadMode": "regular", "shouldIgnore": False}
            self.answer({"files": [{"path": file["path"], **rest} for file in files]})
        elif "/commit/" in self.path:
            lines = [json.loads(line) for line in asked.splitlines() if line.strip()]
            self.told["files"] = {line["value"]["path"] for line in lines if line["key"] == "file"}
            self.answer({"commitUrl": f"{url}/me/slim/commit/0", "commitOid": "0" * 40, "success": True})
        else:
            self.answer({}, 404)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch):
    found: dict[str, object] = {}
    server = HTTPServer(("127.0.0.1", 0), type("Here", (Hub,), {"told": found}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    for module in ("hf_api", "constants", "_commit_api", "repocard", "utils._http", "lfs"):
        monkeypatch.setattr(f"huggingface_hub.{module}.ENDPOINT", address, raising=False)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", address, raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_stand_in")
    yield found
    server.shutdown()


@pytest.fixture
def prune(folders, tmp_path) -> tuple[object, ...]:
    """A command that cuts a model and pushes it to a repository, whose name follows."""
    return ("prune", folders[NAME], "--method", "l1", "--key-dim", 8, "--out", tmp_path / "cut", "--push-to-hub")


def test_a_cut_is_uploaded_whole_and_in_private(prune, tmp_path, execute, told):
    code, _, err = execute(*prune, "me/slim")
    assert code == 0, err
    assert "uploaded to" in err
    assert told["private"] in (True, "private")
    written = {str(path.relative_to(tmp_path / "cut")) for path in (tmp_path / "cut").rglob("*") if path.is_file()}
    assert told["files"] == written


@pytest.mark.parametrize(("name", "token", "words"), REFUSALS)
def test_what_cannot_be_pushed_is_refused_before_the_work(name, token, words, prune, tmp_path, refusal, monkeypatch):
    monkeypatch.setattr(hub, "is_reachable", lambda: True)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token)
    monkeypatch.setattr("huggingface_hub.HfApi.whoami", lambda self: (_ for _ in ()).throw(OSError("no such token")))
    assert words in refusal(*prune, name)
    assert not (tmp_path / "cut").exists()
