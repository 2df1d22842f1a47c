"""Exports that are sent to a stand-in of the hub: what arrives is the folder, byte for byte; what cannot be sent is one
line, before the work."""
import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest
from test_bad_input import refused
from test_qwen import run

from scripts import hf_export, hf_import, hf_random

MAY, OWNER = "hf_token", "owner"


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks of the hub when a model is made and files are committed to it."""

    def reply(self, status: int, **content) -> None:
        self.send_response(status)
        body = json.dumps(content.get("rows", content)).encode()
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        hub, path = self.server, self.path.partition("?")[0]
        if self.headers["Authorization"] != f"Bearer {MAY}":
            self.reply(401, error="Invalid username or password.")
        elif path == "/api/whoami-v2":
            self.reply(200, name=OWNER, type="user")
        elif path.endswith("/tree/main"):
            files = hub.repos[path.removeprefix("/api/models/").removesuffix("/tree/main")]
            self.reply(200, rows=[{"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
                                  for name, content in files.items()])
        else:
            self.reply(404, error="not found")

    def do_POST(self):
        hub, path = self.server, self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if asked["organization"] != OWNER:
                self.reply(403, error=f"You don't have the rights to create a model under the namespace "
                                      f"\"{asked['organization']}\"")
                return
            hub.created.append(asked)
            status = 409 if name in hub.repos else 200
            hub.repos.setdefault(name, {".gitattributes": b"*.safetensors lfs\n"})
            self.reply(status, url=f"{hub.address}/{name}")
        elif path == "/api/validate-yaml":
            self.reply(200, errors=[], warnings=[])
        elif "/preupload/" in path:
            self.reply(200, files=[{"path": file["path"], "shouldIgnore": False, "oid": None,
                                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular"}
                                   for file in json.loads(body)["files"]])
        elif path.endswith(".git/info/lfs/objects/batch"):
            self.reply(200, transfer="basic", objects=[
                {**wanted, "actions": {"upload": {"href": f"{hub.address}/large/{wanted['oid']}"}}}
                for wanted in json.loads(body)["objects"]])
        elif "/commit/" in path and not hub.is_full:
            name = path.removeprefix("/api/models/").partition("/commit/")[0]
            files = hub.repos[name]
            lines = [json.loads(line) for line in body.splitlines()]
            for value in (line["value"] for line in lines if line["key"] != "header"):
                files[value["path"]] = (hub.large[value["oid"]] if "oid" in value
                                        else base64.b64decode(value["content"]))
            hub.commits.append([line["key"] for line in lines])
            self.reply(200, commitUrl=f"{hub.address}/{name}/commit/{'1' * 40}", commitOid="1" * 40, success=True)
        else:
            self.reply(403, error="Storage is full\nand so on")

    def do_PUT(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.path == f"/large/{hashlib.sha256(content).hexdigest()}"
        self.server.large[self.path.rpartition("/")[2]] = content
        self.reply(200)

    def log_message(self, *_):
        pass


@contextmanager
def standing_in():
    """A hub on a port of this machine; nothing is on it."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        hub.repos, hub.large, hub.commits, hub.created, hub.is_full = {}, {}, [], [], False
        hub.address = f"http://127.0.0.1:{hub.server_port}"
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A base directory with an imported model."""
    folder = tmp_path_factory.mktemp("hub")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(folder / "base"))
        run(hf_random, "--n-layer", 1, "--n-embd", 32, "--vocab-size", 300, "--to", folder / "random")
        run(hf_import, "--source", folder / "random", "--model-tag", "m")
    return folder


@pytest.fixture
def hub(made, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(made / "base"))
    monkeypatch.setenv("HF_TOKEN", MAY)
    with standing_in() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)  # then weights go as git LFS has it
        yield hub


def flags(target, name: str, *more: str) -> list[str]:
    return ["--stage", "sft", "--model-tag", "m", "--to", str(target), "--push", name, *more]


def test_what_arrives_is_the_folder(hub, tmp_path, capsys):
    """The model is made private, and all comes in one commit, the weights as a large file."""
    for name in ("owner/new", "owner/there"):
        hub.repos["owner/there"] = {".gitattributes": b""}
        target = tmp_path / name
        run(hf_export, *flags(target, name))
        sent = {path.name: path.read_bytes() for path in target.iterdir()}
        assert {path: content for path, content in hub.repos[name].items() if path != ".gitattributes"} == sent
        assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= sent.keys()
        keys = hub.commits.pop()
        assert sorted(keys) == sorted(["header", "lfsFile", *["file"] * (len(sent) - 1)]) and not hub.commits
        asked = hub.created.pop()
        assert "private" in (asked.get("visibility"), "private" if asked.get("private") else None)
        assert f"sent {len(sent)} files, " in (out := capsys.readouterr().out) and f"to {hub.address}/{name}; " in out


@pytest.mark.parametrize("name, more, words", [
    ("name", [], "must be owner/name"), ("a/b/c", [], "--push a/b/c: Repo id must be"),
    ("owner/x--y", [], "Cannot have -- or .."), ("owner/full", [], "/owner/full holds 1 files, such as config.json"),
    ("other/x", [], "don't have the rights"),
    ("owner/x", ["--to", "x.gguf"], "--push owner/x: sends a folder, and --to x.gguf is a file"),
])
def test_what_cannot_be_sent_is_one_line_before_the_work(name, more, words, hub, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hub.repos["owner/full"] = {".gitattributes": b"", "config.json": b"{}"}
    line = refused(capsys, tmp_path, hf_export, *flags(tmp_path / "out", name, *more))
    assert words in line and line.startswith("error: --push") and "\n" not in line and not hub.commits


@pytest.mark.parametrize("settings, words", [
    ({"HF_TOKEN": ""}, "there is no token: run `hf auth login`, or set HF_TOKEN"),
    ({"HF_TOKEN": "hf_other"}, "Invalid user token. The token from HF_TOKEN environment variable is invalid."),
    ({"ENDPOINT": "http://127.0.0.1:9"}, "ConnectError"), ({"HF_HUB_OFFLINE": True}, "offline mode is enabled")])
def test_without_a_token_or_a_network_there_is_one_line_before_the_work(settings, words, hub, tmp_path, capsys,
                                                                        monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    for key, value in settings.items():
        if key == "HF_TOKEN":
            monkeypatch.setenv(key, value)
        else:
            monkeypatch.setattr(huggingface_hub.constants, key, value)
    line = refused(capsys, tmp_path, hf_export, *flags(tmp_path / "out", "owner/x"))
    assert words in line and line.startswith("error: --push owner/x: ") and "\n" not in line and not hub.repos


def test_where_the_hub_breaks_off_the_folder_is_whole_and_it_is_said_how_to_send_it(hub, tmp_path, capsys):
    hub.is_full, target = True, tmp_path / "out"
    with pytest.raises(SystemExit) as stop:
        hf_export.script_main(hf_export.main, hf_export.make_parser(), flags(target, "owner/x"))
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 2 and "Storage is full and so on" in line
    assert line.endswith(f"{target} is whole: send it with `hf upload owner/x {target}`")
    assert (target / "README.md").exists() and hub.repos["owner/x"].keys() == {".gitattributes"}
