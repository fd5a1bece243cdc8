"""Which discovery the configuration asks for, and what its selector means."""

from __future__ import annotations

from typing import cast, get_args

from disagg.config.tree import RouterConfig, ServerRole
from disagg.discovery.dns import DnsDiscovery, Name
from disagg.discovery.found import Discovery, Static
from disagg.types.addresses import split
from disagg.types.errors import ConfigError

DEFAULT_SELECTOR = "app.kubernetes.io/name=disagg"


def discovery_of(router: RouterConfig) -> Discovery:
    """Raises ConfigError where the selector makes no sense, or the client of Kubernetes is not installed."""
    if router.discovery == "dns":
        return DnsDiscovery(names_of(router.selector))
    if router.discovery == "kubernetes":
        try:
            from disagg.discovery.kubernetes import KubernetesDiscovery  # takes half a second, and is an extra
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"router.discovery = kubernetes needs the package {error.name}: pip install 'disagg[kubernetes]'"
            ) from error
        return KubernetesDiscovery(router.namespace, router.selector or DEFAULT_SELECTOR, router.kubeconfig)
    return Static(router.servers)


def names_of(selector: str) -> tuple[Name, ...]:
    """Of `prefill=HOST:PORT,decode=HOST:PORT`. Raises ConfigError."""
    roles = get_args(ServerRole)
    names = []
    for part in selector.split(","):
        role, _, where = part.strip().partition("=")
        try:
            if role.strip() not in roles:
                raise ValueError("no such role")
            host, port = split(where.strip())
        except ValueError as error:
            raise ConfigError(
                f'router.selector has "{part.strip()[:80]}"; with router.discovery = dns it must be ROLE=HOST:PORT with '
                f"commas between them, ROLE one of {', '.join(roles)}"
            ) from error
        names.append(Name(cast(ServerRole, role.strip()), host, port))
    return tuple(names)
