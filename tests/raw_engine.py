"""What vLLM 0.32 answers at its endpoints that clear caches."""

from __future__ import annotations

import json
import socket

from raw_http import Asked, RawServer, response

ALL = ["/reset_encoder_cache", "/reset_mm_cache", "/reset_prefix_cache?reset_external=true"]


class RawEngine(RawServer):
    """An engine whose prefix cache is in use for the first `busy` times that it is to be cleared."""

    def __init__(self, *, busy: int = 0, developing: bool = True) -> None:
        self.busy = busy
        self._developing = developing
        super().__init__(self._answer_as_vllm)

    def _answer_as_vllm(self, asked: Asked, _: socket.socket) -> bytes:
        if not self._developing or asked.target not in ALL:
            return response(404, b'{"detail":"Not Found"}')
        if asked.method != "POST":
            return response(405, b'{"detail":"Method Not Allowed"}')
        if not asked.target.startswith("/reset_prefix_cache"):
            return response(200)
        self.busy -= 1
        return response(200, json.dumps({"success": self.busy < 0}).encode())
