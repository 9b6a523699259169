"""A TCP proxy on loopback that can pass, hang or refuse: a store that stops answering, for as long as a test wants."""

import contextlib
import socket
import threading
from types import TracebackType


class Proxy:
    """Forwards its own port to `target` on 127.0.0.1.

    pass_(): bytes flow. hang(): connections open, but nothing flows until pass_(). refuse(): nobody listens, and open
    connections are closed.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self._flow = threading.Event()
        self._flow.set()
        self._open: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def pass_(self) -> None:
        self._flow.set()
        if self._listener is None:
            listener = socket.create_server(("127.0.0.1", self.port))
            self._listener = listener
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def hang(self) -> None:
        self._flow.clear()

    def refuse(self) -> None:
        listener, self._listener = self._listener, None
        if listener:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self._flow.set()
        for side in list(self._open):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> "Proxy":
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
                server = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                if self._listener is not listener:
                    return
                client.close()
                continue
            self._open |= {client, server}
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._flow.wait()
                sink.sendall(data)
        for side in (source, sink):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
        self._open.discard(source)
        source.close()
