"""The tests of the prefill delayer notice what they are there for: each of these changes to it makes one of them fail."""

from __future__ import annotations

import pytest

from disagg.scheduler import prefill_delayer
from tests.scheduler import test_prefill_delayer
from tests.scheduler.mutated import mutated

# what is wrong: what stands there, and what then would
MUTATIONS = {
    "one rank without prompts does not count": ("if all(state.prefillable", "if any(state.prefillable"),
    "some ranks are all": ("Estimate.MIXED if any(", "Estimate.MIXED if all("),
    "passes without prompts are delays": ("if found is Estimate.NONE:", "if False:"),
    "every rank must force": ("any(state.force", "all(state.force"),
    "nobody forces": ("any(state.force for state in states)", "False"),
    "force counts on all ranks alike": ("found is Estimate.MIXED and any(state.force", "any(state.force"),
    "a rank without prompts forces": ("prefillable and usage <", "usage <"),
    "a pool at the watermark forces": ("usage < self.low_usage", "usage <= self.low_usage"),
    "the least busy rank counts": ("- max(state.running", "- min(state.running"),
    "the busyness of one rank counts": ("max(state.running for state in states)", "states[0].running"),
    "the smallest batch counts": ("free < max(state.largest", "free < min(state.largest"),
    "as many slots as the largest batch are few": ("few = free <", "few = free <="),
    "no delay is let off": ("if skips or not few", "if not few"),
    "a delay is let off again and again": ("self._skips and not verdict.skipped", "True"),
    "a delay is let off for nothing": ("skipped=few", "skipped=True"),
    "a delay for other ranks is let off": (
        "    if (0 if delay is None",
        "    if skips:\n        return Verdict(found, True, Reason.NO_WAIT)\n    if (0 if delay is None",
    ),
    "a want of slots is not bounded": (
        "< limits.passes - 1:",
        "< limits.passes - 1 or found is Estimate.ALL:",
    ),
    "one pass more": ("limits.passes - 1", "limits.passes"),
    "one pass less": ("limits.passes - 1", "limits.passes - 2"),
    "a wait that was worth it is none": ("Reason.NO_WAIT if delay is None else Reason.WAIT_SUCCESS", "Reason.NO_WAIT"),
    "what timed out is a delay": ("True, Reason.WAIT_TIMEOUT", "True, Reason.DELAY"),
    "an allowed pass leaves the delay as it is": (
        "            self.delay = None\n        elif self.delay is None:",
        "            pass\n        elif self.delay is None:",
    ),
    "only a timeout ends a delay": ("if verdict.allow:", "if verdict.reason is Reason.WAIT_TIMEOUT:"),
    "a delay begins with none": ("Delay(1, now_s)", "Delay(0, now_s)"),
    "a delay begins anew in each pass": ("Delay(self.delay.passes + 1, self.delay.since_s)", "Delay(1, now_s)"),
    "a delay has always just begun": ("self.delay.passes + 1, self.delay.since_s", "self.delay.passes + 1, now_s"),
    "what is recorded is what is left": (
        "Outcome(verdict, states, self._before",
        "Outcome(verdict, states, self._delayer.delay",
    ),
    "each question is a pass": ("if self._said is None:", "if True:"),
    "who does not ask stays away": (
        "verdict, states = self._negotiated(prefillable=False)",
        "verdict, states = self._said or (Verdict(Estimate.NONE, True, Reason.NONE), ())",
    ),
    "who does not ask has prompts": ("_negotiated(prefillable=False)", "_negotiated(prefillable=True)"),
    "nothing is executed": ("self._before, executed)", "self._before, False)"),
    "a burst stays": ("while self._largest and self._largest[0][0]", "while False and self._largest[0][0]"),
    "a later smaller batch is forgotten": ("self._largest[-1][1] <= prompts", "self._largest[-1][1] >= prompts"),
    "the window is one pass shorter": ("< pass_no - self._window", "<= pass_no - self._window"),
}


def put_in(monkeypatch: pytest.MonkeyPatch, old: str = "", new: str = "") -> None:
    copy = mutated(prefill_delayer, old, new)
    monkeypatch.setattr(test_prefill_delayer, "delayer", copy)


def first_failure() -> str | None:
    for number, each in enumerate(test_prefill_delayer.NAMED):
        try:
            each()
        except AssertionError as error:
            return f"{number} {each.__name__}: {error!r}"
    return None


@pytest.mark.parametrize("name", MUTATIONS)
def test_it_is_noticed_that(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch, *MUTATIONS[name])
    notice = first_failure()
    print(f"{name} -> {notice}")
    assert notice is not None


def test_a_copy_without_a_mutation_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch)
    assert first_failure() is None
