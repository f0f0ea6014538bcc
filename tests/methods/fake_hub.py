"""A hub for huggingface_hub's own client: repositories in memory, files in commits, without large files."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """files: of each repository, by path.  private: whether it is.  allowed: whether anything may be written."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.allowed, self.address = True, ""

    def post(self, path: str, body: bytes) -> dict[str, Any]:
        if path == "/api/repos/create":
            request = json.loads(body)
            name = f"{request.get('organization') or 'me'}/{request['name']}"
            self.files.setdefault(name, {})
            self.private[name] = request.get("visibility") == "private"
            return {"url": f"{self.address}/{name}", "id": name}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        _, _, _, owner, name, action, _ = path.split("/")
        if action == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            return {"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]}
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.files[f"{owner}/{name}"][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return {"commitUrl": f"{self.address}/{owner}/{name}/commit/{COMMIT}", "commitOid": COMMIT, "success": True}

    def get(self, path: str) -> tuple[bytes, dict[str, str]] | None:
        owner, name, *rest = path.removeprefix("/api/models").strip("/").split("/")
        files = self.files.get(f"{owner}/{name}")
        if files is None:
            return None
        if rest[0] == "revision":
            listed: Any = {"id": f"{owner}/{name}", "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
        elif rest[0] == "tree":
            sizes = {one: len(content) for one, content in files.items()}
            listed = [{"type": "file", "path": one, "size": size, "oid": "0"} for one, size in sizes.items()]
        else:
            content = files["/".join(rest[2:])]
            return content, {"ETag": f'"{sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        return json.dumps(listed).encode(), {"Content-Type": "application/json"}


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self) -> None:
            result = hub.get(self.path.split("?")[0])
            self.answer(200, *result) if result else self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

        do_HEAD = do_GET

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if not hub.allowed:
                return self.answer(403, b'{"error": "no right to write"}', {"Content-Type": "application/json"})
            return self.answer(
                200, json.dumps(hub.post(self.path, body)).encode(), {"Content-Type": "application/json"}
            )

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
