"""TCP from a port of its own to another one, late or broken off at will."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time


class Relay:
    """Carries connections to `target` (`host:port`) on a thread of its own; a context manager that ends them.

    What it carries arrives `delay` seconds later, in each direction, in order.
    """

    def __init__(self, target: str) -> None:
        self.delay = 0.0
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._carry, sock=self._listener), self._loop
        ).result(10)

    def reset(self) -> int:
        """Break every connection off with a RST to both ends; how many ends there were."""

        async def reset() -> int:
            writers = list(self._writers)
            for writer in writers:
                sock = writer.get_extra_info("socket")
                with contextlib.suppress(OSError):  # closed already
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            return len(writers)

        return asyncio.run_coroutine_threadsafe(reset(), self._loop).result(10)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        async def end() -> None:
            self._server.close()
            carrying = asyncio.all_tasks() - {asyncio.current_task()}
            for task in carrying:
                task.cancel()
            await asyncio.gather(*carrying, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            target_reader, target_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, target_writer}
        self._writers |= ends
        try:
            await asyncio.gather(self._pump(reader, target_writer), self._pump(target_reader, writer))
        except OSError:  # one end is gone
            pass
        finally:
            self._writers -= ends
            for end in ends:
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one direction until it ends; then the whole connection ends."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=1024)

        async def deliver() -> None:
            while True:
                due, data = await under_way.get()
                if (late := due - time.monotonic()) > 0:
                    await asyncio.sleep(late)
                if not data:
                    raise ConnectionAbortedError
                writer.write(data)
                await writer.drain()

        async def take() -> None:
            data = b"begin"
            while data:
                data = await reader.read(1 << 16)
                await under_way.put((time.monotonic() + self.delay, data))

        await asyncio.gather(deliver(), take())
