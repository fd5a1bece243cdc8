"""Values that make no sense: both Helms refuse them, and say where the nonsense is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart import HELMS, HERE, template

REFUSED = yaml.safe_load((HERE / "refused.yaml").read_text())


def test_there_are_as_many_as_was_promised() -> None:
    assert len({each["what"] for each in REFUSED}) >= 20


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case["what"])
def test_it_is_refused_with_the_path(case: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(case.get("values", {})))
    words = [word for each in case.get("set", ()) for word in ("--set", each)]
    path = str(case["path"])
    for version in HELMS:
        done = template(version, file, *words)
        assert done.returncode != 0, f"{version} takes {case}"
        said = done.stderr.replace(",", "")  # 1,024
        assert path in said or f"/{path.replace('.', '/')}" in said, said
        assert str(case["says"]) in said
        assert "executing" not in said, "a trace of templates"
        assert str(case.get("hides", "\0")) not in said
