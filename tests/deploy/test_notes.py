"""What the notes of an installation tell people to type is what the command line takes, and what the pods have."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from disagg.cli.main import cli
from tests.deploy.chart import CHART, HELMS, HERE, NAMESPACE, RELEASE, helm, of_kind, processes, rendered, template

KEYS = {"auth": {"apiKeys": {"secretName": "keys", "key": "all.txt"}}}
TOKENS = {"auth": {"jwks": {"secretName": "issuer"}}}
TLS = {"tls": {"routerSecret": "router-cert", "serverSecret": "server-cert"}}
PORT = {"router": {"ports": {"http": 9000}}}


def notes(values: Path) -> str:
    """As Helm 4 has them: Helm 3 writes none without a cluster."""
    where = ("--namespace", NAMESPACE, "--values", str(values))
    done = helm("helm-4", "install", RELEASE, str(CHART), "--dry-run=client", *where)
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("NOTES:")[2]


@pytest.mark.parametrize(
    ("values", "inside", "tested"),
    [
        ({}, True, True),
        ({**KEYS, **TLS, **PORT}, True, True),
        ({"auth": {**KEYS["auth"], **TOKENS["auth"]}}, True, True),
        (TOKENS, False, False),
        ({**TOKENS, **TLS}, False, False),
    ],
    ids=["open", "keys", "both", "tokens", "tokens-tls"],
)
def test_the_notes_say_how_to_empty_a_server_of_this_release(
    values: dict[str, Any], inside: bool, tested: bool, tmp_path: Path
) -> None:
    (file := tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    said = notes(file)
    [line] = [line for line in said.splitlines() if "disagg drain" in line]
    words = shlex.split(line)
    command = words[words.index("disagg") + 1 :]
    context = cli.commands["drain"].make_context("drain", command[1:])
    [router] = [each for each in processes(rendered("helm-4", file)) if each.role == "router"]
    [port] = [each["containerPort"] for each in router.container["ports"] if each["name"] == "http"]
    scheme = "https" if "tls" in values else "http"
    assert context.params["base_url"] == f"{scheme}://127.0.0.1:{port}"
    assert ("exec" in words) is inside
    files = [Path(words[at + 1]) for at, word in enumerate(words) if word in ("--ca", "--api-key-file")]
    assert len(files) == ("auth" in values) + ("tls" in values)
    mounts = {Path(each["mountPath"]) for each in router.container["volumeMounts"]}
    assert all((each.parent in mounts) is inside for each in files)
    assert bool(of_kind(rendered("helm-4", file), "Pod")) is tested
    assert (f"helm -n {NAMESPACE} test {RELEASE}" in said) is tested


@pytest.mark.parametrize("version", HELMS)
def test_fractions_may_be_given_on_the_command_line(version: str) -> None:
    for values, told in (("autoscaling-hpa", "averageValue: 700m"), ("autoscaling-keda", 'threshold: "0.7"')):
        done = template(
            version,
            HERE / "values" / f"{values}.yaml",
            "--set=decode.autoscaling.target=0.7",
            "--set=decode.autoscaling.itlSeconds=0.0",
            "--set=prefill.autoscaling.target=2.5",
            "--set=prometheusRule.enabled=true",
            "--set=prometheusRule.ttftSeconds=1.5",
        )
        assert done.returncode == 0, done.stderr
        assert told in done.stdout and "is above 1.5 s" in done.stdout
        triggers = [
            trigger["metadata"]["query"]
            for each in yaml.safe_load_all(done.stdout)
            if each and each["kind"] == "ScaledObject" and each["metadata"]["name"].endswith("decode")
            for trigger in each["spec"]["triggers"]
        ]
        assert len(triggers) == (1 if values == "autoscaling-keda" else 0), "0.0 switches ITL off"
    done = template(
        version,
        HERE / "values" / "autoscaling-hpa.yaml",
        "--set-json=config.engine.gpu_memory_utilization=0.8",
    )
    assert done.returncode == 0 and "gpu_memory_utilization = 0.8" in done.stdout
