"""The tests of memory notice what they are there for: each of these changes to a shipped class makes the named one fail.

A mutation changes one method or function in a copy of its module, which is then put through the test that the shipped one
passes. What the tests here are called is the table of what is caught by what; `pytest -rP` also tells how.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import pytest

from disagg.memory import allocator, cache, changes, eviction, prefixes, small_pages
from tests.memory import machines, test_allocator_machine, test_cache_machine

Change = Callable[[str], str]  # of a method's source, in the form that `ast.unparse` gives it

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Mutation:
    """name: what is wrong. method: "Class.method" or "function" of the module."""

    name: str
    method: str
    change: Change


# ---- how methods are changed


def replaced(old: str, new: str) -> Change:
    def change(source: str) -> str:
        assert source.count(old) == 1, f"{old!r} is there {source.count(old)} times: what was it changed to?\n{source}"
        return source.replace(old, new)

    return change


def both(first: Change, second: Change) -> Change:
    return lambda source: second(first(source))


def does_nothing(source: str) -> str:
    method = ast.parse(source).body[0]
    assert isinstance(method, ast.FunctionDef)
    method.body = [ast.Pass()]
    return ast.unparse(method)


def with_steps(order: str) -> Change:
    """The five steps of `PageAllocator._take`, each of them one statement, in another order or not all of them."""

    def change(source: str) -> str:
        method = ast.parse(source).body[0]
        assert isinstance(method, ast.FunctionDef)
        steps = [statement for statement in method.body if isinstance(statement, ast.While | ast.If)]
        first = method.body.index(steps[0])
        assert len(steps) == 5 and method.body[first : first + 5] == steps, f"where are the five steps?\n{source}"
        method.body[first : first + 5] = [steps[int(number) - 1] for number in order]
        return ast.unparse(method)

    return change


def place_of(tree: ast.Module, name: str) -> tuple[list[ast.stmt], int]:
    of_class, _, method = name.rpartition(".")
    bodies = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == of_class]
    for body in bodies if of_class else [tree.body]:
        for index, statement in enumerate(body):
            if isinstance(statement, ast.FunctionDef) and statement.name == method:
                return body, index
    raise AssertionError(f"there is no {name}: what is it called now?")


def mutated(module: ModuleType, mutation: Mutation | None) -> ModuleType:
    """A copy of the module, with the mutation."""
    tree = ast.parse(inspect.getsource(module))
    if mutation is not None:
        body, index = place_of(tree, mutation.method)
        before = ast.unparse(body[index])
        after = mutation.change(before)
        assert after != before, f"{mutation.name}: nothing was changed"
        body[index] = ast.parse(after).body[0]
    copy = ModuleType(f"{module.__name__}_mutated")
    exec(compile(tree, copy.__name__, "exec"), copy.__dict__)
    return copy


# ---- what is wrong, and which test says so

OF_LARGE = "large * per_large:(large + 1) * per_large"
NEWER_USE = "last_access if last_access > last_use else last_use"

OF_ALLOCATOR = (
    Mutation("step 1 is skipped", "PageAllocator._take", with_steps("2345")),
    Mutation("step 2 is skipped", "PageAllocator._take", with_steps("1345")),
    Mutation("step 3 is skipped", "PageAllocator._take", with_steps("1245")),
    Mutation("step 4 is skipped", "PageAllocator._take", with_steps("1235")),
    Mutation("step 5 is skipped", "PageAllocator._take", with_steps("1234")),
    Mutation("step 2 comes before step 1", "PageAllocator._take", with_steps("21345")),
    Mutation("step 3 comes before step 2", "PageAllocator._take", with_steps("13245")),
    Mutation("step 4 comes before step 2", "PageAllocator._take", with_steps("14235")),
    Mutation("step 4 comes before step 3", "PageAllocator._take", with_steps("12435")),
    Mutation("step 5 comes before step 4", "PageAllocator._take", with_steps("12354")),
    Mutation(
        "a new large page is nobody's",
        "PageAllocator._assign",
        both(replaced("[owner]", "[NOBODY]"), replaced("setdefault(owner, ", "setdefault(NOBODY, ")),
    ),
    Mutation(
        "groups are asked one by one whether there is enough",
        "PageAllocator.allocate_all",
        replaced("not self._can_take(wanted, owner)", "not all(self._can_take([one], owner) for one in wanted)"),
    ),
    Mutation(
        "of one age the shortest prefix goes first", "PageAllocator.release", replaced("-prefix_len", "prefix_len")
    ),
    Mutation("of one age any prefix goes first", "PageAllocator.release", replaced("-prefix_len", "0")),
    Mutation("the last use is not noted on release", "PageAllocator.release", replaced(NEWER_USE, "max(0, last_use)")),
    Mutation("the last use goes back", "PageAllocator.release", replaced(NEWER_USE, "last_access")),
    Mutation(
        "a large page is as old as its oldest page",
        "PageAllocator._become_idle",
        replaced(f"max(ages[{OF_LARGE}])", f"min((age for age in ages[{OF_LARGE}] if age != NEVER))"),
    ),
    Mutation(
        "a large page may be evicted while a page of it is used",
        "PageAllocator.share",
        replaced("self._leave_idle(small, were_idle)", "pass"),
    ),
    Mutation(
        "an empty large page stays with its group",
        "PageAllocator._have_emptied",
        replaced("not small.count(large, EVICTABLE)", "False"),
    ),
    Mutation("a holder is not counted when it shares", "PageAllocator.share", replaced("holders[page] += 1", "pass")),
    Mutation(
        "a holder counts twice when it shares",
        "PageAllocator.share",
        replaced("holders[page] += 1", "holders[page] += 2"),
    ),
    Mutation(
        "a holder of an unused page is not counted",
        "PageAllocator._evict_small",
        replaced("small.holders[page] = 1", "pass"),
    ),
    Mutation(
        "a holder stays when it releases", "PageAllocator.release", replaced("holders[page] - 1", "holders[page]")
    ),
    Mutation(
        "a holder leaves twice when it releases",
        "PageAllocator.release",
        replaced("holders[page] - 1", "max(0, holders[page] - 2)"),
    ),
    Mutation(
        "what step 3 evicts is not reported", "PageAllocator._evict_large", replaced("self._on_evict(g, page)", "pass")
    ),
    Mutation(
        "what step 5 evicts is not reported", "PageAllocator._evict_small", replaced("self._on_evict(g, page)", "pass")
    ),
    Mutation(
        "what step 5 evicts is not counted", "PageAllocator._evict_small", replaced("small.evictions += count", "pass")
    ),
    Mutation("nothing is kept", "PageAllocator.keep", does_nothing),
    Mutation("nothing is forgotten", "PageAllocator.forget", does_nothing),
)

OF_EVICTION = (
    Mutation(
        "what was used last goes first", "EvictionQueue.pop", replaced("self._last_uses[0]", "self._last_uses[-1]")
    ),
    Mutation(
        "what comes later is not put in order", "EvictionQueue.add", replaced("last_use == self._sorted", "False")
    ),
)

OF_FORESIGHT = (
    Mutation(
        "that step 3 may evict what a later step 1 needs is not foreseen",
        "PageAllocator._can_take",
        replaced("evicted.update(", "set().update("),
    ),
)

OF_CACHE = (
    Mutation(
        "full attention needs nothing",
        "PrefixCache.known",
        replaced("found = self._first_missing(g, hashes, 0, found)", "pass"),
    ),
    Mutation(
        "full attention needs its last page only",
        "PrefixCache.known",
        replaced("hashes, 0, found", "hashes, found - 1, found"),
    ),
    Mutation(
        "one page of an image is enough",
        "PrefixCache._before_missing_image",
        replaced("range(image.num_pages)", "range(1)"),
    ),
    Mutation(
        "an image that begins in the last page is not needed",
        "PrefixCache._before_missing_image",
        replaced("< most * page_tokens", "< (most - 1) * page_tokens"),
    ),
    Mutation(
        "beyond its budget, a group still needs every page",
        "PrefixCache._budgeted",
        replaced("range(most, whole, -1)", "()"),
    ),
    Mutation("part of what the budget kept is enough", "PrefixCache._budgeted", replaced("in kept", "in kept[1:]")),
    Mutation("a budget is never exceeded", "PrefixCache._budgeted", replaced("min(most, whole)", "most")),
    Mutation(
        "each group is asked only once",
        "PrefixCache.lookup_known",
        replaced("while found != before", "if found != before"),
    ),
    Mutation(
        "a transfer begins one page late",
        "PrefixCache.receivable",
        replaced("missing * page_tokens", "(missing + 1) * page_tokens"),
    ),
    Mutation(
        "the second page of a prefix takes the first one's place",
        "PrefixCache.insert",
        replaced("key in pages", "False"),
    ),
    Mutation("an evicted page is still found", "PrefixCache.remove", replaced("del self._pages[g][key]", "pass")),
)

OF_PREFIXES = (
    Mutation("a window needs one page less", "longest_windowed", replaced("length - window", "length - window + 1")),
    Mutation("a window needs one page more", "longest_windowed", replaced("length - window", "length - window - 1")),
    Mutation(
        "any state is a checkpoint",
        "longest_checkpointed",
        replaced("range(most // every * every, 0, -every)", "range(most, 0, -1)"),
    ),
    Mutation("a checkpoint needs no state", "longest_checkpointed", replaced("hashes[end - 1] in pages", "True")),
)

OF_CHANGES = (
    Mutation("nobody is told what was stored", "Changes.came", replaced("self._news[key] = True", "pass")),
    Mutation("nobody is told what was removed", "Changes.left", replaced("self._news[key] = False", "pass")),
    Mutation("events are told again", "Changes.take", replaced("(self._news, {})", "(self._news, self._news)")),
)


# How many examples each of them may need: mutations that show rarely are noticed in the slow campaign for certain.
MANY, FEW = 2000, 200
FIVE_STEPS = test_allocator_machine.test_the_allocator_follows_the_five_steps
FORESIGHT = test_allocator_machine.test_groups_before_may_evict_what_a_later_group_counts_on
LONGEST_VALID = test_cache_machine.test_a_hit_is_the_longest_prefix_valid_in_every_group

TABLE = [
    *((mutation, allocator, partial(FIVE_STEPS, MANY)) for mutation in OF_ALLOCATOR),
    *((mutation, eviction, partial(FIVE_STEPS, MANY)) for mutation in OF_EVICTION),
    *((mutation, allocator, partial(FORESIGHT)) for mutation in OF_FORESIGHT),
    *((mutation, cache, partial(LONGEST_VALID, MANY)) for mutation in OF_CACHE),
    *((mutation, prefixes, partial(LONGEST_VALID, MANY)) for mutation in OF_PREFIXES),
    *((mutation, changes, partial(LONGEST_VALID, MANY)) for mutation in OF_CHANGES),
]


@pytest.fixture
def put_into_tests(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], None]:
    """Lets the tests use what a copy has, and trust the comparison with the model alone."""

    def put(copy: ModuleType) -> None:
        monkeypatch.setattr(machines, "campaign", partial(machines.campaign, shrink=False))
        # The check is of queues, too, so it would notice before any page comes out in a wrong order: what is shown here is
        # that the order itself is noticed, as it is of a mutated allocator or cache.
        if copy.__name__.startswith(eviction.__name__):
            monkeypatch.setattr(allocator.PageAllocator, "check_integrity", lambda self: None)
            for module in (allocator, small_pages):  # that make queues
                monkeypatch.setattr(module, "EvictionQueue", copy.EvictionQueue)
        for module in (prefixes, changes):  # of which the cache has names of its own
            if copy.__name__.startswith(module.__name__):
                for name in vars(cache).keys() & vars(copy).keys() & vars(module).keys():
                    if vars(cache)[name] is vars(module)[name]:
                        monkeypatch.setattr(cache, name, vars(copy)[name])
        for tests in (test_allocator_machine, test_cache_machine):
            for name in ("PageAllocator", "PrefixCache"):
                if hasattr(tests, name) and hasattr(copy, name):
                    monkeypatch.setattr(getattr(copy, name), "check_integrity", lambda self: None)
                    monkeypatch.setattr(tests, name, getattr(copy, name))

    return put


def test_each_mutation_finds_what_it_changes() -> None:
    """So that those below, which take minutes, do not rot."""
    for mutation, module, _ in TABLE:
        mutated(module, mutation)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutation", "module", "test"),
    [pytest.param(*row, id=f"{row[0].name} -> {row[2].func.__name__}") for row in TABLE],
)
def test_it_is_noticed_that(
    mutation: Mutation, module: ModuleType, test: partial[None], put_into_tests: Callable[[ModuleType], None]
) -> None:
    put_into_tests(mutated(module, mutation))
    with pytest.raises(AssertionError) as caught:
        test()
    notice = str(caught.value).splitlines()[0]
    print(f"{mutation.name} -> {test.func.__name__}: {notice}")
    assert "was too rare" not in notice, "no answer was wrong, only some were rare"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "test"),
    [
        (allocator, FIVE_STEPS),
        (cache, LONGEST_VALID),
        (prefixes, LONGEST_VALID),
        (changes, LONGEST_VALID),
    ],
)
def test_a_copy_without_a_mutation_passes(
    module: ModuleType, test: Callable[[int], None], put_into_tests: Callable[[ModuleType], None]
) -> None:
    put_into_tests(mutated(module, None))
    test(FEW)
