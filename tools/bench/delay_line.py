"""A long way to a server on loopback: whatever is sent arrives later, in its order, however much it is.

    with DelayLine(server.port, 0.02) as line:       # 127.0.0.1:line.port, a round trip takes 20 ms longer

A process of its own, which understands nothing of what it passes on: it takes tens of microseconds a request, where
tools/flaky_proxy.py, which parses, takes so long that many requests at a time would wait for it and not for the line.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from types import TracebackType

_RECEIVE = 1 << 18


class DelayLine:
    """One relay to a port of 127.0.0.1; what the server sends arrives `delay` seconds later."""

    def __init__(self, target: int, delay: float) -> None:
        """Starts nothing before it is entered."""
        self._command = [sys.executable, __file__, str(target), str(delay)]
        self.port = 0

    def __enter__(self) -> DelayLine:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()  # the end of its input ends it


async def _relay(target: int, delay: float, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
    server, to_server = await asyncio.open_connection("127.0.0.1", target)
    try:
        await asyncio.gather(_pass(client, to_server, 0.0), _pass(server, to_client, delay))
    except OSError:
        pass
    finally:
        to_server.close()
        to_client.close()


async def _pass(source: asyncio.StreamReader, to: asyncio.StreamWriter, delay: float) -> None:
    """Everything until the end, each piece `delay` after it came: a line holds many pieces at a time."""
    loop = asyncio.get_running_loop()
    while data := await source.read(_RECEIVE):
        if delay:
            loop.call_later(delay, to.write, data)
        else:
            to.write(data)
    loop.call_later(delay, to.close)


async def _serve(target: int, delay: float) -> None:
    server = await asyncio.start_server(lambda *sides: _relay(target, delay, *sides), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)  # connections may be open still; nothing here needs an end


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), float(sys.argv[2])))
