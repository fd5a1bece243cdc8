"""Discovery by names: what was known stays while nobody answers, and goes when a name says so often enough."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence

import pytest

from disagg.config.tree import RouterConfig
from disagg.discovery.choice import discovery_of, names_of
from disagg.discovery.dns import MISSES, DnsDiscovery, Name, NoSuchName, addresses
from disagg.discovery.found import Found
from disagg.types.errors import ConfigError


async def published(answers: Sequence[Sequence[str] | Exception]) -> list[set[str]]:
    """What is published after each of these lookups of one name."""
    left = list(answers)
    out: list[set[str]] = []

    async def lookup(host: str, port: int) -> Sequence[str]:
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def publish(found: Mapping[str, Found]) -> None:
        assert all(each.role == "decode" and not each.name and each.address == key for key, each in found.items())
        out.append(set(found))

    running = asyncio.create_task(DnsDiscovery([Name("decode", "d", 1)], every_s=0.0, lookup=lookup).run(publish))
    while len(out) < len(answers):
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return out


async def test_addresses_come_and_go() -> None:
    assert await published([["a:1"], ["a:1", "b:1"], ["b:1"]]) == [{"a:1"}, {"a:1", "b:1"}, {"b:1"}]


async def test_what_was_known_stays_while_nobody_answers() -> None:
    trouble = socket.gaierror(socket.EAI_AGAIN, "try again")
    assert await published([["a:1"], trouble, TimeoutError(), OSError("no route"), ["b:1"]]) == [
        *[{"a:1"}] * 4,
        {"b:1"},
    ]


async def test_a_name_without_addresses_is_believed_when_it_has_said_so_often_enough() -> None:
    nothing = NoSuchName("d")
    assert await published([["a:1"], *[nothing] * MISSES, nothing]) == [*[{"a:1"}] * MISSES, set(), set()]
    assert await published([["a:1"], nothing, ["a:1"], *[nothing] * (MISSES - 1)]) == [{"a:1"}] * (2 + MISSES)


async def test_a_lookup_that_hangs_is_not_begun_again_and_its_late_answer_counts() -> None:
    """Each has a thread of the loop's own few, which reads of files and all other lookups need, too."""
    begun, answers = 0, asyncio.Event()
    out: list[set[str]] = []

    async def lookup(host: str, port: int) -> Sequence[str]:
        nonlocal begun
        begun += 1
        await answers.wait()
        return ["a:1"]

    discovery = DnsDiscovery([Name("decode", "d", 1)], every_s=0.0, lookup_s=0.01, lookup=lookup)
    running = asyncio.create_task(discovery.run(lambda found: out.append(set(found))))
    while len(out) < 5:
        await asyncio.sleep(0)
    assert begun == 1 and out[-1] == set()
    answers.set()
    while out[-1] != {"a:1"}:
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_name_that_cannot_be_one_ends_nothing() -> None:
    with pytest.raises((OSError, NoSuchName, UnicodeError)):
        await addresses("a" * 300, 7)
    wrong = UnicodeEncodeError("idna", "a", 0, 1, "label too long")
    assert await published([["a:1"], wrong, ["b:1"]]) == [{"a:1"}, {"a:1"}, {"b:1"}]


async def test_real_names() -> None:
    assert await addresses("127.0.0.1", 7) == ["127.0.0.1:7"]
    assert "127.0.0.1:7" in await addresses("localhost", 7)
    assert await addresses("::1", 7) == ["[::1]:7"]


def test_a_selector_of_names() -> None:
    assert names_of("prefill=p.ns.svc:7000, decode=[::1]:7001") == (
        Name("prefill", "p.ns.svc", 7000),
        Name("decode", "::1", 7001),
    )
    for wrong in (
        "",
        "prefill",
        "prefill=p",
        "router=p:1",
        "decode=:1",
        "decode=d:0",
        "decode=d:65536",
        "decode=d:x",
        ",",
    ):
        with pytest.raises(ConfigError, match="ROLE=HOST:PORT"):
            names_of(wrong)


def test_each_discovery_is_found_by_its_name() -> None:
    assert type(discovery_of(RouterConfig())).__name__ == "Static"
    assert isinstance(discovery_of(RouterConfig(discovery="dns", selector="decode=d:1")), DnsDiscovery)
    assert type(discovery_of(RouterConfig(discovery="kubernetes"))).__name__ == "KubernetesDiscovery"
