"""What must hold of a configuration for KV beyond the GPU."""

from __future__ import annotations

from disagg.config.tree import Config
from disagg.types.errors import ConfigError


def check_offload(config: Config) -> None:
    """Raises ConfigError for what cannot work."""
    if config.offload.enabled and not config.engine.prefix_cache:
        raise ConfigError(
            "offload.enabled = true and engine.prefix_cache = false: what is offloaded is found again by the prefix cache, so it "
            "must be on"
        )
    if config.offload.enabled and config.server.dp > 1:
        raise ConfigError(
            f"offload.enabled = true and server.dp = {config.server.dp}: what data-parallel ranks have cached stays on "
            "their devices; one of the two must be false or 1"
        )
    if config.offload.enabled and config.server.pp > 1:
        raise ConfigError(
            f"offload.enabled = true and server.pp = {config.server.pp}: what is offloaded has all layers of a page, and a "
            "stage has some; one of them must be left out (server.pp = 1)"
        )


def warnings_of_offload(config: Config) -> tuple[str, ...]:
    """Of a server: settings that do nothing as long as nothing is offloaded."""
    offload, storage = config.offload, config.storage
    idle = {"offload.host_bytes": offload.host_bytes, "storage.url": storage.url}
    if offload.enabled or not any(idle.values()):
        return ()
    said = " and ".join(f"{path} = {value}" for path, value in idle.items() if value)
    return (
        f"{said}: without use here, because offload.enabled = false; to keep KV there set it to true (--offload on)",
    )
