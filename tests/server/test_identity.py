"""What workers have loaded, and what is said when it is not what it should be."""

from __future__ import annotations

import asyncio
import logging
import threading
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from msgspec.structs import replace

from disagg.config.tree import Config
from disagg.decode_server.role import DECODE
from disagg.messages.control import Loaded
from disagg.messages.layout import LayerGroup
from disagg.messages.legs import LegEnd, Outcome, PeerRef, ServerState, StartLeg
from disagg.prefill_server.role import PREFILL
from disagg.server import lifecycle, networks, supervision
from disagg.server.lifecycle import Server
from disagg.server.model_identity import ModelIdentity, changed, disagreement, identity_of
from disagg.server.workers import WorkersLost
from disagg.types.errors import ConfigError
from disagg.types.ids import LegKey
from disagg.types.sampling import SamplingParams
from disagg.wire.services import Health

GROUPS = (LayerGroup("full", (0,), 1, 8, "float32"),)
LOADED = Loaded(0, GROUPS, 10, 100, (2,), 0.5, "a" * 64, {"config.json": "c", "tokenizer.json": "t"})
IDENTITY = identity_of(LOADED)


def test_ranks_that_loaded_one_model_are_a_group_however_long_it_took() -> None:
    assert disagreement([LOADED, replace(LOADED, rank=1, load_s=9.0)]) == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weights_hash": "b" * 64}, "weights aaaaaaaaaaaa and bbbbbbbbbbbb"),
        ({"files": {"config.json": "c", "tokenizer.json": "u"}}, "tokenizer.json"),
        ({"files": {"config.json": "c"}}, "tokenizer.json"),
        ({"eos_token_ids": (3,)}, "different things"),
    ],
    ids=["weights", "tokenizer", "no tokenizer", "eos"],
)
def test_ranks_that_loaded_different_models_are_named(change: dict[str, object], said: str) -> None:
    ranks = [LOADED, replace(LOADED, rank=1), replace(LOADED, rank=2, **change)]
    assert "ranks 0 and 2" in disagreement(ranks)
    assert said in disagreement(ranks)


def test_only_another_model_than_before_is_said() -> None:
    assert changed("/m", None, IDENTITY) == ""
    assert changed("/m", IDENTITY, IDENTITY) == ""
    other = ModelIdentity("b" * 64, IDENTITY.files)
    said = changed("/m", IDENTITY, other)
    assert "/m" in said and "aaaaaaaaaaaa and bbbbbbbbbbbb" in said
    said = changed("/m", IDENTITY, ModelIdentity(IDENTITY.weights_hash, {"config.json": "c", "tokenizer.json": "u"}))
    assert "tokenizer.json" in said and "weights" not in said


def ready_server(monkeypatch: pytest.MonkeyPatch) -> tuple[Server, list[LegEnd], list[StartLeg]]:
    """A server whose engine and routers only remember."""
    made = Server(Config(), lambda role: PREFILL, PREFILL.role, lambda: None)
    ends: list[LegEnd] = []
    started: list[StartLeg] = []

    class _Engine:
        def start_leg(self, _router: int, leg: StartLeg, *_now: float) -> list[object]:
            started.append(leg)
            return []

    monkeypatch.setattr(made._identity, "state", ServerState.READY)
    monkeypatch.setattr(made._identity, "incarnation", SimpleNamespace(facts=SimpleNamespace(incarnation="new")))
    monkeypatch.setattr(made._dispatch, "engine", _Engine())
    monkeypatch.setattr(made._dispatch, "_do", lambda instructions: None)
    monkeypatch.setattr(made._routers, "tell", lambda router, message: ends.append(message))
    return made, ends, started


async def test_a_leg_that_was_meant_for_earlier_workers_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router repeats what a broken stream lost: by then the workers may have another model."""
    server, ends, started = ready_server(monkeypatch)
    params = SamplingParams(max_tokens=1)
    leg = StartLeg(LegKey("r", 1, 0), (1,), 1, params, (0,), PeerRef("d0", "d0:1", "i"), 9.0, incarnation="old")
    server._dispatch.router_message(0, leg)
    assert [end.outcome for end in ends] == [Outcome.GIVEN_BACK] and "other workers" in ends[0].reason
    assert started == []
    for meant in ("new", ""):  # a router of an older version does not say it
        server._dispatch.router_message(0, replace(leg, incarnation=meant))
    assert len(started) == 2 and len(ends) == 1


async def test_another_model_after_a_restart_is_logged_counted_and_told_to_routers(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _, _ = ready_server(monkeypatch)
    server._take_model(IDENTITY)
    server._take_model(IDENTITY)
    assert server._identity.note == "" and not caplog.records
    with caplog.at_level(logging.ERROR):
        server._take_model(ModelIdentity("b" * 64, IDENTITY.files))
    assert "aaaaaaaaaaaa and bbbbbbbbbbbb" in caplog.text
    assert "aaaaaaaaaaaa and bbbbbbbbbbbb" in server._identity.note
    assert server._registry.get_sample_value("disagg_model_changes_total") == 1


async def test_what_is_said_of_another_model_goes_when_the_one_before_is_there_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, _, _ = ready_server(monkeypatch)
    b, c = (ModelIdentity(digit * 64, IDENTITY.files) for digit in "bc")
    noted = []
    for model in (IDENTITY, b, c, IDENTITY, b, b, IDENTITY, b):
        server._take_model(model)
        noted.append(bool(server._identity.note))
    assert noted == [False, True, True, False, True, False, True, False], "two with b: that is what others know by then"
    assert server._registry.get_sample_value("disagg_model_changes_total") == 6


async def nothing() -> None:
    pass


class _Over(Exception):
    pass


class _Health:
    async def set_serving(self, serving: bool) -> None:
        pass


async def test_health_over_grpc_is_that_over_http_while_an_operator_has_the_server_drained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, _, _ = ready_server(monkeypatch)
    made._dispatch.engine = None
    server = grpc.aio.server()
    health = Health(server, ())
    await health.set_serving(True)
    ticker = asyncio.create_task(made._tick(health))

    async def becomes(status: int, serving: bool) -> None:
        assert made._health()[0] == status
        said = HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING
        async with asyncio.timeout(5):
            while (await health.Check(HealthCheckRequest(), None)).status != said:  # type: ignore[arg-type]
                await asyncio.sleep(0.01)

    try:
        await becomes(200, True)
        made._asked_to_drain(True)
        await becomes(503, False)
        monkeypatch.setattr(made, "bring_up", nothing)  # its workers were lost, and have come up again
        monkeypatch.setattr(made, "prepare", nothing)
        waiting = asyncio.Event()

        async def lost_or_empty(health: Health) -> tuple[str, bool]:
            waiting.set()
            await asyncio.Event().wait()
            raise AssertionError

        monkeypatch.setattr(made._supervisor, "_lost_or_empty", lost_or_empty)
        supervisor = asyncio.create_task(made._supervisor.run(health))
        await waiting.wait()
        assert (await health.Check(HealthCheckRequest(), None)).status == HealthCheckResponse.NOT_SERVING  # type: ignore[arg-type]
        supervisor.cancel()
        made._asked_to_drain(False)
        await becomes(200, True)
    finally:
        ticker.cancel()
        await server.stop(None)


@pytest.mark.parametrize("fault", [ConfigError("no weights any more"), WorkersLost("files were replaced")])
async def test_a_model_that_cannot_be_loaded_for_a_while_does_not_end_a_server_that_has_served(
    monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    made, _, _ = ready_server(monkeypatch)
    notes: list[str] = []
    outcomes = [IDENTITY, fault, fault, IDENTITY]

    class _Lost:
        silent_exit = ""

        async def wait_lost(self) -> str:
            return "rank 0 was killed by SIGKILL"

    async def bring_up() -> None:
        if not outcomes:
            raise _Over
        outcome = outcomes.pop(0)
        notes.append(made._identity.note)
        if isinstance(outcome, Exception):
            raise outcome
        made._workers = _Lost()  # type: ignore[assignment]
        made._take_model(outcome)

    async def take_down(reason: str, *, another_role: bool, intended: bool) -> None:
        made._workers = None

    monkeypatch.setattr(supervision, "RESTART_FIRST_S", 0.001)
    for name, value in (("_find_device", nothing), ("_find_model", lambda: None), ("bring_up", bring_up)):
        monkeypatch.setattr(made, name, value)
    monkeypatch.setattr(made, "take_down", take_down)
    with pytest.raises(_Over):
        await made._supervisor.run(_Health())  # type: ignore[arg-type]
    assert notes[:2] == ["", ""] and str(fault) in notes[2] and str(fault) in notes[3]
    assert made._identity.note == ""  # all is well again


@pytest.mark.parametrize(
    ("lives_s", "pauses"), [(None, [0.2, 0.4, 0.8, 1.6]), (1.0, [0.2, 0.4, 0.8, 1.6]), (60.0, [0.2] * 4)]
)
async def test_workers_that_fail_again_and_again_wait_longer_however_long_they_load(
    monkeypatch: pytest.MonkeyPatch, lives_s: float | None, pauses: list[float]
) -> None:
    """lives_s: from when they are up; None: they never are."""
    made, _, _ = ready_server(monkeypatch)
    now_s, slept = [0.0], []

    class _Group:
        silent_exit = ""

        async def wait_lost(self) -> str:
            now_s[0] += lives_s or 0.0
            return "rank 0 was killed by SIGKILL"

    async def bring_up() -> None:
        now_s[0] += 100.0
        if lives_s is None:
            raise WorkersLost("no memory left")
        made._workers = _Group()  # type: ignore[assignment]

    async def take_down(reason: str, *, another_role: bool, intended: bool) -> None:
        made._workers = None

    async def sleep(delay_s: float) -> None:
        slept.append(delay_s)
        if len(slept) == len(pauses):
            raise _Over

    monkeypatch.setattr(supervision, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(supervision, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    for name, value in (("prepare", nothing), ("bring_up", bring_up), ("take_down", take_down)):
        monkeypatch.setattr(made, name, value)
    with pytest.raises(_Over):
        await made._supervisor.run(_Health())  # type: ignore[arg-type]
    assert slept == pytest.approx(pauses)


async def test_a_model_that_cannot_be_loaded_at_first_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _, _ = ready_server(monkeypatch)

    async def bring_up() -> None:
        raise ConfigError("no weights")

    for name, value in (("_find_device", nothing), ("_find_model", lambda: None), ("bring_up", bring_up)):
        monkeypatch.setattr(made, name, value)
    with pytest.raises(ConfigError, match="no weights"):
        await made._supervisor.run(_Health())  # type: ignore[arg-type]


async def test_an_intended_change_of_role_is_no_loss(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, _, _ = ready_server(monkeypatch)
    monkeypatch.setattr(made, "_role_of", {PREFILL.role: PREFILL, DECODE.role: DECODE}.__getitem__)
    ended: list[tuple[Outcome, str]] = []
    dropped: list[tuple[str, bool]] = []
    ups = iter([None, None])

    class _Engine:
        idle, ranks = True, ()

        def give_back(self, reason: str) -> list[object]:
            return []

        def end_all(self, outcome: Outcome, reason: str) -> list[object]:
            ended.append((outcome, reason))
            return []

    class _Group:
        silent_exit = ""

        def __init__(self, lost: bool) -> None:
            self.lost = lost

        async def wait_lost(self) -> str:
            if not self.lost:
                await asyncio.Event().wait()
            return "rank 0 was killed by SIGKILL"

        async def kill(self) -> None:
            pass

    async def bring_up() -> None:
        """First as it was started, then as what it was asked to be, when its workers die."""
        if next(ups, made) is made:
            raise _Over
        second = made._roles.now is DECODE.role
        made._roles.up()
        made._dispatch.engine = _Engine()  # type: ignore[assignment]
        made._workers = _Group(second)  # type: ignore[assignment]
        if not second:
            monkeypatch.setattr(made, "_why_not_role", lambda role: "")
            made._asked_for_role(DECODE.role)

    monkeypatch.setattr(supervision, "RESTART_FIRST_S", 0.001)
    monkeypatch.setattr(made._exporter, "retire", lambda *counters: None)
    monkeypatch.setattr(made._links, "drop_all", lambda reason, intended=False: dropped.append((reason, intended)))
    for name, value in (("_find_device", nothing), ("_find_model", lambda: None), ("bring_up", bring_up)):
        monkeypatch.setattr(made, name, value)
    with caplog.at_level(logging.INFO), pytest.raises(_Over):
        await asyncio.wait_for(made._supervisor.run(_Health()), 30)  # type: ignore[arg-type]
    name = made._identity.name
    intended = f"{name} ended its workers: it becomes a decode server"
    lost = f"{name} lost its workers: rank 0 was killed by SIGKILL"
    emptied = (Outcome.DRAINED, f"{name} is emptied: it becomes a decode server")
    assert ended == [emptied, (Outcome.DRAINED, intended), (Outcome.WORKER_LOST, lost)]
    assert dropped == [(intended, True), (lost, False)]
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert errors == [f"the workers of {name} are lost: rank 0 was killed by SIGKILL"]
    assert f"{name} begins anew as a decode server" in caplog.text


async def test_another_role_looks_its_host_up_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _, _ = ready_server(monkeypatch)
    threads: list[threading.Thread] = []

    def looked_up(address: str) -> str:
        threads.append(threading.current_thread())
        return "eth7"

    monkeypatch.setattr(networks, "choose_net_devices", looked_up)
    made._given = replace(made._given, model=replace(made._given.model, device="cpu"))
    monkeypatch.setattr(lifecycle, "check_code", _stop_here)
    for role in (PREFILL.role, PREFILL.role, DECODE.role):
        made._roles.now = role
        with pytest.raises(_Over):
            await made.bring_up()
        assert made._config.transfer.ucx_net_devices == "eth7"
    assert len(threads) == 2 and threading.main_thread() not in threads


def _stop_here(name: str) -> None:
    raise _Over
