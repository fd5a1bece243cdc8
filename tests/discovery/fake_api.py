"""A Kubernetes API of one namespace's pods, over HTTP: get, list in pages, watch with bookmarks. It fails as it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from aiohttp import web

NAMESPACE = "models"
BOOKMARK_S = 0.05
KEPT_EVENTS = 50  # a version that is older is answered with 410


def pod(
    name: str, role: str = "decode", ip: str = "10.0.0.1", *, ready: bool = True, port: int = 7000, **more: Any
) -> Any:
    """more: labels beside the role."""
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "labels": {"disagg/role": role, "app": "x", **more}},
        "spec": {"containers": [{"name": "c", "ports": [{"name": "grpc", "containerPort": port}]}]},
        "status": {
            "podIP": ip,
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


class FakeApi:
    """faults: what befalls the next calls, one each: a status, "hang", "drop", "nonsense" or "silent" (a watch that hears
    nothing more, and does not end). always: what befalls every call of its kind ("list", "watch"), until it is taken away: of
    a watch "end" (at once) or "told" (at once, after a bookmark) or "told 410"; of a list "again" (each page is continued with
    the same) or "more" (with another, without end)."""

    def __init__(self, namespace: str = NAMESPACE) -> None:
        self.namespace = namespace
        self.pods: dict[str, Any] = {}
        self.faults: list[int | str] = []
        self.get_faults: list[int | str] = []  # of calls that ask for one pod
        self.always: dict[str, str] = {}
        self.calls: list[str] = []
        self.page = 2
        self._version = 100
        self._events: list[tuple[int, str, Any]] = []
        self._changed = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get(f"/api/v1/namespaces/{self.namespace}/pods", self._pods)
        app.router.add_get(f"/api/v1/namespaces/{self.namespace}/pods/{{name}}", self._pod)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]

    async def close(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def kubeconfig(self, directory: Path, **context: str) -> str:
        """context: more of it, such as a namespace."""
        file = directory / "kubeconfig"
        cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}
        context = {"name": "x", "context": {"cluster": "c", "user": "u", **context}}
        user = {"name": "u", "user": {"token": "t"}}
        file.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [cluster],
                    "contexts": [context],
                    "users": [user],
                    "current-context": "x",
                }
            )
        )
        return str(file)

    # ---- what happens to pods

    def put(self, made: Any) -> None:
        name = made["metadata"]["name"]
        self._happen("MODIFIED" if name in self.pods else "ADDED", made)
        self.pods[name] = made

    def delete(self, name: str, *, said: bool = True) -> None:
        """said: whether watches hear of it."""
        self._happen("DELETED", self.pods.pop(name), said)

    def _happen(self, kind: str, made: Any, said: bool = True) -> None:
        self._version += 1
        made["metadata"]["resourceVersion"] = str(self._version)
        if said:
            self._events.append((self._version, kind, copy.deepcopy(made)))
            del self._events[:-KEPT_EVENTS]
        self._changed.set()
        self._changed = asyncio.Event()

    # ---- what it answers

    async def _pod(self, request: web.Request) -> web.StreamResponse:
        fault = await self._fault("get")
        if fault is not None:
            return fault
        found = self.pods.get(request.match_info["name"])
        return _status(404, "no such pod") if found is None else web.json_response(found)

    async def _pods(self, request: web.Request) -> web.StreamResponse:
        watch = request.query.get("watch") in ("true", "True")
        silent = watch and self.faults[:1] == ["silent"]
        fault = await self._fault("watch" if watch else "list")
        if fault is not None:
            return fault
        wanted = dict(each.split("=") for each in request.query["labelSelector"].split(","))

        def chosen(each: Any) -> bool:
            return bool(wanted.items() <= each["metadata"]["labels"].items())

        if watch and "watch" in self.always:
            return web.Response(body=self._cut_short(self.always["watch"]))
        if watch:
            response = web.StreamResponse()
            with contextlib.suppress(ConnectionError):
                await response.prepare(request)
                await self._watch(request, response, chosen, silent)
            return response
        names = sorted(name for name, each in self.pods.items() if chosen(each))
        begin = int(request.query.get("continue") or 0)
        if "list" in self.always:
            following = "7" if self.always["list"] == "again" else str(begin + 1)
            return web.json_response({"metadata": {"resourceVersion": "1", "continue": following}, "items": []})
        end = begin + min(self.page, int(request.query["limit"]))
        metadata = {"resourceVersion": str(self._version), "continue": str(end) if end < len(names) else ""}
        return web.json_response({"metadata": metadata, "items": [self.pods[name] for name in names[begin:end]]})

    def _cut_short(self, how: str) -> bytes:
        mark = _line("BOOKMARK", {"metadata": {"resourceVersion": str(self._version)}})
        return {
            "end": b"",
            "told": mark,
            "told 410": mark + _line("ERROR", {"kind": "Status", "code": 410, "message": "too old"}),
        }[how]

    async def _fault(self, call: str) -> web.StreamResponse | None:
        self.calls.append(call)
        faults = self.get_faults if call == "get" else self.faults
        fault = faults.pop(0) if faults else None
        if isinstance(fault, int):
            return _status(fault, "told to")
        if fault == "hang":
            await asyncio.sleep(60)
        if fault == "nonsense":
            return web.Response(body=b'{"items": 3}\n{"type"\n')
        if fault == "drop":
            raise ConnectionResetError
        return None

    async def _watch(self, request: web.Request, response: web.StreamResponse, chosen: Any, silent: bool) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + (60 if silent else float(request.query["timeoutSeconds"]))
        seen = int(request.query["resourceVersion"])
        if self._events and seen < self._events[0][0] - 1 and len(self._events) == KEPT_EVENTS:
            await response.write(_line("ERROR", {"kind": "Status", "code": 410, "message": "too old"}))
            return
        while loop.time() < until_s:
            changed = self._changed
            for version, kind, made in [] if silent else list(self._events):
                if version > seen and chosen(made):
                    line = _line(kind, made)
                    await response.write(line[: len(line) // 2])  # an event may come in parts
                    await response.write(line[len(line) // 2 :])
                    seen = version
            if self.faults[:1] == ["drop"]:
                self.faults.pop(0)
                assert request.transport is not None
                request.transport.abort()
                return
            try:
                async with asyncio.timeout(BOOKMARK_S):
                    await changed.wait()
            except TimeoutError:
                if not silent and not self._unsaid(seen):
                    mark = {"metadata": {"resourceVersion": str(max(seen, self._version))}}
                    await response.write(_line("BOOKMARK", mark))

    def _unsaid(self, seen: int) -> bool:
        return any(version > seen for version, _, _ in self._events)


def _line(kind: str, made: Any) -> bytes:
    return json.dumps({"type": kind, "object": made}).encode() + b"\n"


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "message": message}, status=code)


class ApiThread:
    """The same on a loop of a thread of its own, beside a test that has none. `with ApiThread() as api:`"""

    def __init__(self, namespace: str = NAMESPACE) -> None:
        self.fake = FakeApi(namespace)

    def __enter__(self) -> ApiThread:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._do(self.fake.start())
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self.fake.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def put(self, made: Any) -> None:
        self._loop.call_soon_threadsafe(self.fake.put, made)

    def delete(self, name: str) -> None:
        self._loop.call_soon_threadsafe(self.fake.delete, name)
