"""An S3 server that misbehaves on demand: hangs, drips, breaks off, answers with errors, ignores ranges.

It keeps objects in memory, checks no signature, and answers each request by the next entry of its script, or
properly when the script is empty. For what real servers do, tests use real servers.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Behaviour = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ScriptedS3

    def do_ANY(self) -> None:
        with self.server.lock:
            self.server.requests.append((self.command, self.path, dict(self.headers)))
            behaviour = self.server.script.pop(0) if self.server.script else self.server.otherwise
        behaviour(self)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = do_ANY

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


class ScriptedS3(ThreadingHTTPServer):
    """with ScriptedS3() as server: server.script = [error("SlowDown", 503)]; …"""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[str, bytes] = {}
        self.script: list[Behaviour] = []
        self.otherwise: Behaviour = proper
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.lock = threading.Lock()
        self.stopped = threading.Event()

    @property
    def options(self) -> dict[str, Any]:
        return {"endpoint_url": f"http://127.0.0.1:{self.server_port}", "key": "access-key-id", "secret": "very-secret"}

    def __enter__(self) -> ScriptedS3:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stopped.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that give up are what the tests are about


def proper(handler: Handler) -> None:
    """What S3 does, as far as the store asks for it."""
    objects, path = handler.server.objects, handler.path.partition("?")[0]
    if handler.command == "PUT":
        objects[path] = handler.body()
        handler.answer(200, ETag=etag(objects[path]))
    elif path not in objects:
        error("NoSuchKey", 404)(handler)
    else:
        serve(handler, objects[path])


def serve(handler: Handler, data: bytes) -> None:
    """Answer a GET or HEAD with the object, or the range of it that was asked for."""
    wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
    if wanted:
        start = int(wanted[1])
        end = min(int(wanted[2]) + 1, len(data))
        if start >= len(data):
            error("InvalidRange", 416)(handler)
        else:
            span = f"bytes {start}-{end - 1}/{len(data)}"
            handler.answer(206, data[start:end], ETag=etag(data), Content_Range=span)
    else:
        handler.answer(200, data, ETag=etag(data))


def etag(data: bytes) -> str:
    return f'"{hash(data) & 0xFFFFFFFF:08x}"'


def error(code: str, status: int, message: str = "said so") -> Behaviour:
    """An S3 error answer."""

    def behave(handler: Handler) -> None:
        handler.body()
        handler.answer(status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode())

    return behave


def hang(handler: Handler) -> None:
    """No answer until the server stops."""
    handler.server.stopped.wait(60)


def drip(handler: Handler) -> None:
    """The right answer at 10 bytes a second."""
    data = handler.server.objects.get(handler.path.partition("?")[0], b"")
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    for start in range(0, len(data), 10):
        if handler.server.stopped.wait(1):
            return
        handler.wfile.write(data[start : start + 10])


def reset(handler: Handler) -> None:
    """The connection ends before any answer."""
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


def truncated(handler: Handler) -> None:
    """Half of the body, then the end of the connection."""
    data = handler.server.objects[handler.path.partition("?")[0]]
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data[: len(data) // 2])
    handler.close_connection = True


def ignoring_ranges(handler: Handler) -> None:
    """The whole object, whatever range was asked for."""
    del handler.headers["Range"]
    proper(handler)


def done_but_lost(handler: Handler) -> None:
    """The request is carried out, and its answer gets lost."""
    path = handler.path.partition("?")[0]
    handler.server.objects[path] = handler.body()
    reset(handler)


def slowly(seconds: float, then: Behaviour) -> Behaviour:
    def behave(handler: Handler) -> None:
        time.sleep(seconds)
        then(handler)

    return behave


def together(count: int, then: Behaviour) -> Behaviour:
    """Answers come once `count` requests are being served at the same time; requests one after another get none."""
    barrier = threading.Barrier(count)

    def behave(handler: Handler) -> None:
        barrier.wait(10)
        then(handler)

    return behave
