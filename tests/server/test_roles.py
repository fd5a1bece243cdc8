"""How a server comes to another role: every order of what may happen, against what must hold."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from disagg.messages.legs import RoleChange
from disagg.server.roles import FAILED_CHARS, Phase, RoleChanges
from disagg.types.ids import Role

roles = st.sampled_from(Role)


def nothing() -> str:
    """Speaks against it."""
    return ""


class Changes(RuleBasedStateMachine):
    """Workers are up or not; what they are is what `now` was when they came up."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = RoleChanges(Role.DECODE)
        self.up: Role | None = Role.DECODE
        self.last_up = Role.DECODE
        self.asked = 0

    @rule(role=roles, why_not=st.sampled_from(["", "no room", "x" * 5000]))
    def ask(self, role: Role, why_not: str) -> None:
        before = self.changes.phase
        begun = self.changes.ask(role, lambda: why_not if self.up is not None else "its workers are not up")
        self.asked += 1
        report = self.changes.report
        assert begun <= (self.up is not None and before is Phase.STEADY and not why_not and role is not self.up)
        wanted = begun or report.becomes is role or (report.becomes is None and role is self.changes.now)
        assert bool(report.failed) != wanted or before is Phase.GOING_BACK, (
            "who is refused is told why, and nobody else"
        )

    @precondition(lambda self: self.up is not None)
    @rule()
    def workers_end(self) -> None:
        emptying, becomes = self.changes.phase is Phase.EMPTYING, self.changes.becomes
        assert self.changes.fail("they are lost") is False
        assert self.changes.take() is emptying
        assert self.changes.now is (becomes if emptying else self.up)
        self.up = None

    @precondition(lambda self: self.up is None)
    @rule()
    def workers_come_up(self) -> None:
        self.changes.up()
        self.up = self.last_up = self.changes.now
        assert self.changes.phase is Phase.STEADY

    @precondition(lambda self: self.up is None)
    @rule()
    def workers_do_not_come_up(self) -> None:
        trying = self.changes.phase is Phase.TRYING
        assert self.changes.fail("no room") is trying
        assert not self.changes.take()
        assert self.changes.now is self.last_up, "it is again what it was"
        if trying:
            assert "could not become" in self.changes.report.failed

    @invariant()
    def holds(self) -> None:
        self.changes.check_integrity()
        report = self.changes.report
        assert (report.started, report.asked) == (Role.DECODE, self.asked)
        assert len(report.failed) <= FAILED_CHARS


TestChanges = Changes.TestCase


def test_a_change_is_asked_for_tried_and_done() -> None:
    changes = RoleChanges(Role.DECODE)
    assert changes.ask(Role.PREFILL, nothing)
    assert (changes.now, changes.report) == (Role.DECODE, RoleChange(Role.DECODE, Role.PREFILL, "", 1))
    assert not changes.ask(Role.MIXED, nothing) and changes.report.failed == "it is becoming prefill now"
    assert changes.take() and changes.now is Role.PREFILL and changes.becomes is Role.PREFILL
    changes.up()
    assert changes.report == RoleChange(Role.DECODE, None, "", 2)


def test_workers_that_cannot_start_bring_the_old_role_back_which_may_take_a_few_tries() -> None:
    changes = RoleChanges(Role.DECODE)
    assert changes.ask(Role.PREFILL, nothing) and changes.take() and changes.fail("no room")
    assert changes.now is Role.DECODE and not changes.fail("no room again")
    assert not changes.ask(Role.PREFILL, nothing) and "again now" in changes.report.failed
    changes.up()
    assert changes.phase is Phase.STEADY and changes.ask(Role.PREFILL, nothing)
