"""Values that make no sense: both Helms refuse them, and say where the nonsense is."""

from __future__ import annotations

import ipaddress
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart import CHART, HELMS, HERE, NAMESPACE, helm, of_kind, template

REFUSED = yaml.safe_load((HERE / "refused.yaml").read_text())


def test_there_are_as_many_as_was_promised() -> None:
    assert len({each["what"] for each in REFUSED}) >= 20


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case["what"])
def test_it_is_refused_with_the_path(case: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(case.get("values", {})))
    words = [word for each in case.get("set", ()) for word in ("--set", each)] + case.get("words", [])
    path = str(case["path"])
    for version in HELMS:
        done = template(version, file, *words)
        assert done.returncode != 0, f"{version} takes {case}"
        said = done.stderr.replace(",", "")  # 1,024
        assert path in said or f"/{path.replace('.', '/')}" in said, said
        assert str(case["says"]) in said
        assert "executing" not in said, "a trace of templates"
        assert str(case.get("hides", "\0")) not in said


@pytest.mark.parametrize("release", ["my.rel", "1abc", "disagg.rel"])
def test_a_release_whose_services_kubernetes_would_refuse_is_refused_and_has_a_way_out(release: str) -> None:
    for version in HELMS:
        done = helm(version, "template", release, str(CHART), "--namespace", NAMESPACE)
        assert done.returncode != 0
        assert f"fullnameOverride: Services of the release {release} would be named {release}" in done.stderr
        named = helm(
            version, "template", release, str(CHART), "--namespace", NAMESPACE, "--set", "fullnameOverride=llm"
        )
        assert named.returncode == 0, named.stderr
        manifests = tuple(each for each in yaml.safe_load_all(named.stdout) if each)
        assert {each["metadata"]["name"] for each in of_kind(manifests, "Service")} >= {"llm-router"}


def test_a_network_that_is_none_is_refused_in_words(tmp_path: Path) -> None:
    """Not with all the ways to write an address."""
    for network in ("10.0.0.0/33", "1.2.3/8", "1:2:3:4:5:6:7/64", "::1::/64", "12345::/16", "256.0.0.1/8", ":/0"):
        (file := tmp_path / "values.yaml").write_text(
            yaml.safe_dump({"networkPolicy": {"clientsFrom": [{"ipBlock": {"cidr": network}}]}})
        )
        for version in HELMS:
            done = template(version, file)
            assert done.returncode != 0, network
            assert "such as 10.0.0.0/8" in done.stderr and len(done.stderr) < 500


def test_parts_of_networks_are_told_from_others(tmp_path: Path) -> None:
    """As Python's ipaddress does."""
    chance = random.Random(7)
    blocks: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for bits, kind in ((32, ipaddress.IPv4Network), (128, ipaddress.IPv6Network)):
        while len(blocks) < 60 * bits // 32:
            length = chance.randrange(bits)
            longer = chance.randint(length + 1, bits)
            address = chance.getrandbits(bits)
            network = kind((address, length), strict=False)
            inside = kind((address, longer), strict=False)
            wrong = int(inside.network_address) ^ (1 << (bits - 1 - chance.randrange(length or 1)))
            outside = kind((wrong, longer), strict=False)
            blocks.append({"cidr": str(network), "except": [str(inside)]})
            if not outside.subnet_of(network):  # type: ignore[arg-type]
                others.append({"cidr": network.exploded, "except": [str(outside)]})
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump({"networkPolicy": {"clientsFrom": [{"ipBlock": each} for each in blocks]}}))
    done = template("helm-4", file)
    assert done.returncode == 0, done.stderr
    for each in chance.sample(others, 12):
        file.write_text(yaml.safe_dump({"networkPolicy": {"clientsFrom": [{"ipBlock": each}]}}))
        done = template("helm-4", file)
        assert done.returncode != 0, each
        assert "clientsFrom.0.ipBlock.except.0" in done.stderr


DURING = "DuringSchedulingIgnoredDuringExecution"
MORE_THAN_4 = {"matchExpressions": [{"key": "gpus", "operator": "Gt", "values": ["4"]}]}
NETWORKS = ["10.0.0.0/8", "::/0", "fd00::/8", "2001:db8:1:2:3:4:5:6/128", "2001:db8::1:2/64", "::ffff:10.0.0.0/104"]


def test_what_kubernetes_takes_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    values = {
        "ingress": {"enabled": True, "hosts": ["llm.example.com", "*.example.com", "3com.4a", "localhost"]},
        "networkPolicy": {"clientsFrom": [{"ipBlock": {"cidr": each}} for each in NETWORKS]},
        "router": {
            "podAnnotations": {"Example.com/Some_Thing.x": "anything at all"},
            "podLabels": {"example.com/team": "", "Team_1": "A.b_c-d"},
            "tolerations": [{"operator": "Exists"}, {"key": "nvidia.com/gpu", "value": "present"}],
            "config": {"tracing": {"otlp_endpoint": "http://collector.svc:4318/v1/traces"}},
        },
        "offload": {"enabled": True},
        "storage": {"url": "file:///var/lib/disagg/kv/..a/b", "pvc": {"claimName": "kv"}},
        "prefill": {"affinity": {"nodeAffinity": {f"required{DURING}": {"nodeSelectorTerms": [MORE_THAN_4]}}}},
    }
    file.write_text(yaml.safe_dump(values))
    for version in HELMS:
        done = template(version, file)
        assert done.returncode == 0, done.stderr
