"""How servers are found is said once, and completely."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.config.load import load_config
from disagg.types.errors import ConfigError

SERVER = '[{"name": "d", "role": "decode", "address": "h:1"}]'


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"discovery": "etcd"}, "static"),
        ({"discovery": "kubernetes", "servers": SERVER}, "give one of the two"),
        ({"selector": "a=b"}, "router.selector says where"),
        ({"discovery": "dns"}, "needs router.selector"),
        ({"namespace": "x"}, "router.namespace"),
        ({"servers": SERVER.replace("h:1", "http://127.0.0.1:1")}, "must be host:port"),
        ({"servers": SERVER.replace("h:1", "a b:1")}, "must be host:port"),
        ({"kubeconfig": "x"}, "router.kubeconfig"),
        ({"discovery": "kubernetes", "namespace": "No_Such"}, "router.namespace"),
    ],
)
def test_what_makes_no_sense_is_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(None, {f"router.{name}": value for name, value in values.items()}, {})


def test_what_makes_sense_is_taken() -> None:
    for values in (
        {"discovery": "kubernetes"},
        {"discovery": "kubernetes", "selector": "a in (b,c)", "namespace": "models-1", "kubeconfig": "/etc/kube"},
        {"discovery": "dns", "selector": "decode=d:1"},
        {"servers": SERVER},
    ):
        load_config(None, {f"router.{name}": value for name, value in values.items()}, {})


@pytest.mark.parametrize("pod", ["x", "a/b", "a//c", "a/b/c/d", f"a/b/{'c' * 400}"])
def test_a_pod_is_said_whole(pod: str) -> None:
    assert load_config(None, {"server.pod": "a/b/c"}, {}).server.pod == "a/b/c"
    with pytest.raises(ConfigError, match=r"server\.pod"):
        load_config(None, {"server.pod": pod}, {})
