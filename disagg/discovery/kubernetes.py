"""Pods by the Kubernetes API, with the official client (kubernetes, Apache-2.0; the extra `kubernetes`). HTTP and JSON only.

Objects are read as plain JSON: the client's models would refuse what a newer API adds, and take a hundred times as long.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio import client
from kubernetes.aio import config as kube_config

from disagg.discovery.found import Publish
from disagg.discovery.pods import has_ended, version_of
from disagg.discovery.reflector import Event, Expired, Pod, Reflector, SourceError, Timing
from disagg.types.errors import ConfigError

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
PAGE_PODS = 500  # of one answer to a list
MAX_PODS = 100_000
MAX_PAGES = 1000  # of one list; a server may give fewer pods in one than it was asked for
MAX_LIST_BYTES = 256 << 20  # of all pages of a list together
MAX_LINE_BYTES = 8 << 20  # of one event; the API refuses objects of more than about 1.5 MiB
GET_S = 10.0
_GONE, _NOT_FOUND = 410, 404
_load_kube_config: Any = kube_config.load_kube_config  # which has no types
_load_incluster_config: Any = kube_config.load_incluster_config
_contexts_of: Any = kube_config.list_kube_config_contexts


class KubernetesDiscovery:
    """Servers that run in pods of one namespace. selector: of labels, as kubectl takes it. kubeconfig: empty for what kubectl
    would find: within a pod what every pod is told, else the file that KUBECONFIG names, or the user's own.
    """

    def __init__(self, namespace: str, selector: str, kubeconfig: str = "", timing: Timing | None = None) -> None:
        self._namespace = namespace
        self._selector = selector
        self._kubeconfig = kubeconfig
        self._timing = timing
        self._api: client.CoreV1Api | None = None
        self._reflector: Reflector | None = None

    async def run(self, publish: Publish) -> None:
        configuration, namespace = await self._configuration()
        async with client.ApiClient(configuration) as api:
            self._api, self._namespace = client.CoreV1Api(api), namespace
            self._reflector = Reflector(Pods(self._api, namespace, self._selector), publish, self._timing)
            try:
                await self._reflector.run()
            finally:
                self._api = None

    def faults(self) -> Mapping[str, str]:
        return {} if self._reflector is None else self._reflector.faults.now

    async def gone(self, pod: str) -> bool:
        namespace, _, rest = pod.partition("/")
        name, _, uid = rest.partition("/")
        if self._api is None or namespace != self._namespace or not name or not uid:
            return False
        try:
            async with asyncio.timeout(GET_S):
                found, _ = await _answer(self._api.read_namespaced_pod_without_preload_content(name, self._namespace))
        except NotFound:
            return True
        except (Expired, SourceError, TimeoutError):
            return False
        return has_ended(found, uid)

    async def _configuration(self) -> tuple[client.Configuration, str]:
        """How to reach the API, and the namespace. Raises ConfigError."""
        configuration = client.Configuration()
        configuration.retries = None  # the reflector's to decide
        in_pod = False
        if not self._kubeconfig:
            with contextlib.suppress(kube_config.ConfigException):
                _load_incluster_config(configuration)
                in_pod = True
        try:
            if in_pod:
                return configuration, self._namespace or await asyncio.to_thread(_own_namespace)
            file = self._kubeconfig or None  # None: what KUBECONFIG names, or ~/.kube/config
            await _load_kube_config(file, client_configuration=configuration)
            if self._namespace:
                return configuration, self._namespace
            _, active = _contexts_of(file)
            return configuration, str(active["context"].get("namespace") or "default")
        except Exception as error:  # of a file that makes no sense the loader raises anything
            where = self._kubeconfig or "this process is in no pod with a service account, and has no kubeconfig"
            raise ConfigError(f"router.discovery = kubernetes: {where}: {str(error)[:400]}") from error


def _own_namespace() -> str:
    return NAMESPACE_FILE.read_text().strip()


class NotFound(SourceError):
    """404."""


class Pods:
    """A `PodSource`."""

    def __init__(self, api: client.CoreV1Api, namespace: str, selector: str) -> None:
        self._api = api
        self._namespace = namespace
        self._selector = selector

    async def list(self) -> tuple[list[Pod], str]:
        pods: list[Pod] = []
        following, seen, left_bytes = "", set[str](), MAX_LIST_BYTES
        for _ in range(MAX_PAGES):
            listed, size = await _answer(
                self._api.list_namespaced_pod_without_preload_content(
                    self._namespace, label_selector=self._selector, limit=PAGE_PODS, _continue=following or None
                ),
                left_bytes,
            )
            left_bytes -= size
            items, metadata = listed.get("items"), listed.get("metadata")
            if not isinstance(items, list) or not isinstance(metadata, dict):
                raise SourceError("the list makes no sense")
            pods += items
            if len(pods) > MAX_PODS:
                raise SourceError(f"more than {MAX_PODS} pods have {self._selector!r}")
            following = metadata.get("continue") or ""
            if not following:
                return pods, version_of(listed)
            if not isinstance(following, str) or following in seen:
                raise SourceError("the list has no end: what it is to be continued with makes no sense, or came before")
            seen.add(following)
        raise SourceError(f"the list has more than {MAX_PAGES} pages")

    async def watch(self, version: str, timeout_s: float) -> AsyncIterator[Event]:
        response = await _begun(
            self._api.list_namespaced_pod_without_preload_content(
                self._namespace,
                label_selector=self._selector,
                watch=True,
                allow_watch_bookmarks=True,
                resource_version=version,
                timeout_seconds=max(1, round(timeout_s)),
            )
        )
        with contextlib.closing(response), _connection_errors():
            partial = b""
            async for received in response.content.iter_any():
                *lines, partial = (partial + received).split(b"\n")
                if len(partial) > MAX_LINE_BYTES:
                    raise SourceError(f"an event of more than {MAX_LINE_BYTES >> 20} MiB")
                for line in lines:
                    if line.strip():
                        yield _event(line)


def _event(line: bytes) -> Event:
    said = _object(line)
    kind, pod = said.get("type"), said.get("object")
    if not isinstance(kind, str) or not isinstance(pod, dict):
        raise SourceError("an event without a type or an object")
    if kind == "ERROR":
        _raise(pod.get("code"), str(pod.get("message"))[:400])
    return Event(kind, pod)


async def _answer(request: Any, most_bytes: int = MAX_LIST_BYTES) -> tuple[dict[str, Any], int]:
    """The object, and the bytes of its text."""
    response = await _begun(request)
    with contextlib.closing(response), _connection_errors():
        content = await _bounded(response, most_bytes)
        return _object(content), len(content)


async def _bounded(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    content = bytearray()
    async for received in response.content.iter_any():
        content += received
        if len(content) > most_bytes:
            raise SourceError(f"a list, or a pod, of more than {MAX_LIST_BYTES >> 20} MiB")
    return bytes(content)


async def _begun(request: Any) -> aiohttp.ClientResponse:
    """The response to a request, if its status is good."""
    with _connection_errors():
        response: aiohttp.ClientResponse = await request
        if response.status != 200:
            with contextlib.closing(response):
                said = await response.content.read(4096)
            _raise(response.status, said.decode("utf-8", "replace")[:400])
        return response


def _raise(code: object, message: str) -> None:
    if code == _GONE:
        raise Expired(message)
    kind = NotFound if code == _NOT_FOUND else SourceError
    raise kind(f"status {code}: {message}")


@contextlib.contextmanager
def _connection_errors() -> Any:
    try:
        yield
    except (aiohttp.ClientError, OSError, client.ApiException) as error:
        raise SourceError(f"{type(error).__name__}: {str(error)[:400]}") from error


def _object(content: bytes) -> dict[str, Any]:
    try:
        said = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"no JSON: {content[:80]!r}") from error
    if not isinstance(said, dict):
        raise SourceError("no JSON object")
    return said
