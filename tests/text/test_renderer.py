"""A template runs in a process of its own: whatever it does costs its own request, and no other."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from disagg.text import renderer as module
from disagg.text.chat import TemplateSource
from disagg.text.render_messages import packed
from disagg.text.renderer import RenderBounds, Renderer
from disagg.types.errors import ConfigError, DeadlineExceeded, DisaggError, InvalidRequest, Overloaded, Unavailable

HELLO = packed([{"role": "user", "content": "hello"}])
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
MOST_CHARS = 100_000
# One that does what its first message says, so that one renderer can be asked for good and bad.
OBEYS = """{% set said = messages[0].content %}
{% if said == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
{% elif said == 'double' %}{% set ns = namespace(x='x') %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}
{% elif said == 'add' %}{% set ns = namespace(x='x') %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}
{% elif said == 'center' %}{{ 'x' | center(10000000000) }}
{% elif said == 'format' %}{{ '%10000000000d' | format(1) }}
{% elif said == 'percent' %}{{ '%10000000000d' % 1 }}
{% elif said == 'method' %}{{ '{:10000000000}'.format(1) }}
{% elif said == 'just' %}{{ 'x'.ljust(10000000000) }}
{% elif said == 'indent' %}{{ 'x\ny' | indent(10000000000) }}
{% elif said == 'replace' %}{{ (('x' * 100000).replace('x', 'y' * 100000)) }}
{% elif said == 'json' %}{{ [[[1]]] | tojson(indent=2000000000) }}
{% elif said == 'deep' %}{% macro m(x) %}{{ m([x]) }}{% endmacro %}{{ m(1) }}
{% elif said == 'long' %}{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}
{% elif said == 'raise' %}{{ raise_exception('z' * 1000000) }}
{% elif said == 'number' %}{{ raise_exception(10 ** 10000) }}
{% elif said == 'halves' %}{{ '\\ud800' }}
{% else %}{{ said }}{% endif %}"""
TOO_MUCH = "more than 256 MiB of memory"
MISDEEDS = {
    "loop": "more than 1 s",
    "double": TOO_MUCH,
    "add": TOO_MUCH,
    "center": TOO_MUCH,
    "format": TOO_MUCH,
    "percent": TOO_MUCH,
    "method": TOO_MUCH,
    "just": TOO_MUCH,
    "indent": TOO_MUCH,
    "replace": TOO_MUCH,
    "json": TOO_MUCH,
    "deep": "recursion",
    "long": "more than 100000 characters",
    "raise": "z{400}",
    "number": "refuses the messages: ",
    "halves": "surrogate",
}


def said(content: str) -> bytes:
    return packed([{"role": "user", "content": content}])


def resident_bytes(pid: int | str = "self") -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def is_there(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.01)


@pytest.fixture
async def obeying() -> AsyncIterator[Renderer]:
    renderer = await Renderer.start(TemplateSource(OBEYS), RenderBounds(deadline_s=1.0))
    yield renderer
    await renderer.close()


async def test_a_chat_is_rendered_with_the_special_tokens() -> None:
    renderer = await Renderer.start(TemplateSource("{{ bos_token }}" + PLAIN, {"bos_token": "<日>"}))
    pid = renderer.pid
    assert pid is not None
    assert await renderer.render(HELLO, MOST_CHARS) == "<日>user: hello\n"
    await renderer.close()
    assert not is_there(pid)
    with pytest.raises(Unavailable):
        await renderer.render(HELLO, MOST_CHARS)


# The short part has one of each way to be ended: by time, by memory, by the interpreter, by length, by its own words.
SHORT_LIST = ("loop", "center", "deep", "long", "raise", "halves")


@pytest.mark.parametrize(
    "misdeed", [pytest.param(name, marks=() if name in SHORT_LIST else pytest.mark.long) for name in MISDEEDS]
)
async def test_a_template_that_takes_too_much_is_ended_and_the_next_chat_is_rendered(misdeed: str) -> None:
    # What takes too much of something else gets there in a second only where nobody else has the processors.
    bounds = RenderBounds(deadline_s=1.0 if misdeed == "loop" else 60.0)
    renderer = await Renderer.start(TemplateSource(OBEYS), bounds)
    before = resident_bytes()
    with pytest.raises(InvalidRequest, match=MISDEEDS[misdeed]) as caught:
        await renderer.render(said(misdeed), MOST_CHARS)
    assert caught.value.param == "messages"
    assert len(str(caught.value)) < 600
    assert resident_bytes() - before < 64 << 20
    assert (await renderer.render(said("well"), MOST_CHARS)).strip() == "well"
    await renderer.close()


async def test_a_text_may_be_as_long_as_its_limit(obeying: Renderer) -> None:
    text = "日" * 50_000
    room = len(await obeying.render(said(text), MOST_CHARS))
    assert len(await obeying.render(said(text), room)) == room
    with pytest.raises(InvalidRequest, match=f"more than {room - 1} characters"):
        await obeying.render(said(text), room - 1)


async def test_as_many_messages_as_a_chat_may_have_are_rendered() -> None:
    renderer = await Renderer.start(TemplateSource(PLAIN))
    text = await renderer.render(packed([{"role": "user", "content": "é"}] * 4096), MOST_CHARS)
    await renderer.close()
    assert text == "user: é\n" * 4096


async def test_who_waits_behind_an_endless_rendering_is_served_by_a_new_process(
    obeying: Renderer, caplog: pytest.LogCaptureFixture
) -> None:
    first = obeying.pid
    endless, other = await asyncio.gather(
        obeying.render(said("loop"), MOST_CHARS), obeying.render(said("other"), MOST_CHARS), return_exceptions=True
    )
    assert isinstance(endless, InvalidRequest)
    assert isinstance(other, str) and other.strip() == "other"
    assert obeying.pid != first
    assert [record.levelname for record in caplog.records if "more than 1 s" in record.message] == ["WARNING"]


async def test_warnings_do_not_come_faster_than_every_few_seconds(
    obeying: Renderer, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        with pytest.raises(InvalidRequest):
            await obeying.render(said("center"), MOST_CHARS)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
async def test_a_process_that_ends_while_it_renders_costs_that_chat_only(obeying: Renderer, number: int) -> None:
    rendering = asyncio.create_task(obeying.render(said("loop"), MOST_CHARS))
    waiting = asyncio.create_task(obeying.render(said("other"), MOST_CHARS))
    await asyncio.sleep(0.2)
    assert obeying.pid is not None
    os.kill(obeying.pid, number)
    with pytest.raises(InvalidRequest, match=f"was killed by signal {number:d}") as caught:
        await rendering
    assert caught.value.param == "messages"
    assert (await waiting).strip() == "other"


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGKILL, DisaggError), (signal.SIGSEGV, ConfigError)])
async def test_only_a_process_that_crashes_while_it_compiles_is_the_templates_fault(
    monkeypatch: pytest.MonkeyPatch, number: int, kind: type[DisaggError]
) -> None:
    spawn = module._spawned

    def doomed() -> Any:
        process, ours = spawn()
        os.kill(process.pid, number)
        return process, ours

    monkeypatch.setattr(module, "_spawned", doomed)
    with pytest.raises(DisaggError, match=f"was killed by signal {number:d}") as caught:
        await Renderer.start(TemplateSource(PLAIN))
    assert type(caught.value) is kind


async def test_a_process_that_ended_while_nothing_was_rendered_costs_nobody_anything(
    obeying: Renderer, caplog: pytest.LogCaptureFixture
) -> None:
    pid = obeying.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not is_there(pid))
    assert (await obeying.render(said("well"), MOST_CHARS)).strip() == "well"
    assert "has ended: was killed by signal 9" in caplog.text


async def test_answers_of_chats_that_nobody_waits_for_go_to_nobody_else(obeying: Renderer) -> None:
    async def ask(at: int) -> str:
        return await obeying.render(said(f"{at}" * 2000), MOST_CHARS)

    for cancelled in range(8):
        tasks = [asyncio.create_task(ask(at)) for at in range(8)]
        for _ in range(cancelled):
            await asyncio.sleep(0)
        for task in tasks[:cancelled]:
            task.cancel()
        for at, answer in enumerate(await asyncio.gather(*tasks, return_exceptions=True)):
            if at < cancelled and isinstance(answer, asyncio.CancelledError):
                continue  # else it was answered before it could be cancelled
            assert isinstance(answer, str) and answer.strip() == f"{at}" * 2000


async def test_what_waits_has_a_bound_and_a_deadline() -> None:
    renderer = await Renderer.start(TemplateSource(OBEYS), RenderBounds(deadline_s=2.0, wait_s=0.3, max_waiting=2))
    tasks = [asyncio.create_task(renderer.render(said("loop"), MOST_CHARS))]
    await asyncio.sleep(0.05)  # it is being rendered, and waits no more
    tasks += [asyncio.create_task(renderer.render(HELLO, MOST_CHARS)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="2 chats wait to be rendered"):
        await renderer.render(HELLO, MOST_CHARS)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(each) for each in ended] == [DeadlineExceeded] * 3
    await renderer.close()


async def test_one_tenants_chats_do_not_stand_before_anothers_one(obeying: Renderer) -> None:
    order: list[str] = []

    async def ask(tenant: str) -> None:
        await obeying.render(said("x" * 20_000), MOST_CHARS, tenant)
        order.append(tenant)

    tasks = [asyncio.create_task(ask("a")) for _ in range(50)]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(ask("b")))
    await asyncio.gather(*tasks)
    assert order.index("b") <= 3, "one under way, one turn of the other's"


async def test_a_queue_that_one_tenant_has_filled_takes_anothers_chat() -> None:
    renderer = await Renderer.start(TemplateSource(OBEYS), RenderBounds(deadline_s=30.0, max_waiting=3))
    tasks = [asyncio.create_task(renderer.render(said("loop"), MOST_CHARS, "a"))]
    await asyncio.sleep(0.05)
    tasks += [asyncio.create_task(renderer.render(HELLO, MOST_CHARS, "a")) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await renderer.render(HELLO, MOST_CHARS, "a")
    tasks.append(asyncio.create_task(renderer.render(HELLO, MOST_CHARS, "b")))
    await asyncio.sleep(0.05)
    assert [task.done() for task in tasks] == [False, False, False, True, False], "the youngest of who has most"
    assert isinstance(tasks[3].exception(), Overloaded)
    await renderer.close()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_closing_ends_what_is_rendered_and_what_waits(obeying: Renderer) -> None:
    tasks = [asyncio.create_task(obeying.render(said("loop"), MOST_CHARS)) for _ in range(2)]
    await asyncio.sleep(0.1)
    await obeying.close()
    assert {type(each) for each in await asyncio.gather(*tasks, return_exceptions=True)} == {Unavailable}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if %}", "cannot be compiled: "),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "cannot be compiled: "),
        ("{{ '\ud800' }}", "surrogate"),
    ],
)
async def test_a_template_that_cannot_be_compiled_is_the_operators_mistake(source: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        await Renderer.start(TemplateSource(source))


async def test_compiling_takes_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disagg.text.renderer.START_S", 1.0)
    with pytest.raises(ConfigError, match="it takes more than 1 s"):
        await Renderer.start(TemplateSource("{% if x %}{{ x.y[1] | trim }}{% endif %}" * 200_000))


ROUTER = """
import asyncio, sys
from disagg.text.chat import TemplateSource
from disagg.text.render_messages import packed
from disagg.text.renderer import Renderer

async def main():
    renderer = await Renderer.start(TemplateSource(sys.argv[1]))
    print(renderer.pid, flush=True)
    await renderer.render(packed([{"role": "user", "content": "loop"}]), 1000)

asyncio.run(main())
"""


def test_the_process_dies_with_its_router_however_that_ends_and_whatever_it_renders() -> None:
    router = subprocess.Popen([sys.executable, "-c", ROUTER, OBEYS], stdout=subprocess.PIPE, text=True)
    assert router.stdout is not None
    pid = int(router.stdout.readline())
    router.kill()
    router.wait()
    router.stdout.close()
    asyncio.run(until(lambda: not is_there(pid)))


def limits_of(pid: int | None) -> str:
    return Path(f"/proc/{pid}/limits").read_text()


async def test_the_process_has_few_rights_and_little_memory(obeying: Renderer) -> None:
    limits: dict[str, Any] = {}
    for line in limits_of(obeying.pid).splitlines()[1:]:
        limits[line[:26].strip()] = line[26:].split()[:2]
    assert limits["Max core file size"] == ["0", "0"]
    assert int(limits["Max open files"][0]) <= 16
    assert int(limits["Max address space"][0]) < 512 << 20
    assert resident_bytes(obeying.pid or 0) < 64 << 20
