"""The tests of the offload manager notice what they are there for: each of these changes makes some walk of the world, or
one of the named tests, fail."""

from __future__ import annotations

from types import ModuleType

import pytest

from disagg.offload import acks, host, manager, rules, uploads
from tests.memory.test_mutations import Mutation, does_nothing, mutated, replaced
from tests.offload import test_manager, test_manager_host, test_manager_storage, world
from tests.offload.campaign import walk
from tests.offload.cases import named_in

pytestmark = pytest.mark.timeout(900)

WALKS = 400  # those that are noticed are, within a few dozen

OF_MANAGER = (
    Mutation("copies are not pinned", "OffloadManager._begin_span", replaced("self._out.append(Pin(pins))", "pass")),
    Mutation(
        "pins stay",
        "OffloadManager.copied",
        replaced("self._out.append(Unpin(tuple((page for page, _ in span.moved))))", "pass"),
    ),
    Mutation(
        "only prompts are unpinned",
        "OffloadManager.copied",
        replaced("for page, _ in span.moved)", "for page, _ in span.moved if span.start == 0)"),
    ),
    Mutation(
        "a span is made whatever the host has", "OffloadManager._make_span", replaced("self.host.release(held)", "pass")
    ),
    Mutation(
        "what is ready on the host is not held",
        "OffloadManager._make_span",
        replaced("self.host.hold(g, page)", "pass"),
    ),
    Mutation(
        "the last page may be partial",
        "OffloadManager.progress",
        replaced("written // self._rules.layout.page_tokens", "-(-written // self._rules.layout.page_tokens)"),
    ),
    Mutation(
        "the end is not offloaded", "OffloadManager._advance", replaced("if flow.ended else 0", "if False else 0")
    ),
    Mutation(
        "a failed upload is published",
        "OffloadManager.uploaded",
        replaced("failed_somewhere or not span.to_storage", "not span.to_storage"),
    ),
    Mutation(
        "a span is published before its parent",
        "OffloadManager._publish",
        replaced("span.parent is None or span.parent.state is SpanState.STORED", "True"),
    ),
    Mutation("children of what failed go on", "OffloadManager._fail", replaced("self._doom(child)", "pass")),
    Mutation("children wait for ever", "OffloadManager._is_stored", replaced("self._publish(child)", "pass")),
    Mutation(
        "what else is in others' spans is stored again",
        "OffloadManager.published",
        replaced("self.stored.add(beyond.hashes, beyond.keys)", "pass"),
    ),
    Mutation(
        "what others have stored is stored again, though that is known",
        "OffloadManager._leave_to_others",
        replaced("if not known:", "if True:"),
    ),
    Mutation(
        "who storage was asked for waits for ever", "OffloadManager.answered", replaced("flow.asked = False", "pass")
    ),
    Mutation(
        "what somebody else stored counts as all of it",
        "OffloadManager.published",
        replaced("min(pages, len(span.hashes))", "len(span.hashes)"),
    ),
    Mutation("what failed is not tried again", "OffloadManager._fail", replaced("flow.go_back(span.start)", "pass")),
    Mutation(
        "what was stored is stored again",
        "OffloadManager._skip",
        replaced("self.stored.has_prefix(page_hash)", "False"),
    ),
    Mutation(
        "what is under way is made again",
        "OffloadManager._skip",
        replaced("self._in_flight.hashes.get(page_hash)", "None"),
    ),
    Mutation(
        "a span that is on its way to the host is taken for one to storage",
        "OffloadManager._skip",
        replaced("stores and (not span.to_storage)", "False"),
    ),
    Mutation("what is kept on the host only is stored", "OffloadManager._stores", replaced(" and flow.to_storage", "")),
    Mutation(
        "a page that goes to the host only counts as stored",
        "OffloadManager._make_span",
        replaced("stores and self._in_flight.only_to_host", "False and self._in_flight.only_to_host"),
    ),
    Mutation(
        "pages of windows are stored again by every span",
        "OffloadManager._wanted",
        replaced("key in self._in_flight.keys or (self.stored.has_page(key) and self._stores(flow))", "False"),
    ),
    Mutation("the host's pages stay held", "OffloadManager._end", replaced("self.host.release(placed)", "pass")),
    Mutation(
        "what a sequence keeps stays held", "OffloadManager._let_go", replaced("self._release_kept(flow)", "pass")
    ),
    Mutation(
        "nothing is kept while a sequence runs",
        "OffloadManager._end",
        replaced("if not self._stores(flow):", "if False:"),
    ),
    Mutation("what is passed over is not kept", "OffloadManager._keep", does_nothing),
    Mutation(
        "what does not fit at the end is forgotten, pins and all",
        "OffloadManager._drop",
        replaced("self._out.append(Unpin(gpu_pages(flow.pinned)))", "pass"),
    ),
    Mutation(
        "what waits at the end is not pinned",
        "OffloadManager._linger",
        replaced("self._out.append(Pin(gpu_pages(wanted)))", "pass"),
    ),
    Mutation(
        "a page is on the host when the copy is ordered",
        "OffloadManager._begin_span",
        replaced(
            "self._copying[op] = span",
            "self._copying[op] = span; [self.host.name(page.group, at, *span.names[page.group, page.page_no]) "
            "for page, at in span.moved]",
        ),
    ),
    Mutation(
        "storage that is back is not used for what there is",
        "OffloadManager.set_store",
        replaced("flow.go_back(0)", "pass"),
    ),
)
OF_UPLOADS = (
    Mutation("every upload is started at once", "Uploads.next", replaced("self._transfers >= self._most", "False")),
    Mutation(
        "nobody waits for what storage says",
        "Uploads.next",
        replaced("not any((flow.asked for flow in span.followers))", "True"),
    ),
    Mutation("places are not given back", "Uploads.report", replaced("self._transfers -= 1", "pass")),
)
OF_ACKS = (
    Mutation("one rank is enough", "Acks.report", replaced("min(self._reported)", "max(self._reported)")),
    Mutation("a late report counts", "Acks.report", replaced("max(self._reported[rank], last)", "last")),
    Mutation("failures are forgotten", "Acks.report", replaced("self._failed |=", "set() |")),
)
OF_RULES = (
    Mutation(
        "a page that is gone is copied as if it were there",
        "OffloadRules.wanted",
        replaced(
            "return lacking if all(map(there, lacking)) else None", "return [each for each in lacking if there(each)]"
        ),
    ),
    Mutation(
        "increments are two strides",
        "OffloadRules.cut",
        replaced("self.last_point(at) + self.stride", "self.last_point(at) + 2 * self.stride"),
    ),
    Mutation(
        "a window needs one page less",
        "OffloadRules.needed",
        replaced("max(0, point - self", "max(0, 1 + point - self"),
    ),
    Mutation(
        "a window needs everything",
        "OffloadRules.needed",
        replaced("max(0, point - self.layout.pages_for(g, group.window_tokens))", "0"),
    ),
)
OF_HOST = (
    Mutation(
        "what goes on from an evicted page stays",
        "HostPool._on_evict",
        replaced("self._pending.append(page_hash)", "pass"),
    ),
    Mutation("nobody is told what is evicted", "HostPool._forget_name", replaced("self._gone(page_hash)", "pass")),
    Mutation(
        "what is held is dropped",
        "HostPool._drop_descendants",
        replaced("(g, page) not in self._held", "True"),
    ),
    Mutation(
        "the shortest prefix goes first",
        "HostPool.release",
        replaced("lengths.append(page_no + 1)", "lengths.append(-page_no)"),
    ),
)
TABLE = [
    *((manager, each) for each in OF_MANAGER),
    *((uploads, each) for each in OF_UPLOADS),
    *((acks, each) for each in OF_ACKS),
    *((rules, each) for each in OF_RULES),
    *((host, each) for each in OF_HOST),
]


def put_in(monkeypatch: pytest.MonkeyPatch, module: ModuleType, copy: ModuleType) -> None:
    """Whoever uses the class, uses the copy's; integrity is not checked by the class itself."""
    if module is manager:
        monkeypatch.setattr(copy.OffloadManager, "check_integrity", lambda self: None)
        monkeypatch.setattr(world, "OffloadManager", copy.OffloadManager)
    elif module is acks:
        monkeypatch.setattr(manager, "Acks", copy.Acks)
        monkeypatch.setattr(uploads, "Acks", copy.Acks)
    elif module is uploads:
        monkeypatch.setattr(manager, "Uploads", copy.Uploads)
    elif module is rules:
        monkeypatch.setattr(world, "offload_rules", copy.offload_rules)
    else:
        monkeypatch.setattr(copy.HostPool, "check_integrity", lambda self: None)
        monkeypatch.setattr(world, "HostPool", copy.HostPool)


def first_failure() -> str | None:
    for each in named_in(test_manager, test_manager_host, test_manager_storage):
        try:
            each()
        except (AssertionError, KeyError, IndexError, ValueError, AttributeError) as error:
            return f"{each.__name__}: {error!r}"
    for seed in range(WALKS):
        try:
            walk(seed, world.OffloadManager, world.HostPool)
        except (AssertionError, KeyError, IndexError, ValueError, AttributeError) as error:
            return f"walk {seed}: {error!r}"
    return None


def test_each_mutation_finds_what_it_changes() -> None:
    """So that those below, which take minutes, do not rot."""
    for module, mutation in TABLE:
        mutated(module, mutation)


@pytest.mark.slow
@pytest.mark.parametrize(("module", "mutation"), [pytest.param(*row, id=row[1].name) for row in TABLE])
def test_it_is_noticed_that(module: ModuleType, mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch, module, mutated(module, mutation))
    notice = first_failure()
    print(f"{mutation.name} -> {notice}")
    assert notice is not None


@pytest.mark.slow
@pytest.mark.parametrize("module", [manager, uploads, acks, rules, host])
def test_a_copy_without_a_mutation_passes(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch, module, mutated(module, None))
    assert first_failure() is None
