"""The decisions of `disagg up` about its children, without any process."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.cli.supervise import (
    Beat,
    Begin,
    Died,
    DiedDraining,
    Ended,
    Exited,
    GiveUp,
    Instruction,
    Kill,
    Limits,
    Phase,
    Proven,
    Start,
    Stop,
    Supervisor,
    Terminate,
    Tick,
)

WAVES = (("router",), ("prefill-0", "decode-0"))
NAMES = ("router", "prefill-0", "decode-0")
LIMITS = Limits(drain_s=(30.0, 20.0))


def started() -> Supervisor:
    supervisor = Supervisor(WAVES, LIMITS)
    assert supervisor.handle(Begin(), 0.0) == [Start(name) for name in NAMES]
    return supervisor


def tick_until(
    supervisor: Supervisor, start_s: float, end_s: float, beating: tuple[str, ...] = ()
) -> list[Instruction]:
    """Ticks every 100 ms, with heartbeats of those that beat."""
    out: list[Instruction] = []
    for tenth in range(round(start_s * 10), round(end_s * 10) + 1):
        for name in beating:
            supervisor.handle(Beat(name), tenth / 10)
        out += supervisor.handle(Tick(), tenth / 10)
        supervisor.check_integrity()
    return out


def test_a_child_that_dies_is_started_again_after_a_delay() -> None:
    supervisor = started()
    assert supervisor.handle(Exited("decode-0", -11), 1.0) == [Died("decode-0", -11, 0.2)]
    assert tick_until(supervisor, 1.0, 1.1) == []
    assert tick_until(supervisor, 1.2, 1.2) == [Start("decode-0")]


def test_delays_double_up_to_five_seconds_and_begin_anew_after_thirty_seconds_up() -> None:
    supervisor = started()
    now_s, delays = 0.0, []
    for _ in range(7):
        (died,) = supervisor.handle(Exited("prefill-0", 1), now_s)
        assert isinstance(died, Died)
        delays.append(died.restart_in_s)
        now_s += died.restart_in_s
        assert supervisor.handle(Tick(), now_s) == [Start("prefill-0")]
    assert delays == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert supervisor.handle(Exited("prefill-0", 0), now_s + 29.9) == [Died("prefill-0", 0, 5.0)]
    supervisor.handle(Tick(), now_s + 35.0)
    assert supervisor.handle(Exited("prefill-0", 0), now_s + 65.0) == [Died("prefill-0", 0, 0.2)]


def test_a_silent_child_is_killed_and_started_again() -> None:
    supervisor = started()
    for name in NAMES:
        supervisor.handle(Beat(name), 5.0)
    out = tick_until(supervisor, 5.0, 16.0, beating=("router", "prefill-0"))
    assert out == [Kill("decode-0", "no heartbeat")]
    assert supervisor.handle(Exited("decode-0", -9), 16.1) == [Died("decode-0", -9, 0.2)]
    assert tick_until(supervisor, 16.2, 16.5, beating=("router", "prefill-0")) == [Start("decode-0")]


def test_a_child_may_take_a_minute_until_its_first_heartbeat() -> None:
    supervisor = started()
    assert tick_until(supervisor, 0.0, 59.9) == []
    assert tick_until(supervisor, 60.0, 60.0) == [Kill(name, "no heartbeat") for name in NAMES]


def test_silence_while_we_were_away_ourselves_is_forgiven() -> None:
    supervisor = started()
    assert tick_until(supervisor, 0.0, 5.0, beating=NAMES) == []
    assert supervisor.handle(Tick(), 500.0) == []
    assert tick_until(supervisor, 500.1, 509.9) == []
    assert len(tick_until(supervisor, 510.0, 510.1)) == 3


def test_a_configuration_error_is_not_tried_again_and_drains_the_others() -> None:
    supervisor = started()
    assert supervisor.handle(Exited("prefill-0", 2), 1.0) == [GiveUp("prefill-0"), Terminate("router")]
    assert supervisor.handle(Exited("router", 0), 2.0) == [Terminate("decode-0")]
    assert supervisor.handle(Exited("decode-0", 0), 3.0) == [Ended(2)]


def test_a_child_that_has_served_is_tried_again_whatever_it_finds_later() -> None:
    """Such as a model directory that is just being replaced, or a port that somebody has taken meanwhile."""
    supervisor = started()
    assert supervisor.handle(Proven("prefill-0"), 0.5) == []
    for at_s in (1.0, 100.0):
        (died,) = supervisor.handle(Exited("prefill-0", 2), at_s)
        assert isinstance(died, Died)
        assert Start("prefill-0") in tick_until(supervisor, at_s, at_s + 10.0)
    assert supervisor.handle(Exited("decode-0", 2), 111.0)[0] == GiveUp("decode-0")


def test_stop_drains_the_router_first_and_then_the_servers() -> None:
    supervisor = started()
    assert supervisor.handle(Stop(), 1.0) == [Terminate("router")]
    assert supervisor.handle(Exited("decode-0", 1), 2.0) == [DiedDraining("decode-0", 1)]  # and not again
    assert supervisor.handle(Exited("router", 0), 3.0) == [Terminate("prefill-0")]
    assert supervisor.handle(Exited("prefill-0", 0), 4.0) == [Ended(0)]


def test_draining_is_bounded_in_time_for_each_wave() -> None:
    supervisor = started()
    supervisor.handle(Stop(), 0.0)
    assert tick_until(supervisor, 0.0, 29.9) == []
    (kill,) = tick_until(supervisor, 30.0, 30.1)
    assert isinstance(kill, Kill)
    assert kill.name == "router"
    assert supervisor.handle(Exited("router", -9), 30.2) == [Terminate("prefill-0"), Terminate("decode-0")]
    assert tick_until(supervisor, 30.2, 50.1) == []
    assert [type(each) for each in tick_until(supervisor, 50.2, 50.4)] == [Kill, Kill]
    supervisor.handle(Exited("prefill-0", -9), 50.5)
    assert supervisor.handle(Exited("decode-0", -9), 50.5) == [Ended(0)]


def test_a_second_stop_kills_everything() -> None:
    supervisor = started()
    supervisor.handle(Stop(), 0.0)
    assert [type(each) for each in supervisor.handle(Stop(), 1.0)] == [Kill, Kill, Kill]
    assert supervisor.handle(Stop(), 1.1) == []
    for name in NAMES[:2]:
        assert supervisor.handle(Exited(name, -9), 1.2) == []
    assert supervisor.handle(Exited("decode-0", -9), 1.2) == [Ended(130)]


def test_a_child_that_waits_for_its_restart_is_not_started_while_draining() -> None:
    supervisor = started()
    supervisor.handle(Exited("router", 1), 1.0)
    assert supervisor.handle(Stop(), 1.1) == [Terminate("prefill-0"), Terminate("decode-0")]
    assert tick_until(supervisor, 1.2, 5.0) == []
    assert supervisor.phase("router") is Phase.ENDED


def test_an_exit_of_what_does_not_run_is_a_bug() -> None:
    supervisor = started()
    supervisor.handle(Exited("router", 1), 1.0)
    with pytest.raises(AssertionError, match="router exited while waiting"):
        supervisor.handle(Exited("router", 1), 1.1)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(seed=st.integers(min_value=0, max_value=1 << 32), stop_at=st.integers(min_value=1, max_value=300))
def test_whatever_children_do_the_instructions_fit_and_the_end_comes(seed: int, stop_at: int) -> None:
    """A world of children that beat, hang, crash and ignore SIGTERM at random, driven by the instructions alone."""
    world = random.Random(seed)
    supervisor = Supervisor(WAVES, LIMITS)
    running: dict[str, str] = {}  # name -> "well", "hung", "ending", "killed"
    ended: int | None = None
    gave_up = False
    stops = 0
    now_s = 0.0

    def obey(instructions: list[Instruction]) -> None:
        nonlocal ended, gave_up
        for each in instructions:
            assert ended is None, "an instruction after the end"
            match each:
                case Start(name):
                    assert name not in running, "started twice"
                    assert not supervisor.draining, "started while draining"
                    running[name] = "well"
                case Terminate(name):
                    assert name in running
                    assert name == "router" or "router" not in running, "a server was drained before the router"
                    if world.random() < 0.7:
                        running[name] = "ending"
                case Kill(name, _):
                    running[name] = "killed"
                case GiveUp():
                    gave_up = True
                case Ended(code):
                    assert not running, "something still runs"
                    assert code == (130 if stops == 2 else 2 if gave_up else 0)
                    ended = code

    obey(supervisor.handle(Begin(), now_s))
    for step in range(3000):
        if ended is not None:
            break
        now_s += world.choice([0.1, 0.1, 0.1, 1.0])
        for name, state in list(running.items()):
            if state == "well" and world.random() < 0.01:
                running[name] = "hung"
            dies = {"killed": 0.9, "ending": 0.3, "hung": 0.0, "well": 0.01}[state]
            if world.random() < dies and ended is None:
                del running[name]
                status = -9 if state == "killed" else world.choice([0, 1, -11, 1, 1, 2])
                obey(supervisor.handle(Exited(name, status), now_s))
            elif state == "well" and ended is None:
                obey(supervisor.handle(Beat(name), now_s))
        if ended is None and step in (stop_at, stop_at + 200):
            stops += 1
            obey(supervisor.handle(Stop(), now_s))
        if ended is None:
            obey(supervisor.handle(Tick(), now_s))
        supervisor.check_integrity()
    assert ended is not None, "the end never came"
