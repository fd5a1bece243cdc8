"""Pods of the chart: how they are confined and probed, where they are, what they mount, and when they begin again."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart import HELMS, HERE, RELEASE, Manifest, of_kind, processes, rendered, template
from tests.deploy.matrix import given, has_tls, matrix


@matrix
def test_pods_are_confined_probed_and_given_the_time_to_drain(values: Path) -> None:
    for process in processes(rendered("helm-4", values)):
        pod, container, own = process.pod, process.container, given(values)[process.role]
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        watches = process.role == "router" and given(values)["discovery"] == "kubernetes"
        assert pod["automountServiceAccountToken"] is watches
        confined = container["securityContext"]
        assert confined["readOnlyRootFilesystem"] is True
        assert confined["allowPrivilegeEscalation"] is False
        amounts = container.get("resources", {}).get("limits", {})
        wants_rdma = any(name.startswith("rdma/") and amount != "0" for name, amount in amounts.items())
        added = {"add": ["IPC_LOCK"]} if wants_rdma else {}
        assert confined["capabilities"] == {"drop": ["ALL"], **added}
        assert all(isinstance(amount, str) for amount in amounts.values())
        grace = pod["terminationGracePeriodSeconds"]
        slept = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert grace >= 35
        assert grace >= slept + own["drainSeconds"] + 5
        port, ready = ("http", "/health?waiting") if process.role == "router" else ("metrics", "/health")
        scheme = {"scheme": "HTTPS"} if process.role == "router" and has_tls(given(values)) else {}
        paths = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
        assert paths == {
            "startup": {"path": "/live", "port": port, **scheme},
            "readiness": {"path": ready, "port": port, **scheme},
            "liveness": {"path": "/live", "port": port, **scheme},
        }
        writable = {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")}
        assert {"/tmp", "/var/cache/disagg"} <= writable
        if process.role != "router":
            assert "/dev/shm" in writable
            [shm] = [each["emptyDir"] for each in pod["volumes"] if each["name"] == "shm"]
            assert shm == {"medium": "Memory", "sizeLimit": own["shmSize"]}
            gpu = given(values)["gpu"]
            wanted = str(ranks_of(own)) if gpu["enabled"] else None
            assert amounts.get(gpu["resource"]) == wanted


def ranks_of(own: dict[str, Any]) -> int:
    """Each with a GPU of its own."""
    server = {"dp": 1, "pp": 1, **own["config"].get("server", {})}
    return int(own["tp"] * server["dp"] * server["pp"])


@matrix
def test_pools_are_where_the_values_say_and_found_by_their_labels(values: Path) -> None:
    manifests = rendered("helm-4", values)
    for workload in of_kind(manifests, "Deployment", "StatefulSet"):
        role = workload["metadata"]["labels"]["disagg/role"]
        own, spec = given(values)[role], workload["spec"]
        labels = spec["template"]["metadata"]["labels"]
        assert labels["disagg/role"] == role
        assert labels["app.kubernetes.io/instance"] == RELEASE
        assert spec["selector"]["matchLabels"].items() <= labels.items()
        assert spec.get("replicas") == (None if own["autoscaling"]["enabled"] else own["replicas"])
        pod = spec["template"]["spec"]
        assert pod.get("nodeSelector", {}) == own["nodeSelector"]
        assert pod.get("tolerations", []) == own["tolerations"]
    roles = {each.role for each in processes(manifests)}
    assert roles == {"router", "prefill", "decode"} | ({"mixed"} if given(values)["mixed"]["enabled"] else set())


@matrix
def test_volumes_and_strategies_of_a_persons_own_are_where_they_say(values: Path) -> None:
    for workload in of_kind(rendered("helm-4", values), "Deployment", "StatefulSet"):
        own = given(values)[workload["metadata"]["labels"]["disagg/role"]]
        pod = workload["spec"]["template"]["spec"]
        [container] = pod["containers"]
        assert [each for each in own["extraVolumes"] if each not in pod["volumes"]] == []
        assert [each for each in own["extraVolumeMounts"] if each not in container["volumeMounts"]] == []
        names = [each["name"] for each in pod["volumes"]]
        assert len(names) == len(set(names))
        assert {each["name"] for each in container["volumeMounts"]} <= set(names)
        if workload["kind"] == "StatefulSet":
            kind, partition = own["updateStrategy"]["type"], own["updateStrategy"]["partition"]
            rolls = {"rollingUpdate": {"partition": partition}} if kind == "RollingUpdate" else {}
            assert workload["spec"]["updateStrategy"] == {"type": kind, **rolls}


def test_pods_begin_again_when_their_settings_change_and_only_then() -> None:
    def sums(name: str) -> dict[str, str]:
        found = of_kind(rendered("helm-4", HERE / "values" / name), "Deployment", "StatefulSet")
        return {
            each["metadata"]["labels"]["disagg/role"]: each["spec"]["template"]["metadata"]["annotations"][
                "checksum/config"
            ]
            for each in found
        }

    plain, network, settings = sums("defaults.yaml"), sums("network-closed.yaml"), sums("settings.yaml")
    assert plain == network
    assert all(plain[role] != settings[role] for role in plain)


def with_values(tmp_path: Path, values: dict[str, Any]) -> tuple[Manifest, ...]:
    """Manifests of values that are not in the matrix."""
    text = yaml.safe_dump(values)
    (file := tmp_path / f"{hashlib.sha256(text.encode()).hexdigest()}.yaml").write_text(
        text
    )  # rendered once by its name
    return rendered("helm-4", file)


IN = "DuringSchedulingIgnoredDuringExecution"
ON_NODES = {"nodeAffinity": {f"preferred{IN}": [{"weight": 1, "preference": {"matchExpressions": []}}]}}
NEAR = {"podAffinity": {f"preferred{IN}": []}}


@pytest.mark.parametrize(
    ("pairs", "own", "kinds", "near"),
    [
        ("required", {}, {"podAffinity"}, {f"required{IN}"}),
        ("required", ON_NODES, {"nodeAffinity", "podAffinity"}, {f"required{IN}"}),
        ("required", {**ON_NODES, "podAffinity": {}}, {"nodeAffinity", "podAffinity"}, {f"required{IN}"}),
        ("preferred", {}, {"podAffinity"}, {f"preferred{IN}"}),
        ("preferred", ON_NODES, {"nodeAffinity"}, set()),
        ("preferred", NEAR, {"podAffinity"}, {f"preferred{IN}"}),
        ("none", ON_NODES, {"nodeAffinity"}, set()),
        ("none", {}, set(), set()),
    ],
)
def test_what_pairs_require_is_required_beside_an_affinity_of_the_pools_own(
    pairs: str, own: dict[str, Any], kinds: set[str], near: set[str], tmp_path: Path
) -> None:
    made = with_values(tmp_path, {"pairs": {"affinity": pairs}, "decode": {"affinity": own}})
    [decode] = [each.pod for each in processes(made) if each.role == "decode"]
    affinity = decode.get("affinity", {})
    assert set(affinity) == kinds
    assert set(affinity.get("podAffinity", {})) == near
    if "nodeAffinity" in kinds:
        assert affinity["nodeAffinity"] == ON_NODES["nodeAffinity"]
    if near and own is not NEAR:
        [term] = affinity["podAffinity"].popitem()[1]
        term = term.get("podAffinityTerm", term)
        assert term["topologyKey"] == "topology.kubernetes.io/zone"
        assert term["labelSelector"]["matchExpressions"][0]["values"] == ["prefill", "decode"]


def test_a_rollout_of_routers_waits_for_models_that_load(tmp_path: Path) -> None:
    def deadline_s(values: dict[str, Any]) -> int:
        [router] = of_kind(with_values(tmp_path, values), "Deployment")
        return int(router["spec"]["progressDeadlineSeconds"])

    loads = {"worker": {"load_timeout_s": "30m"}}
    assert deadline_s({}) == 600 + 600
    assert deadline_s({"decode": {"config": loads}}) == 1800 + 600
    assert deadline_s({"mixed": {"config": loads}}) == 600 + 600, "there is no mixed pool"
    assert deadline_s({"config": {"worker": {"load_timeout_s": "1000000h"}}}) == 2**31 - 1


@pytest.mark.parametrize("version", HELMS)
def test_volumes_from_images_are_taken_where_nothing_says_that_there_are_none(version: str) -> None:
    for name in ("model-image", "extra-volumes"):
        for words in ((), ("--kube-version", "1.33.0"), ("--kube-version", "1.35.1", "--api-versions", "v1/Pod")):
            done = template(version, HERE / "values" / f"{name}.yaml", *words)
            assert done.returncode == 0, done.stderr


def test_the_pod_of_helm_test_is_where_routers_may_be(tmp_path: Path) -> None:
    [plain] = of_kind(with_values(tmp_path, {}), "Pod")
    assert not {"nodeSelector", "tolerations"} & set(plain["spec"])
    where = {"nodeSelector": {"pool": "cpu"}, "tolerations": [{"key": "cpu", "operator": "Exists"}]}
    [test] = of_kind(with_values(tmp_path, {"router": where}), "Pod")
    assert {name: test["spec"][name] for name in where} == where
