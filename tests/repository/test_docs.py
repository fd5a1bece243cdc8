"""What the documents list is what there is: settings, metrics, model families, modules and tests they point to."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from disagg.api.crowd import HttpMetrics
from disagg.auth.audit import Audit
from disagg.auth.chain import Validity
from disagg.auth.tls import expose_expiry
from disagg.config.load import dump_config
from disagg.config.tree import Config
from disagg.messages.legs import Outcome
from disagg.models.families import FAMILIES
from disagg.router.metrics import GrpcMetrics, RouterMetrics
from disagg.server.exporter import Exporter
from disagg.telemetry.loop import LoopWatch
from disagg.telemetry.metrics import EngineMetrics
from disagg.telemetry.traces import TraceMetrics
from tests.repository.source import PACKAGE, ROOT

README = (ROOT / "README.md").read_text()
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
PAGES = (
    "README.md",
    "docs/architecture.md",
    "docs/operations.md",
    "docs/kubernetes.md",
    "docs/benchmarks.md",
    "docs/versions.md",
)


def settings() -> Iterator[tuple[str, str]]:
    """(section.field, default as TOML)."""
    section = ""
    for line in dump_config(Config()).splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line:
            name, _, default = line.partition(" = ")
            yield f"{section}.{name}", default


def metrics() -> set[tuple[str, str]]:
    """(name as it is scraped, type)."""
    registry = CollectorRegistry()
    Exporter(EngineMetrics(registry), registry)
    RouterMetrics(registry)
    GrpcMetrics(registry)
    HttpMetrics(registry)
    Audit(registry)
    LoopWatch(registry)
    TraceMetrics(registry)
    expose_expiry(lambda: Validity(0.0, 1.0), registry)
    return {(f"{m.name}_total" if m.type == "counter" else m.name, m.type) for m in registry.collect()}


def test_the_readme_has_every_setting_with_its_default_and_no_other() -> None:
    listed = re.findall(r"^\| `([a-z]+\.[a-z_]+)` \| `(.*?)` \|", README, re.MULTILINE)
    assert listed == list(settings())


def test_operations_lists_every_metric_with_its_type_and_no_other() -> None:
    listed = re.findall(r"^\| `(disagg_\w+)` \| (\w+) \|", OPERATIONS, re.MULTILINE)
    assert sorted(listed) == sorted(metrics())


def test_operations_lists_every_way_in_which_a_leg_ends() -> None:
    [row] = [line for line in OPERATIONS.splitlines() if line.startswith("| `disagg_legs_total` |")]
    assert set(re.findall(r"`([a-z_]+)`", row)) == {"disagg_legs_total", "outcome", *Outcome}


def test_operations_says_how_many_steps_a_leg_may_be_computed_in_after_its_abort() -> None:
    """As tests/engine/test_stages counts them."""
    assert row_of("disagg_steps_after_abort").endswith(
        ": at most those that were under way, which are 2, or `server.pp` if that is more |"
    )


def test_operations_says_that_chunks_of_prompts_that_have_begun_ask_nobody() -> None:
    """As tests/engine/test_data_parallel counts them."""
    row = row_of("disagg_prefill_delay_outcomes_total")
    assert "on which ranks prompts could begin (" in row
    assert "later chunks of one that is alone are `none`, `true`, `none`, `true`" in row
    assert "those beside one that waits have `allow` `false` and `executed` `true`" in row


def row_of(metric: str) -> str:
    [row] = [line for line in OPERATIONS.splitlines() if line.startswith(f"| `{metric}` |")]
    return row


def test_the_readme_lists_the_families_that_are_served() -> None:
    paragraph = README.partition("(`model_type` in `config.json`):")[2].split("\n\n")[1]
    assert set(re.findall(r"`([\w-]+)`", paragraph)) == FAMILIES


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_links_to_is_there(page: str) -> None:
    here = ROOT / page
    targets = re.findall(r"\]\(([^)#]+)\)", here.read_text())
    missing = [target for target in targets if not target.startswith("http") and not (here.parent / target).exists()]
    assert missing == []


def test_the_modules_and_tests_that_the_architecture_names_are_there() -> None:
    named = set(re.findall(r"`((?:tests/)?[a-z_]+(?:/[a-z_]+)+)(?:\.py|/|\.[A-Za-z_]+)?`", ARCHITECTURE))
    missing = []
    for name in sorted(named):
        base = ROOT / name if name.startswith("tests/") else PACKAGE / name
        if not (base.is_dir() or base.with_suffix(".py").is_file()):
            missing.append(name)
    assert len(named) > 40
    assert missing == []
