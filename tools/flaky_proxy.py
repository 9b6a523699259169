"""An HTTP proxy on loopback that can break in every way a network and an S3 server do, for as long as is asked.

    with Proxy(server.port, seed=1) as proxy:       # forwards proxy.port to 127.0.0.1:server.port
        proxy.rate = 0.2                            # a fifth of the requests meet a fault
        proxy.hang() / proxy.refuse() / proxy.pass_()
        proxy.bytes_per_s = 1e6                     # all responses together; None: as fast as it goes
        proxy.injected[Wire.DRIP]                   # how often that happened

Requests and responses are held in memory, whole: it is for objects of some MiB.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType

import h11
from s3_server import free_port

_DRIP_BYTES_S = 10
_PATIENCE_S = 120.0  # with a client that waits for what never comes
_RECEIVE = 65536
_PIECE = 65536


class Wire(StrEnum):
    """One way to break."""

    ERROR_500 = "500"  # not forwarded
    SLOW_DOWN = "503"  # not forwarded
    LOST_REQUEST = "reset-before-request"  # not forwarded
    LOST_RESPONSE = "reset-before-response"  # done, and nobody hears of it
    RESET = "reset-in-response"  # half of the response, then a reset
    TRUNCATED = "truncated"  # half of the response, then an orderly end
    DRIP = "drip"  # ten bytes a second
    HANG = "hang"  # nothing, until the client gives up


_STATUS = {Wire.ERROR_500: (500, b"InternalError"), Wire.SLOW_DOWN: (503, b"SlowDown")}
_FORWARDED = {Wire.LOST_RESPONSE, Wire.RESET, Wire.TRUNCATED, Wire.DRIP}


@dataclass
class _Message:
    """A request or a response with its body."""

    head: h11.Request | h11.Response
    body: bytes


class _Closed(Exception):
    """The other side is gone."""


class Proxy:
    """Forwards its own port to `target` on 127.0.0.1. rate: the chance of one of `faults` per request."""

    def __init__(self, target: int, seed: int = 0, faults: Sequence[Wire] = tuple(Wire)) -> None:
        """Nobody listens before `pass_`."""
        self.target = target
        self.rate = 0.0
        self.bytes_per_s: float | None = None
        self.faults = tuple(faults)
        self.injected: Counter[Wire] = Counter()
        self.requests = 0
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._narrow = threading.Lock()
        self._flow = threading.Event()
        self._flow.set()
        self._open: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self.port = free_port()

    def pass_(self) -> None:
        """Listen, and let bytes flow."""
        self._flow.set()
        if self._listener is None:
            listener = socket.create_server(("127.0.0.1", self.port))
            self._listener = listener
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def hang(self) -> None:
        """Connections open, but nothing flows until `pass_`."""
        self._flow.clear()

    def refuse(self) -> None:
        """Nobody listens, and open connections are closed."""
        listener, self._listener = self._listener, None
        if listener:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self._flow.set()
        for side in list(self._open):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Proxy:
        self.pass_()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.refuse()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """One connection: request after request, until a side or a fault ends it."""
        self._open.add(client)
        server: socket.socket | None = None
        try:
            server = socket.create_connection(("127.0.0.1", self.target))
            self._open.add(server)
            ours, theirs = h11.Connection(h11.SERVER), h11.Connection(h11.CLIENT)
            while self._exchange(client, ours, server, theirs):
                ours.start_next_cycle()
                theirs.start_next_cycle()
        except (OSError, _Closed, h11.ProtocolError):
            pass
        finally:
            for side in filter(None, (client, server)):
                self._open.discard(side)
                side.close()

    def _exchange(
        self, client: socket.socket, ours: h11.Connection, server: socket.socket, theirs: h11.Connection
    ) -> bool:
        """One request and its response. False if the connection ends with it."""
        request = _receive(client, ours)
        fault = self._fault()
        self._flow.wait()
        if fault in _STATUS:
            client.sendall(_refusal(ours, *_STATUS[fault]))
            return False
        if fault is Wire.LOST_REQUEST:
            _reset(client)
            return False
        if fault is Wire.HANG:
            _wait_for_end(client)
            return False
        server.sendall(_encoded(theirs, request))
        response = _receive(server, theirs)
        self._flow.wait()
        data = _encoded(ours, response)
        if fault in _FORWARDED:
            _break_off(client, data, fault)
            return False
        self._send(client, data)
        return bool(ours.our_state is h11.DONE and theirs.their_state is h11.DONE)

    def _send(self, client: socket.socket, data: bytes) -> None:
        for start in range(0, len(data), _PIECE):
            piece = data[start : start + _PIECE]
            if self.bytes_per_s is not None:
                with self._narrow:  # one line for all
                    time.sleep(len(piece) / self.bytes_per_s)
            client.sendall(piece)

    def _fault(self) -> Wire | None:
        with self._lock:
            self.requests += 1
            if not self.faults or self._random.random() >= self.rate:
                return None
            fault = self._random.choice(self.faults)
            self.injected[fault] += 1
            return fault


def _receive(side: socket.socket, state: h11.Connection) -> _Message:
    """The next request or response with its whole body."""
    head: h11.Request | h11.Response | None = None
    body = bytearray()
    while True:
        event = state.next_event()
        if event is h11.NEED_DATA:
            if state.they_are_waiting_for_100_continue:
                side.sendall(state.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
            state.receive_data(side.recv(_RECEIVE))
        elif isinstance(event, h11.Request | h11.Response):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage) and head is not None:
            return _Message(head, bytes(body))
        elif isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
            raise _Closed


def _encoded(state: h11.Connection, message: _Message) -> bytes:
    """The message as bytes, in the sender's own framing."""
    # The client's wish to be asked first has been granted already.
    headers = [(name, value) for name, value in message.head.headers if name.lower() != b"expect"]
    head: h11.Request | h11.Response
    if isinstance(message.head, h11.Request):
        head = h11.Request(method=message.head.method, target=message.head.target, headers=headers)
    else:
        head = h11.Response(status_code=message.head.status_code, headers=headers, reason=message.head.reason)
    events: list[h11.Event] = [head, *([h11.Data(data=message.body)] if message.body else []), h11.EndOfMessage()]
    return b"".join(state.send(event) or b"" for event in events)


def _refusal(state: h11.Connection, status: int, code: bytes) -> bytes:
    """An error as S3 words it."""
    body = b'<?xml version="1.0"?><Error><Code>%s</Code><Message>injected</Message></Error>' % code
    headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body))), ("Connection", "close")]
    return _encoded(state, _Message(h11.Response(status_code=status, headers=headers), body))


def _break_off(client: socket.socket, data: bytes, fault: Wire) -> None:
    """Send some of a response, as the fault says."""
    if fault is Wire.DRIP:
        return _drip(client, data)
    if fault is not Wire.LOST_RESPONSE:
        client.sendall(data[: len(data) // 2])
    if fault is not Wire.TRUNCATED:
        _reset(client)


def _reset(side: socket.socket) -> None:
    """Close without the farewell, so that the peer sees a reset."""
    side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    side.close()


def _drip(client: socket.socket, data: bytes) -> None:
    end = time.monotonic() + _PATIENCE_S
    for start in range(0, len(data), _DRIP_BYTES_S):
        client.sendall(data[start : start + _DRIP_BYTES_S])
        time.sleep(1.0)
        if time.monotonic() > end:
            return


def _wait_for_end(client: socket.socket) -> None:
    client.settimeout(_PATIENCE_S)
    with contextlib.suppress(OSError):
        while client.recv(_RECEIVE):
            pass
