"""Bodies that the tests of the HTTP face ask with, and the events of a stream."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.api.fakes import MODEL

BODY = {"model": MODEL, "prompt": "to be or not", "temperature": 0}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello you"}], "temperature": 0}


def events(reply: httpx.Response) -> list[Any]:
    """The data of a stream's events; [DONE] as it is."""
    assert reply.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in reply.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]
