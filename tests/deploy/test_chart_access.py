"""Who may do and reach what in a release of the chart: the API's pods, keys, certificates and network policies."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from disagg.config.check import check_exposure
from disagg.config.load import load_config
from tests.deploy.chart import HERE, NAMESPACE, RELEASE, of_kind, processes, rendered
from tests.deploy.matrix import given, has_tls, matrix


@matrix
def test_routers_may_read_pods_and_nobody_may_do_more(values: Path) -> None:
    manifests = rendered("helm-4", values)
    bindings, roles = of_kind(manifests, "RoleBinding"), of_kind(manifests, "Role")
    assert not of_kind(manifests, "ClusterRole", "ClusterRoleBinding")
    if given(values)["discovery"] != "kubernetes":
        assert not bindings and not roles
        return
    [role], [binding] = roles, bindings
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    [router] = [each.pod for each in processes(manifests) if each.role == "router"]
    assert [(each["name"], each["namespace"]) for each in binding["subjects"]] == [
        (router["serviceAccountName"], NAMESPACE)
    ]
    made = {each["metadata"]["name"] for each in of_kind(manifests, "ServiceAccount")}
    used = {each.pod["serviceAccountName"] for each in processes(manifests)}
    assert made == (used if given(values)["serviceAccount"]["create"] else set())


@matrix
def test_routers_ask_for_the_keys_that_a_secret_holds_and_else_say_that_they_ask_nobody(values: Path) -> None:
    manifests, auth = rendered("helm-4", values), given(values)["auth"]
    for process in processes(manifests):
        said = tomllib.loads(process.config)["auth"]
        mounts = {each["mountPath"]: each["name"] for each in process.container["volumeMounts"]}
        volumes = {each["name"]: each for each in process.pod["volumes"]}
        expected: dict[str, Any] = {}
        for value, setting, directory in (
            ("apiKeys", "api_keys_file", "/etc/disagg-auth/api-keys"),
            ("jwks", "jwks_file", "/etc/disagg-auth/jwks"),
            ("quotas", "limits_file", "/etc/disagg-auth/quotas"),
        ):
            secret = auth[value]["secretName"]
            if process.role == "router" and secret:
                expected[setting] = f"{directory}/{auth[value]['key']}"
                assert volumes[mounts[directory]]["secret"]["secretName"] == secret
            else:
                assert directory not in mounts
        if process.role == "router":
            named = {"jwt_audience": auth["jwks"]["audience"], "jwt_issuer": auth["jwks"]["issuer"]}
            expected |= {name: value for name, value in named.items() if value}
            expected |= {"operators": auth["operators"]} if auth["operators"] else {}
        seen = process.role != "router" and has_tls(given(values))
        assert said == (expected or ({} if seen else {"insecure": True}))


@matrix
def test_routers_and_servers_show_certificates_and_whoever_asks_a_router_speaks_tls(
    values: Path, tmp_path: Path
) -> None:
    manifests, said = rendered("helm-4", values), given(values)
    made = {each["spec"]["secretName"]: each["spec"] for each in of_kind(manifests, "Certificate")}
    secure = has_tls(said)
    for process in processes(manifests):
        mounts = [each for each in process.container["volumeMounts"] if each["mountPath"] == "/etc/disagg-tls"]
        assert bool(mounts) is bool(tomllib.loads(process.config).get("tls")) is secure
        if not secure:
            continue
        (file := tmp_path / "disagg.toml").write_text(process.config)
        config = load_config(file, {}, {})
        assert config.tls.ca == "/etc/disagg-tls/ca.crt"
        check_exposure(config, process.role)
        [secret] = [each["secret"] for each in process.pod["volumes"] if each["name"] == mounts[0]["name"]]
        whose = "router" if process.role == "router" else "server"
        named = said["tls"][f"{whose}Secret"]
        assert secret["secretName"] == (named or f"{RELEASE}-disagg-{whose}-tls")
        if not named:
            shown = made[secret["secretName"]]
            assert {"server auth", "client auth"} <= set(shown["usages"])
            assert process.role == "router" or shown["dnsNames"] == [config.tls.server_name]
    assert bool(made) is said["tls"]["certManager"]["enabled"]
    [service] = [each for each in of_kind(manifests, "Service") if each["spec"].get("clusterIP") != "None"]
    assert [each["appProtocol"] for each in service["spec"]["ports"]] == (
        ["https", "https"] if secure else ["http", "kubernetes.io/h2c"]
    )
    for test in of_kind(manifests, "Pod"):
        [container] = test["spec"]["containers"]
        volumes = {each["name"]: each for each in test["spec"]["volumes"]}
        assert ("--ca=/etc/disagg-tls/ca.crt" in container["args"]) is ("tls" in volumes) is secure
        if secure:  # but no key of the routers
            assert volumes["tls"]["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
    for monitor in of_kind(manifests, "ServiceMonitor"):
        [endpoint] = monitor["spec"]["endpoints"]
        of_router = monitor["metadata"]["labels"]["disagg/role"] == "router"
        assert endpoint.get("scheme", "http") == ("https" if secure and of_router else "http")


def test_an_issuer_of_the_release_signs_unless_one_is_named() -> None:
    own = rendered("helm-4", HERE / "values" / "tls-cert-manager.yaml")
    signing = {each["spec"]["issuerRef"]["name"] for each in of_kind(own, "Certificate")}
    assert signing <= {each["metadata"]["name"] for each in of_kind(own, "Issuer")}
    [authority] = [each["spec"] for each in of_kind(own, "Certificate") if each["spec"].get("isCA")]
    assert {"ca": {"secretName": authority["secretName"]}} in [each["spec"] for each in of_kind(own, "Issuer")]
    named = rendered("helm-4", HERE / "values" / "tls-issuer.yaml")
    assert not of_kind(named, "Issuer")
    references = [each["spec"]["issuerRef"] for each in of_kind(named, "Certificate")]
    assert references == [{"name": "company", "kind": "ClusterIssuer", "group": "cert-manager.io"}] * 2


@matrix
def test_only_routers_peers_and_scrapers_reach_servers(values: Path) -> None:
    policies = {
        each["metadata"]["labels"]["disagg/role"]: each["spec"]
        for each in of_kind(rendered("helm-4", values), "NetworkPolicy")
    }
    network = given(values)["networkPolicy"]
    if not network["enabled"]:
        assert policies == {}
        return
    for role, spec in policies.items():
        assert spec["policyTypes"] == ["Ingress"]
        if role == "router":
            assert all("from" in rule for rule in spec["ingress"]) == bool(network["clientsFrom"])
            if network["clientsFrom"]:  # and `helm test` is a client
                roles = [
                    each.get("podSelector", {}).get("matchLabels", {}).get("disagg/role")
                    for each in spec["ingress"][0]["from"]
                ]
                assert "test" in roles
            continue
        for rule in spec["ingress"]:
            assert rule["from"], "an empty list lets everybody in"
            for peer in rule["from"]:
                if peer not in network["metricsFrom"]:
                    assert set(peer) == {"podSelector"}
                    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == RELEASE
    assert set(policies) == {each.role for each in processes(rendered("helm-4", values))}


@pytest.mark.parametrize("name", ["defaults", "mixed-beside"])
def test_whoever_may_be_given_another_role_reaches_all_peers_and_is_reached_by_them(name: str) -> None:
    manifests = rendered("helm-4", HERE / "values" / f"{name}.yaml")
    servers = {each.role for each in processes(manifests)} - {"router"}
    for policy in of_kind(manifests, "NetworkPolicy"):
        if policy["metadata"]["labels"]["disagg/role"] == "router":
            continue
        reached_by = [
            set(expression["values"])
            for rule in policy["spec"]["ingress"]
            if "ports" not in rule
            for peer in rule["from"]
            for expression in peer["podSelector"]["matchExpressions"]
        ]
        assert reached_by == [servers], policy["metadata"]["name"]
