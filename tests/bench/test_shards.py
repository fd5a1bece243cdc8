"""Tests in several processes: each is run by one of them, and one that fails makes the whole fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.shards import main, pytest_collection_modifyitems, shard


class Chosen:
    """Of a pytest.Config what is asked."""

    def __init__(self, text: str) -> None:
        self._text = text

    def getoption(self, name: str) -> str:
        assert name == "--shard"
        return self._text


@given(st.integers(1, 9), st.integers(0, 40))
def test_each_test_is_run_by_one_process(of: int, count: int) -> None:
    ran: list[int] = []
    for which in range(of):
        items = list(range(count))
        pytest_collection_modifyitems(Chosen(f"{which}/{of}"), items)  # type: ignore[arg-type]
        ran += items
    assert sorted(ran) == list(range(count))


@pytest.mark.parametrize("text", ["2/2", "-1/2", "0/0", "1", ""])
def test_a_shard_that_there_is_not_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        shard(text)


@pytest.mark.parametrize(("fails", "status"), [("", 0), ("assert False", 1)])
def test_one_that_fails_makes_the_whole_fail(
    fails: str, status: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The second of three tests, in a process of its own; the third process has the third."""
    bodies = ("", fails, "")
    text = "".join(f"def test_{number}():\n    {body or 'pass'}\n" for number, body in enumerate(bodies))
    (tmp_path / "test_three.py").write_text(text)
    assert main(["--processes", "3", str(tmp_path / "test_three.py")]) == status
    said = capfd.readouterr().out
    assert said.count("1 passed") == (3 if status == 0 else 2)
    assert ("test_1" in said) == (status == 1)
