"""Alerts, recorded figures, autoscaling and the dashboard ask for metrics that there are, in PromQL that can be read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry

from disagg.server.exporter import Exporter
from disagg.telemetry.metrics import EngineMetrics
from tests.deploy.chart import CHART, HERE, ROOT, Manifest, helm, of_kind, rendered
from tests.repository.test_docs import metrics

VALUES = HERE / "values"
DASHBOARD = json.loads((CHART / "dashboards" / "disagg.json").read_text())
GUIDE = (ROOT / "docs" / "kubernetes.md").read_text()
OF_TARGETS = {"namespace", "pod", "app_kubernetes_io_instance", "disagg_role"}  # what Prometheus adds when it scrapes
RECORDED = {"disagg_kv_used_ratio"}


def series() -> set[str]:
    """Names as PromQL has them: a histogram is three."""
    names = {"up", *RECORDED}
    for name, kind in metrics():
        names |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"} if kind == "histogram" else {name}
    return names


def rules() -> list[dict[str, str]]:
    [rule] = of_kind(rendered("helm-4", VALUES / "monitoring.yaml"), "PrometheusRule")
    return [each for group in rule["spec"]["groups"] for each in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """(what asks, PromQL)."""
    for each in rules():
        yield each.get("alert") or each["record"], each["expr"]
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"].replace("$__rate_interval", "5m")
    for scaled in of_kind(rendered("helm-4", VALUES / "autoscaling-keda.yaml"), "ScaledObject"):
        for trigger in scaled["spec"]["triggers"]:
            yield scaled["metadata"]["name"], trigger["metadata"]["query"]


def test_all_of_them_ask_for_what_there_is() -> None:
    there = series()
    for who, query in queries():
        promql_parser.parse(query)
        asked = re.findall(r"\b(disagg_\w+|up)\{", re.sub(r'"[^"]*"', '""', query))
        assert asked, (who, query)
        assert set(asked) <= there, who


def test_what_cannot_be_read_is_found() -> None:
    with pytest.raises(ValueError):
        promql_parser.parse("sum by (pod rate(disagg_requests_running[5m])")


def test_labels_in_queries_are_labels_of_the_metrics() -> None:
    registry = CollectorRegistry()
    Exporter(EngineMetrics(registry), registry)
    known = {label for family in registry.collect() for sample in family.samples for label in sample.labels}
    known |= OF_TARGETS | {"le", "outcome", "cause", "server", "reason", "kind", "rank", "group"}
    for who, query in queries():
        matched = set(re.findall(r'(\w+)=~?"', query))
        grouped = {name for names in re.findall(r"by \(([^)]*)\)", query) for name in re.split(r", *", names)}
        assert matched | grouped <= known, who


def test_failures_that_the_alert_counts_are_outcomes_of_requests() -> None:
    lines = (ROOT / "docs" / "operations.md").read_text().splitlines()
    [row] = [line for line in lines if line.startswith("| `disagg_router_requests_total`")]
    [alert] = [each for each in rules() if each.get("alert") == "DisaggRequestsFail"]
    [outcomes] = re.findall(r'outcome=~"([^"]*)"', alert["expr"])
    assert set(outcomes.split("|")) <= set(re.findall(r"`(\w+)`", row))
    assert "ok" not in outcomes.split("|")


def test_the_guide_says_what_each_alert_means_and_of_no_other() -> None:
    told = set(re.findall(r"^\| `(Disagg\w+)`", GUIDE, re.MULTILINE))
    of_pools = {f"Disagg{role}PoolDown" for role in ("Prefill", "Decode", "Mixed")}
    assert told == {each["alert"] for each in rules() if "alert" in each}
    assert of_pools <= told


def test_an_hpa_looks_at_what_is_scraped_or_recorded() -> None:
    scalers = of_kind(rendered("helm-4", VALUES / "autoscaling-hpa.yaml"), "HorizontalPodAutoscaler")
    named = [
        metric["pods"]["metric"]["name"] for each in scalers for metric in each["spec"]["metrics"] if "pods" in metric
    ]
    assert sorted(named) == ["disagg_kv_used_ratio", "disagg_requests_waiting"]
    assert set(named) <= series()
    recorded = {each["record"] for each in rules() if "record" in each}
    assert recorded == RECORDED


def test_the_dashboard_is_in_the_chart_as_it_is_in_the_file() -> None:
    [found] = dashboards(rendered("helm-4", VALUES / "monitoring.yaml")).values()
    own = {name: found[name] for name in ("uid", "title")}
    assert found == {**DASHBOARD, **own}
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))


def dashboards(manifests: tuple[Manifest, ...]) -> dict[str, Any]:
    """By the names of their files, which Grafana's sidecar puts into one directory."""
    data = [each["data"] for each in of_kind(manifests, "ConfigMap")]
    return {name: json.loads(text) for each in data for name, text in each.items() if name.endswith(".json")}


def test_dashboards_of_several_releases_are_beside_each_other() -> None:
    found: list[tuple[str, Any]] = []
    releases = [("llm", "a"), ("llm", "b"), ("llm-v2", "a"), *(("x" * 52 + end, "a" * 63) for end in "yz")]
    for release, namespace in releases:
        words = ("--namespace", namespace, "--set", "dashboard.enabled=true")
        done = helm("helm-4", "template", release, str(CHART), *words)
        assert done.returncode == 0, done.stderr
        manifests = tuple(each for each in yaml.safe_load_all(done.stdout) if each)
        [(name, made)] = dashboards(manifests).items()
        assert release[:8] in name and release[:8] in made["uid"] and release[:8] in made["title"]
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", made["uid"])
        found.append((name, made))
    assert len({name for name, _ in found}) == len(releases)
    assert len({made["uid"] for _, made in found}) == len({made["title"] for _, made in found}) == len(releases)


def test_a_gap_in_prometheus_scales_no_pool() -> None:
    for scaled in of_kind(rendered("helm-4", VALUES / "autoscaling-keda.yaml"), "ScaledObject"):
        load, *itl = (trigger["metadata"]["ignoreNullValues"] for trigger in scaled["spec"]["triggers"])
        assert load == "false"
        assert set(itl) <= {"true"}, "without answers there is no ITL, and the load decides"
