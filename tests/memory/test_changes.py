"""What came to a set and left it: told once, never more than there is to tell, and adding up to the set."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disagg.memory.changes import Changes


def test_what_came_and_went_or_went_and_came_is_no_news() -> None:
    changes: Changes[str] = Changes()
    changes.came("a")
    changes.came("b")
    changes.left("a")
    assert changes.take() == (["b"], [])
    changes.left("b")
    changes.came("b")
    assert changes.take() == ([], [])
    changes.left("b")
    assert changes.take() == ([], ["b"])


@given(st.lists(st.one_of(st.sampled_from("abcd"), st.none()), max_size=60))
def test_news_add_up_to_the_set(what: list[str | None]) -> None:
    """A letter comes, or leaves if it is there; None: the news are taken."""
    changes: Changes[str] = Changes()
    there: set[str] = set()
    known: set[str] = set()
    for key in [*what, None]:
        if key is None:
            came, left = changes.take()
            assert known.isdisjoint(came) and known.issuperset(left)
            known = known.union(came).difference(left)
            assert known == there
        elif key in there:
            there.remove(key)
            changes.left(key)
        else:
            there.add(key)
            changes.came(key)
