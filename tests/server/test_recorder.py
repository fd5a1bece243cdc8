"""What is recorded is what happened: in simulated clusters with every kind of loss, against what engines counted."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disagg.bench.report.read import read_records
from disagg.engine.instructions import Counters
from disagg.server.recorder import Recorder, Unrecorded, recorder_of
from disagg.telemetry.record_files import MOST_WAITING, RecordFiles, require_directory
from disagg.types.errors import ConfigError
from tests.engine.sim import World
from tests.engine.sim_faults import Faults
from tests.engine.sim_server import Server
from tests.engine.test_pair import PROFILES


class Kept:
    """Stands for files."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {"steps": [], "requests": []}
        self.names: list[str] = []

    def put(self, name: str, table: Callable[[], Any]) -> None:
        self.names.append(name)
        self.rows[name.partition("-")[0]] += table().to_pylist()

    def close(self, timeout_s: float) -> None:
        pass


class Counting(Recorder):
    """Sums up what the engines of a server counted."""

    def __init__(self, server: Server) -> None:
        self.kept = Kept()
        self.role = "both" if server.world.mixed else server.role.role.value
        self.engines: list[Counters] = []
        super().__init__(self.kept, server.name, server.role.role.value)  # type: ignore[arg-type]
        self.up(server.engine, server.world.now)

    def up(self, engine: Any, now: Any) -> None:
        self.engines.append(engine.counters)
        super().up(engine, now)


def lived(seed: int, faults: Faults, **kind: bool) -> tuple[World, list[Counting]]:
    world = World(seed, faults, **kind)
    recorders = []
    for server in world.servers:
        server.dispatch.recorder = Counting(server)
        recorders.append(server.dispatch.recorder)
    world.run()
    world.check_answers()
    world.settle()
    for recorder in recorders:
        assert not recorder._legs, "a leg that has ended is not kept"
        recorder.close()
    return world, recorders


@pytest.mark.parametrize("profile", ["nothing", "aborts", "workers", "everything"])
def test_every_step_and_every_leg_is_a_row_and_tokens_add_up(profile: str) -> None:
    for seed in range(4):
        world, recorders = lived(seed, PROFILES[profile], tight=seed % 2 == 0, mixed=seed == 3)
        for recorder in recorders:
            steps, requests = recorder.kept.rows["steps"], recorder.kept.rows["requests"]
            engines = recorder.engines
            assert len(steps) == sum(counters.steps for counters in engines)
            legs = {(r["incarnation"], r["request_id"], r["attempt"], r["trunk"]): r["outcome"] for r in requests}
            ended = sum((Counter(counters.legs) for counters in engines), Counter[str]())
            assert Counter(legs.values()) == +ended
            for step in steps:
                by_phase: Counter[str] = Counter()
                for run in step["runs"]:
                    by_phase[run["phase"]] += run["tokens"]
                assert (by_phase["prefill"], by_phase["decode"]) == (step["prefill_tokens"], step["decode_tokens"])
                assert step["prefill_tokens"] + step["decode_tokens"] <= step["budget_tokens"]
                assert step["pages_used"] + step["pages_evictable"] + step["pages_free"] == step["pages_total"]
            if recorder.role == "prefill":
                prefilled = sum(step["prefill_tokens"] for step in steps)
                assert prefilled == sum(counters.prefill_tokens for counters in engines)
            assert sum(r["preemptions"] for r in requests) <= sum(sum(c.preemptions.values()) for c in engines)
        if profile == "nothing":
            for request in world.requests:
                for choice, outputs in request.accepted.items():
                    rows = [
                        row
                        for recorder in recorders
                        for row in recorder.kept.rows["requests"]
                        if (row["request_id"], row["choice"]) == (request.request_id, choice)
                    ]
                    told = {row["first_index"] + n for row in rows for n in range(row["output_tokens"])}
                    assert told == set(range(len(outputs)))
                    assert {row["finish_reason"] for row in rows} - {None} == {request.finished[choice].value}  # type: ignore[union-attr]


def test_without_a_directory_nothing_is_recorded_and_with_one_that_cannot_be_it_is_refused(tmp_path: Path) -> None:
    assert type(recorder_of("", "a", "prefill")) is Unrecorded
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"record\.dir = .*file"):
        recorder_of(str(tmp_path / "file"), "a", "prefill")


@pytest.mark.parametrize("name", ["a file", "a file/below", "x" * 300, "a\0b"])
def test_where_nothing_can_be_written_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "a file").write_text("")
    with pytest.raises(ConfigError, match=r"record\.dir = "):
        require_directory(tmp_path / name)


def test_without_pyarrow_it_is_said_which_extra_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"disagg\[records\]"):
        recorder_of(str(tmp_path), "a", "prefill")
    with pytest.raises(ConfigError, match=r"disagg\[records\]"):
        read_records(tmp_path)


def test_a_disk_that_stands_still_costs_records_and_never_the_caller(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pa = pytest.importorskip("pyarrow")
    goes_on, begun = threading.Event(), threading.Event()

    def held() -> Any:
        begun.set()
        assert goes_on.wait(60)
        return pa.table({"x": [1]})

    files = RecordFiles(tmp_path)
    files.put("steps-0.parquet", held)
    assert begun.wait(60)
    for number in range(1, MOST_WAITING + 3):
        files.put(f"steps-{number}.parquet", lambda: pa.table({"x": [1]}))
    goes_on.set()
    files.close(60)
    assert len(list(tmp_path.glob("*.parquet"))) == 1 + MOST_WAITING and not list(tmp_path.glob(".*"))
    assert "records are lost" in caplog.text and "does not keep up" in caplog.text


def test_what_cannot_be_written_is_said_and_the_next_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pa = pytest.importorskip("pyarrow")
    files = RecordFiles(tmp_path)
    files.put("no/such/directory.parquet", lambda: pa.table({"x": [1]}))
    files.put("steps-1.parquet", lambda: pa.table({"x": [1]}))
    files.close(60)
    assert [path.name for path in tmp_path.iterdir()] == ["steps-1.parquet"]
    assert "1 files of records are lost" in caplog.text


def test_a_file_in_place_of_the_directory_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^record.dir = .*: it is no directory$"):
        RecordFiles(tmp_path / "file")
