"""A cluster as Kubernetes would start it: what the chart renders runs here, answers, passes its probes, and drains in time."""

from __future__ import annotations

import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import yaml

from disagg.auth.tls import trusting
from disagg.cli.rundir import pick_ports
from disagg.convert.model_dir import resolve
from tests.auth.certs import Authority
from tests.cluster.cluster import parse_metrics
from tests.deploy.chart import NAMESPACE, RELEASE, ROOT, Manifest, of_kind, processes, rendered
from tests.deploy.pods import IP, Pod
from tests.discovery.fake_api import ApiThread

pytestmark = pytest.mark.cluster
READY_S = 240.0  # computing on a CPU that others use, too
KEYS = {"keys": {"keys": "# who\nsome-key alice\nscrape-key prometheus\n"}, "scrape": {"token": "scrape-key"}}
ALICE, OPERATOR = {"authorization": "Bearer some-key"}, {"authorization": "Bearer scrape-key"}
SMALL = {"requests": {"cpu": 1, "memory": "1Gi"}}


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve("smollm2-135m", Path("~/.cache/disagg/models").expanduser())


@pytest.fixture(scope="module")
def values(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small cluster on a CPU, whose pods have ports of their own."""
    http, grpc, *ports = pick_ports(IP, 6)
    pools = {
        role: {"ports": {"grpc": ports.pop(), "metrics": ports.pop()}, "resources": SMALL}
        for role in ("prefill", "decode")
    }
    small = {
        "gpu": {"enabled": False},
        "model": {"servedName": "smol", "hostPath": {"path": str(model)}},
        "config": {"engine": {"kv_memory_bytes": "64MiB"}, "model": {"max_model_len": 512}},
        "auth": {"apiKeys": {"secretName": "keys"}, "operators": ["prometheus"]},
        "tls": {"routerSecret": "router-cert", "serverSecret": "server-cert"},
        "serviceMonitor": {"enabled": True, "credentials": {"secretName": "scrape", "key": "token"}},
        "prometheusRule": {"enabled": True},
        "router": {"replicas": 1, "ports": {"http": http, "grpc": grpc}},
        **pools,
    }
    file = tmp_path_factory.mktemp("values") / "values.yaml"
    file.write_text(yaml.safe_dump(small))
    return file


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What is in each, by its name."""
    authority, found = Authority(), dict(KEYS)
    for name, host in (("router-cert", IP), ("server-cert", f"{RELEASE}-disagg-servers.{NAMESPACE}")):
        files = authority.write(tmp_path_factory.mktemp(name), host=host)
        of_secret = {"tls.crt": files.cert, "tls.key": files.key, "ca.crt": files.ca}
        found[name] = {each: Path(path).read_text() for each, path in of_secret.items()}
    return found


@pytest.fixture(scope="module")
def trusted(secrets: dict[str, dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    """What clients of the routers trust."""
    file = tmp_path_factory.mktemp("trusted") / "ca.crt"
    file.write_text(secrets["router-cert"]["ca.crt"])
    return trusting(file)


@pytest.fixture(scope="module")
def pods(
    values: Path, model: Path, secrets: dict[str, dict[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Pod]]:
    """All of them, by their role; ready."""
    found = {}
    with ExitStack() as stack:
        api = stack.enter_context(ApiThread(NAMESPACE))
        environ = {"KUBECONFIG": api.fake.kubeconfig(tmp_path_factory.mktemp("api"))}
        for process in processes(rendered("helm-4", values)):
            assert process.replicas == 1
            pod = found[process.role] = Pod(process, f"{process.name}-0", model, environ, secrets)
            stack.callback(pod.close)
            api.put(process.as_pod(pod.name, IP, ready=False))
        for pod in found.values():
            pod.start()
        for pod in found.values():
            pod.probe_until("startup", pod.startup_s())
            assert pod.lives()
        # Whoever answers and loads lives and is not ready: a router waits for servers, which wait for their workers.
        assert not found["router"].probe("readiness")
        for _, pod in sorted(found.items(), key=lambda each: each[0] == "router"):  # the router last
            pod.probe_until("readiness", READY_S)
            assert pod.lives()
            api.put(pod.process.as_pod(pod.name, IP))
        yield found


def url(pod: Pod, name: str = "http") -> str:
    [port] = [each["containerPort"] for each in pod.process.container["ports"] if each["name"] == name]
    return f"{'https' if name == 'http' else 'http'}://{IP}:{port}"


def test_it_answers_through_the_router(pods: dict[str, Pod], trusted: ssl.SSLContext) -> None:
    body = {"model": "smol", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    where = f"{url(pods['router'])}/v1/completions"
    assert httpx.post(where, json=body, timeout=120, trust_env=False, verify=trusted).status_code == 401
    reply = httpx.post(where, json=body, headers=ALICE, timeout=120, trust_env=False, verify=trusted)
    assert reply.status_code == 200, reply.text
    assert "Paris" in reply.json()["choices"][0]["text"]


def test_whoever_has_no_certificate_reaches_no_server(pods: dict[str, Pod]) -> None:
    for role in ("prefill", "decode"):
        for scheme in ("http", "https"):
            where = url(pods[role], "grpc").replace("http", scheme)
            with pytest.raises(httpx.TransportError):
                httpx.get(where, timeout=30, trust_env=False, verify=False)


def test_prometheus_finds_metrics_where_the_chart_sends_it_and_kv_has_crossed(
    pods: dict[str, Pod], values: Path, secrets: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    monitors = of_kind(rendered("helm-4", values), "ServiceMonitor")

    def scrape() -> dict[str, dict[str, float]]:
        return dict(scraped_by(monitor) for monitor in monitors)

    def scraped_by(monitor: Manifest) -> tuple[str, dict[str, float]]:
        role = monitor["metadata"]["labels"]["disagg/role"]
        [endpoint] = monitor["spec"]["endpoints"]
        headers = {}
        if "authorization" in endpoint:
            credentials = endpoint["authorization"]["credentials"]
            headers["authorization"] = f"Bearer {secrets[credentials['name']][credentials['key']]}"
        where = f"{url(pods[role], endpoint['port'])}{endpoint['path']}".partition("://")[2]
        verify: ssl.SSLContext | bool = True
        if "tlsConfig" in endpoint:  # its serverName, the Service, is IP here
            ca = endpoint["tlsConfig"]["ca"]["secret"]
            (tmp_path / "ca").write_text(secrets[ca["name"]][ca["key"]])
            verify = trusting(tmp_path / "ca")
        where = f"{endpoint.get('scheme', 'http')}://{where}"
        reply = httpx.get(where, headers=headers, timeout=30, trust_env=False, verify=verify)
        return role, parse_metrics(reply.text)

    scraped = scrape()
    assert set(scraped) == set(pods)
    assert scraped["router"]["disagg_router_completion_tokens_total"] > 0
    until_s = time.monotonic() + 60
    while not 0 < crossed(scraped, "prefill", "sent") == crossed(scraped, "decode", "received"):
        assert time.monotonic() < until_s, scraped
        time.sleep(0.1)  # each is exported by a beat of its own
        scraped = scrape()


def crossed(scraped: dict[str, dict[str, float]], role: str, direction: str) -> float:
    return scraped[role][f'disagg_transfer_payload_bytes_total{{direction="{direction}"}}']


def test_servers_have_the_names_of_their_pods(pods: dict[str, Pod], trusted: ssl.SSLContext) -> None:
    where = f"{url(pods['router'])}/status"
    assert httpx.get(where, headers=ALICE, timeout=30, trust_env=False, verify=trusted).status_code == 403
    status = httpx.get(where, headers=OPERATOR, timeout=30, trust_env=False, verify=trusted).json()
    servers = {each["name"]: each["state"] for each in status["servers"]}
    assert servers == {pods["prefill"].name: "ready", pods["decode"].name: "ready"}


def test_the_pod_of_helm_test_gets_its_answer(pods: dict[str, Pod], values: Path) -> None:
    [test] = of_kind(rendered("helm-4", values), "Pod")
    assert test["metadata"]["annotations"]["helm.sh/hook"] == "test"
    [container] = test["spec"]["containers"]
    environ = {each["name"]: pods["router"].here(each["value"]) for each in container["env"]}
    asked = pods["router"].run([*container["command"], *container["args"]], environ)
    assert asked.wait(120) == 0, pods["router"].tail()
    assert "Paris" in pods["router"].tail()


def test_pods_write_nowhere_but_into_their_volumes(pods: dict[str, Pod]) -> None:
    """That they have run so says that the chart's volumes are enough."""
    confined = {role for role, pod in pods.items() if pod.confined}
    if not confined:
        pytest.skip("no mount namespace with a read-only root can be made here")
    assert confined == set(pods)
    for pod in pods.values():  # and that they could not have
        tried = subprocess.run([*pod.confined, "touch", str(ROOT / "tests" / "deploy" / "written")], check=False)
        assert tried.returncode != 0
    assert not any("Read-only file system" in pod.log.read_text(errors="replace") for pod in pods.values())


def test_all_of_them_drain_within_their_grace_period(pods: dict[str, Pod]) -> None:
    """The last test: they are gone after it."""
    for role in ("router", "decode", "prefill"):
        assert pods[role].end() == 0, pods[role].tail()
