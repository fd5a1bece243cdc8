"""Names that YAML would read as something else ("123", "true", "null") arrive in every manifest as the texts that they are."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.deploy.chart import CHART, HELMS, VALUES, Manifest, helm
from tests.deploy.kubernetes_schemas import CRDS, KUBERNETES
from tests.deploy.matrix import given

SCHEMA = jsonschema.Draft7Validator(json.loads((CHART / "values.schema.json").read_text()))
PLAIN = "zzplain"  # is nothing but a text, and nowhere else in what is rendered
WORDS = ["123", "true", "null", "off", "y", "1e3", "2024-01-01"]
Place = tuple[str | int, ...]


def texts(values: object, at: Place = ()) -> Iterator[Place]:
    """Where a text is that says something."""
    if isinstance(values, str) and values:
        yield at
    elif isinstance(values, dict | list):
        for name, each in values.items() if isinstance(values, dict) else enumerate(values):
            yield from texts(each, (*at, name))


def replaced(values: dict[str, Any], at: Place, word: str) -> dict[str, Any]:
    """The values with `word` at one place."""
    changed = copy.deepcopy(values)
    into: Any = changed
    for name in at[:-1]:
        into = into[name]
    into[at[-1]] = word
    return changed


def takes(values: dict[str, Any], at: Place, word: str) -> bool:
    """Whether the schema has the word there. The top of the values is enough to judge."""
    part = replaced(values, at, word)[str(at[0])]
    return bool(SCHEMA.evolve(schema=SCHEMA.schema["properties"][str(at[0])]).is_valid(part))


def full_of(word: str, values: dict[str, Any]) -> list[Place]:
    """The places that take this word, and the plain one: no settings, which have a test of their own, and no names, values and
    addresses that must not be just any."""
    own = {"extraEnv", "extraVolumes", "extraVolumeMounts"}
    issuer = () if values["tls"]["certManager"]["issuer"]["name"] else ("tls", "certManager", "issuer")
    free = [
        at
        for at in texts(values)
        if "config" not in at[:2]
        and not (own & set(at[:2]) and at[-1] in ("name", "value"))
        and (at[:2] != ("storage", "options") or at[2] == "region")
        and (not issuer or at[:3] != issuer)
    ]
    return [at for at in free if takes(values, at, word) and takes(values, at, PLAIN)]


def render(version: str, file: Path, values: dict[str, Any], places: list[Place], word: str) -> list[Manifest]:
    """With `word` at all of the places, and as the release and its namespace."""
    for at in places:
        values = replaced(values, at, word)
    file.write_text(json.dumps(values))
    done = helm(version, "template", word, str(CHART), "--namespace", word, "--values", str(file))
    assert done.returncode == 0, done.stderr
    manifests = [each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each]
    for each in manifests:  # they have the sum of a file with the names in it
        each.get("spec", {}).get("template", {}).get("metadata", {}).pop("annotations", None)
    return manifests


@pytest.mark.parametrize("values", VALUES, ids=lambda file: file.stem)
def test_a_name_is_a_text_whatever_it_looks_like(values: Path, tmp_path: Path) -> None:
    number = VALUES.index(values)
    for word in {WORDS[number % 3], WORDS[3 + number % 4]}:
        version, base = HELMS[number % 2], given(values)
        base = {**base, "fullnameOverride": base["fullnameOverride"] or "llm"}
        places = full_of(word, base)
        assert ("image", "repository") in places or word == "2024-01-01"
        found = render(version, tmp_path / "word.yaml", base, places, word)
        plain = render(version, tmp_path / "plain.yaml", base, places, PLAIN)
        assert found == json.loads(json.dumps(plain).replace(PLAIN, word))
        for manifest in found:
            if manifest["kind"].lower() in CRDS:
                jsonschema.validate(manifest, CRDS[manifest["kind"].lower()], jsonschema.Draft202012Validator)
            else:
                kubernetes_validate.validate(manifest, KUBERNETES[-1], strict=True)


def test_every_name_in_the_values_is_tried() -> None:
    """Each place that takes a name has one in the matrix, so that the test above puts odd ones there."""
    tried = {at for file in VALUES for word in WORDS[:3] for at in full_of(word, given(file))}
    wanted = {
        ("fullnameOverride",),
        ("nameOverride",),
        ("image", "pullSecrets", 0),
        ("model", "pvc", "claimName"),
        ("storage", "pvc", "claimName"),
        ("storage", "credentialsSecret"),
        ("gpu", "runtimeClassName"),
        ("auth", "apiKeys", "secretName"),
        ("auth", "jwks", "secretName"),
        ("auth", "quotas", "secretName"),
        ("tls", "routerSecret"),
        ("tls", "serverSecret"),
        ("tls", "serverName"),
        ("tls", "certManager", "issuer", "name"),
        ("serviceAccount", "name"),
        ("router", "priorityClassName"),
        ("prefill", "priorityClassName"),
        ("pairs", "topologyKey"),
        ("ingress", "className"),
        ("ingress", "tlsSecretName"),
        ("serviceMonitor", "credentials", "secretName"),
        ("serviceMonitor", "credentials", "key"),
    }
    assert wanted <= tried, wanted - tried
