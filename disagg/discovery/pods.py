"""Pods as the Kubernetes API writes them, and the servers that they carry. Pure.

label disagg/role     prefill, decode or mixed; other pods are no servers; those of routers and tests, and
                      those that have none, are not meant to be
metadata.name         the server's name
port named grpc       of any container, or the only port that they have: where the server listens
status.podIP          its host; without one there is nothing to dial yet
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast, get_args

from disagg.config.tree import ServerRole
from disagg.discovery.found import Found
from disagg.types.addresses import join
from disagg.types.plain import quoted

ROLE_LABEL: Final = "disagg/role"
PORT_NAME: Final = "grpc"
DELETED: Final = "its pod is being deleted"
NOT_READY: Final = "its pod is not ready"
_ENDED: Final = ("Failed", "Succeeded")  # phases in which no container of the pod runs, or will
_ROLES: Final = get_args(ServerRole)
_OTHERS: Final = (None, "router", "test")  # roles of pods that are not meant to be servers
_NAME_CHARS: Final = 100


def found_in(pod: Mapping[str, Any]) -> Found | None:
    """The server that a pod carries, if it carries one that can be dialled. Whatever the pod lacks, it is no error."""
    metadata, status = _mapping(pod.get("metadata")), _mapping(pod.get("status"))
    name, role, ip = metadata.get("name"), _mapping(metadata.get("labels")).get(ROLE_LABEL), status.get("podIP")
    port = _port(_mapping(pod.get("spec")))
    if role not in _ROLES or status.get("phase") in _ENDED or not isinstance(port, int):
        return None
    if not isinstance(name, str) or not name or not isinstance(ip, str) or not _is_ip(ip):
        return None
    return Found(
        name=name, role=cast(ServerRole, role), address=join(ip, port), uid=uid_of(pod), held=_held(metadata, status)
    )


def fault_of(pod: Mapping[str, Any]) -> str:
    """Why a pod that is meant to be a server can never be one as it is, and what is allowed; empty where there is no such
    reason, also for pods that are none yet, or no more."""
    status = _mapping(pod.get("status"))
    if status.get("phase") in _ENDED:
        return ""
    role = _mapping(_mapping(pod.get("metadata")).get("labels")).get(ROLE_LABEL)
    port, ip = _port(_mapping(pod.get("spec"))), status.get("podIP")
    if role in _OTHERS:
        return ""
    if role not in _ROLES:
        return f"its label {ROLE_LABEL} is {_said(role)}; of a server it must be one of {', '.join(_ROLES)}"
    if isinstance(port, str):
        return port
    if ip and not (isinstance(ip, str) and _is_ip(ip)):
        return f"its status.podIP is {_said(ip)}; it must be an IP address"
    return ""


def uid_of(pod: Mapping[str, Any]) -> str:
    uid = _mapping(pod.get("metadata")).get("uid")
    return uid if isinstance(uid, str) else ""


def version_of(listed: Mapping[str, Any]) -> str:
    """The resourceVersion of a pod, a list or a bookmark; empty where it has none."""
    version = _mapping(listed.get("metadata")).get("resourceVersion")
    return version if isinstance(version, str) else ""


def has_ended(pod: Mapping[str, Any] | None, uid: str) -> bool:
    """Whether all processes of the pod with this uid have ended. pod: what has its name now, None if nothing has.

    The API forgets a pod when its node has said that its containers have ended, or when an operator deletes it by force,
    which says the same in their name.
    """
    if pod is None or uid_of(pod) != uid:
        return True
    return _mapping(pod.get("status")).get("phase") in _ENDED


def _held(metadata: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    if metadata.get("deletionTimestamp"):
        return DELETED
    ready = any(
        each.get("type") == "Ready" and each.get("status") == "True" for each in _mappings(status, "conditions")
    )
    return "" if ready else NOT_READY


def _port(spec: Mapping[str, Any]) -> int | str:
    """Where the server listens, or why that cannot be told."""
    ports = [port for container in _mappings(spec, "containers") for port in _mappings(container, "ports")]
    named = [port for port in ports if port.get("name") == PORT_NAME] or ports
    if len(named) != 1:
        have = f"{len(named)} ports of its containers" if named else "no port of its containers"
        return f"{have} can be where its server listens; one must have the name {PORT_NAME}, or be the only one"
    number = named[0].get("containerPort")
    if isinstance(number, int) and 0 < number < 1 << 16:
        return number
    return f"the containerPort of its server is {_said(number)}; it must be from 1 to 65535"


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _said(value: object) -> str:
    """What somebody wrote: text in quotes, at most so much of it; of objects only what they are."""
    if isinstance(value, str):
        return quoted(value, _NAME_CHARS)
    return repr(value)[:_NAME_CHARS] if value is None or isinstance(value, int | float) else f"a {type(value).__name__}"


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _mappings(value: Mapping[str, Any], name: str) -> Iterable[Mapping[str, Any]]:
    inner = value.get(name)
    return [each for each in inner if isinstance(each, dict)] if isinstance(inner, list) else ()
