"""What vLLM's server is given as --middleware: every path asks for the token, not those below /v1 alone.

Its own check leaves /invocations, /tokenize and /scale_elastic_ep to anybody who reaches the port.
https://docs.vllm.ai/en/latest/usage/security.html
"""

from __future__ import annotations

import hmac
import json
import os
from typing import Any

KEY = "VLLM_API_KEY"


def shows(header: bytes, token: str) -> bool:
    """Whether a request's Authorization has the token."""
    return hmac.compare_digest(header, f"Bearer {token}".encode())


class Guard:
    """ASGI: https://asgi.readthedocs.io/en/latest/specs/www.html"""

    def __init__(self, app: Any) -> None:
        self.app, self.token = app, os.environ[KEY]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] in ("http", "websocket"):
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not shows(given, self.token):
                return await refused(scope["type"], send)
        return await self.app(scope, receive, send)


async def refused(kind: str, send: Any) -> None:
    if kind == "websocket":
        return await send({"type": "websocket.close", "code": 1008})
    body = json.dumps({"error": "the token of this model is asked for: Authorization: Bearer TOKEN"}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    return await send({"type": "http.response.body", "body": body})
