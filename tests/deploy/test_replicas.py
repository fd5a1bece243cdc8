"""How many pods: what the values say, or, where an autoscaler decides, as many as the cluster has at that moment."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import yaml

from tests.deploy.chart import HELMS, HERE, NAMESPACE, RELEASE, Manifest, of_kind, rendered, template

AUTOSCALED = HERE / "values" / "autoscaling-hpa.yaml"
KEDA = HERE / "values" / "autoscaling-keda.yaml"
OWNED = {
    "labels": {"app.kubernetes.io/managed-by": "Helm"},
    "annotations": {"meta.helm.sh/release-name": RELEASE, "meta.helm.sh/release-namespace": NAMESPACE},
}
LIVE = {"deployments/rel-disagg-router": 5, "statefulsets/rel-disagg-prefill": 1, "statefulsets/rel-disagg-decode": 6}


def discovery(manifests: tuple[Manifest, ...]) -> dict[str, Any]:
    """What a cluster that takes these manifests answers to who asks what it has."""
    kinds: dict[str, set[str]] = {}
    for each in manifests:
        kinds.setdefault(each["apiVersion"], set()).add(each["kind"])
    versions = {name: {"groupVersion": name, "version": name.split("/")[-1]} for name in kinds}
    answers: dict[str, Any] = {
        "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {
            "kind": "APIGroupList",
            "groups": [
                {"name": name.split("/")[0], "versions": [versions[name]], "preferredVersion": versions[name]}
                for name in kinds
                if "/" in name
            ],
        },
    }
    for name, here in kinds.items():
        resources = [{"name": f"{kind.lower()}s", "kind": kind, "namespaced": True, "verbs": ["get"]} for kind in here]
        at = f"/apis/{name}" if "/" in name else f"/api/{name}"
        answers[at] = {"kind": "APIResourceList", "groupVersion": name, "resources": resources}
    return answers


@contextmanager
def cluster(manifests: tuple[Manifest, ...], live: dict[str, int]) -> Iterator[str]:
    """Its API, with workloads of so many replicas. Yields the URL."""
    answers = discovery(manifests)
    for path, replicas in live.items():
        kind = "Deployment" if path.startswith("deployments") else "StatefulSet"
        answers[f"/apis/apps/v1/namespaces/{NAMESPACE}/{path}"] = {
            "apiVersion": "apps/v1",
            "kind": kind,
            "metadata": {"name": path.split("/")[1], "namespace": NAMESPACE, **OWNED},
            "spec": {"replicas": replicas},
        }

    class Api(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(self.path.partition("?")[0])
            missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            body = json.dumps(missing if found is None else found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def replicas(version: str, live: dict[str, int], *words: str) -> dict[str, int | None]:
    """By role, as an upgrade of a release with so many would set them."""
    with cluster(rendered(version, AUTOSCALED), live) as url:
        done = template(
            version, AUTOSCALED, "--dry-run=server", "--disable-openapi-validation", f"--kube-apiserver={url}", *words
        )
    assert done.returncode == 0, done.stderr
    manifests = tuple(each for each in yaml.safe_load_all(done.stdout) if each)
    workloads = of_kind(manifests, "Deployment", "StatefulSet")
    return {each["metadata"]["labels"]["disagg/role"]: each["spec"].get("replicas") for each in workloads}


@pytest.mark.parametrize("version", HELMS)
def test_an_autoscaler_takes_over_as_many_pods_as_there_are(version: str) -> None:
    assert replicas(version, LIVE) == {"router": 5, "prefill": 1, "decode": 6}
    assert replicas(version, {"statefulsets/rel-disagg-decode": 0}) == {"router": None, "prefill": None, "decode": 0}


@pytest.mark.parametrize("version", HELMS)
def test_without_an_autoscaler_the_values_say_it(version: str) -> None:
    said = replicas(version, LIVE, "--set", "decode.autoscaling.enabled=false", "--set", "decode.replicas=3")
    assert said == {"router": 5, "prefill": 1, "decode": 3}


@pytest.mark.parametrize("values", [AUTOSCALED, KEDA], ids=lambda file: file.stem)
def test_outside_of_a_cluster_an_autoscaled_pool_is_left_alone(values: Any) -> None:
    scaled = {
        (each["spec"]["scaleTargetRef"]["kind"], each["spec"]["scaleTargetRef"]["name"])
        for each in of_kind(rendered("helm-4", values), "HorizontalPodAutoscaler", "ScaledObject")
    }
    assert ("StatefulSet", f"{RELEASE}-disagg-decode") in scaled
    for each in of_kind(rendered("helm-4", values), "Deployment", "StatefulSet"):
        assert ("replicas" not in each["spec"]) is ((each["kind"], each["metadata"]["name"]) in scaled)
