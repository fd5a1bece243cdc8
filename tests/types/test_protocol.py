"""Which numbers can speak with each other, against sets of numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disagg.types.protocol import BEFORE_NUMBERS, OLDEST_PROTOCOL, PROTOCOL, Version, circles, refusal, spoken
from disagg.types.version import code_digest, own_version, version

numbers = st.integers(0, 8)
versions = st.tuples(numbers, numbers).map(lambda ends: Version(max(ends), min(ends), "1.2"))


def speaks(version: Version) -> set[int]:
    return set(range(version.oldest, version.protocol + 1))


@given(versions, versions)
def test_two_speak_the_highest_number_that_both_have_and_are_refused_with_both_named_if_they_have_none(
    one: Version, other: Version
) -> None:
    common = speaks(one) & speaks(other)
    assert spoken(one, other) == spoken(other, one) == max(common, default=None)
    why = refusal("server d0", one, "router r", other)
    assert bool(why) == (not common)
    if why:
        assert str(one) in why and str(other) in why
        assert why.endswith("upgrade server d0" if one.protocol < other.protocol else "upgrade router r")


@given(st.lists(versions, max_size=6))
def test_any_two_that_can_speak_are_in_one_circle_and_no_circle_is_within_another(all_of: list[Version]) -> None:
    found = circles(all_of)
    members = [{v for v in all_of if protocol in speaks(v)} for protocol in found]
    for one in all_of:
        for other in all_of:
            together = any(one in circle and other in circle for circle in members)
            assert together == (spoken(one, other) is not None)
    assert not any(a <= b for i, a in enumerate(members) for j, b in enumerate(members) if i != j)
    assert list(found) == sorted(found)


def test_one_version_is_one_circle() -> None:
    assert circles([own_version()] * 3) == (PROTOCOL,)
    assert circles([own_version(), BEFORE_NUMBERS]) == (0,)
    assert circles([]) == ()


def test_this_code_speaks_with_the_release_before() -> None:
    """To raise OLDEST_PROTOCOL above the release before makes every upgrade need a second cluster."""
    assert OLDEST_PROTOCOL <= PROTOCOL - 1
    assert spoken(own_version(), BEFORE_NUMBERS) == 0


def test_what_a_process_says_of_itself_is_the_release_and_the_first_digits_of_its_code() -> None:
    digits = code_digest()[:8]
    assert len(digits) == 8
    assert own_version() == Version(PROTOCOL, OLDEST_PROTOCOL, f"{version()}+{digits}")


def test_what_others_say_of_their_software_is_made_fit_to_be_shown() -> None:
    assert str(Version(2, 1, "1\n2" + "x" * 999)).startswith("disagg 1\\n2xxx")
    assert len(str(Version(2, 1, "x" * 999))) < 200
    assert str(BEFORE_NUMBERS) == "a version that does not say, which speaks protocol 0"
