"""The few pages of the hub that fetching a model needs, on a port of this machine."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

MODEL = "org/name"
TOKEN = "hf_good"


@dataclass
class FakeHub:
    """Owns what one model on the hub is: its files by commit, who may see it, and how the hub behaves."""

    files: dict[str, bytes]
    commit: str = "a" * 40
    is_gated: bool = False
    num_failures: int = 0
    """So many of the next requests about the model get status 503."""
    url: str = ""
    fetched: list[str] = field(default_factory=list)
    """The files whose contents were sent."""


@contextmanager
def fake_hub(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve a model until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _answer(hub, self, has_body=True)

        def do_HEAD(self) -> None:
            _answer(hub, self, has_body=False)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _answer(hub: FakeHub, request: BaseHTTPRequestHandler, has_body: bool) -> None:
    path = unquote(urlsplit(request.path).path).strip("/")
    status, headers, body = HTTPStatus.NOT_FOUND, {"X-Error-Code": "EntryNotFound"}, b""
    if hub.num_failures and MODEL in path:
        hub.num_failures -= 1
        status, headers = HTTPStatus.SERVICE_UNAVAILABLE, {}
    elif not (path.startswith(f"api/models/{MODEL}") or path.startswith(f"{MODEL}/")):
        status, headers = (
            HTTPStatus.UNAUTHORIZED,
            {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"},
        )
    elif hub.is_gated and request.headers["Authorization"] != f"Bearer {TOKEN}":
        message = "Access to this model is restricted: ask for it"
        status, headers = HTTPStatus.UNAUTHORIZED, {"X-Error-Code": "GatedRepo", "X-Error-Message": message}
    elif path in (
        f"api/models/{MODEL}",
        f"api/models/{MODEL}/revision/main",
        f"api/models/{MODEL}/revision/{hub.commit}",
    ):
        status, headers, body = HTTPStatus.OK, {}, json.dumps(_info(hub)).encode()
    elif path.startswith(f"api/models/{MODEL}/revision/"):
        headers = {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"}
    elif path == f"api/models/{MODEL}/tree/{hub.commit}":
        status, headers, body = HTTPStatus.OK, {}, json.dumps(_tree(hub)).encode()
    elif (name := path.removeprefix(f"{MODEL}/resolve/{hub.commit}/")) in hub.files:
        body = hub.files[name]
        status, headers = HTTPStatus.OK, {"ETag": f'"{_oid(body)}"', "X-Repo-Commit": hub.commit}
        if has_body:
            hub.fetched.append(name)
    request.send_response(status)
    for key, value in headers.items():
        request.send_header(key, value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if has_body:
        request.wfile.write(body)


def _oid(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()


def _info(hub: FakeHub) -> dict[str, object]:
    siblings = [{"rfilename": name, "size": len(body), "blobId": _oid(body)} for name, body in hub.files.items()]
    return {"id": MODEL, "sha": hub.commit, "siblings": siblings}


def _tree(hub: FakeHub) -> list[dict[str, object]]:
    return [{"type": "file", "path": name, "size": len(body), "oid": _oid(body)} for name, body in hub.files.items()]
