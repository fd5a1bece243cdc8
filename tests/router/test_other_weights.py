"""Servers with another tokenizer than the router's, or other weights than those that an answer began with."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from disagg.messages.legs import Outcome
from disagg.router.requests import ChoiceDelta
from disagg.types.errors import NoCompatiblePeer, RequestFailed
from tests.router.conftest import DEADLINE_S, NORMAL, Cluster, request
from tests.router.fake_server import Script, answer, decode, prefill, silent, verdict


async def test_a_server_that_comes_back_with_another_tokenizer_gets_nothing_until_it_has_ours(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = {"config.json": "c", "tokenizer.json": "t"}
    hello = {name: {"files": theirs, "weights_hash": "w"} for name in ("p0", "d0", "d1")}
    await cluster.up({**NORMAL, "d1": decode}, hello=hello, files=theirs)
    await cluster.until(lambda: [cluster.state(name) for name in ("p0", "d0", "d1")] == ["ready"] * 3)
    d1 = cluster.servers["d1"]
    d1.hello = replace(d1.hello, files={**theirs, "tokenizer.json": "other"})
    d1.new_incarnation()
    await cluster.until(lambda: cluster.state("d1") == "mismatch")
    status = next(server for server in cluster.router.status()["servers"] if server["name"] == "d1")
    assert "tokenizer.json" in status["reason"] and "restart" in status["reason"]
    assert "d1" in caplog.text and "tokenizer.json is not what this router has loaded" in caplog.text
    assert cluster.metric("disagg_router_servers_mismatched") == 1
    before = len(d1.started)
    for _ in range(4):
        assert (await cluster.ask()).text[0] == answer(0, 8)
    assert len(d1.started) == before
    await cluster.servers["d0"].kill()
    d1.hello = replace(d1.hello, files=theirs)
    d1.new_incarnation()
    await cluster.until(lambda: cluster.state("d1") == "ready")
    assert (await cluster.ask()).text[0] == answer(0, 8)
    assert len(d1.started) == before + 1


async def test_servers_that_all_have_another_tokenizer_are_no_reason_to_wait(cluster: Cluster) -> None:
    hello = {name: {"files": {"config.json": "c", "tokenizer.json": "t"}} for name in ("p0", "d0")}
    await cluster.up(NORMAL, hello=hello, ready=False, files={"config.json": "other", "tokenizer.json": "t"})
    await cluster.until(lambda: cluster.state("d0") == "mismatch" and cluster.state("p0") == "mismatch")
    with pytest.raises(NoCompatiblePeer, match="configuration than this router"):
        await cluster.ask()


async def test_an_answer_goes_on_with_the_weights_it_began_with_or_says_that_it_cannot(cluster: Cluster) -> None:
    """The decode server is lost after the first token, and comes back, as the prefill server does, with other weights."""
    old, new = ({"weights_hash": name, "fingerprint": name} for name in ("old", "new"))
    router = await cluster.up({"p0": prefill, "d0": silent}, hello={"p0": old, "d0": old})
    updates = router.generate(request())
    await anext(updates)
    assert isinstance(await anext(updates), ChoiceDelta)
    for server in cluster.servers.values():
        server.script = {"p0": prefill, "d0": decode}[server.name]
        server.hello = replace(server.hello, pid=server.hello.pid + 1, **new)
        server.new_incarnation()
    with pytest.raises(RequestFailed, match="other weights"):
        async for _ in updates:
            pass
    await cluster.until(lambda: {server["weights"] for server in router.status()["servers"]} == {"new"})
    assert (await cluster.ask()).text[0] == answer(0, 8)  # what begins now is the new model's


async def test_an_answer_that_waits_for_its_weights_keeps_no_other_from_being_run_again(cluster: Cluster) -> None:
    old, new = ({"weights_hash": name, "fingerprint": name} for name in ("old", "new"))
    scripts: dict[str, Script] = {"p0": prefill, "d0": silent, "p1": prefill, "d1": verdict(Outcome.PEER_LOST)}
    router = await cluster.up(scripts, hello={"p0": old, "d0": old, "p1": new, "d1": new})
    waits = router.generate(request())
    await anext(waits)
    assert isinstance(await anext(waits), ChoiceDelta)
    assert cluster.servers["d0"].started
    await cluster.servers["d0"].kill()
    await cluster.until(lambda: cluster.state("d0") == "dead")
    got = await cluster.ask(timeout_s=DEADLINE_S)
    assert (got.text[0], got.finished.attempts) == (answer(0, 8), 2)
    await waits.aclose()


async def test_a_server_whose_process_came_back_with_other_weights_is_said_to_have(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """The new process cannot know what the one before it had."""

    def reason() -> str:
        return next(server["reason"] for server in cluster.router.status()["servers"] if server["name"] == "d0")

    hello = {"p0": {"weights_hash": "a" * 64}, "d0": {"weights_hash": "a" * 64}}
    await cluster.up(NORMAL, hello=hello)
    d0 = cluster.servers["d0"]
    await d0.kill()
    await cluster.until(lambda: cluster.state("d0") == "dead")
    d0.hello = replace(d0.hello, weights_hash="b" * 64, fingerprint="other")
    await d0.restart()
    await cluster.until(lambda: cluster.state("d0") == "no-peer")
    assert reason() == "its weights were aaaaaaaaaaaa before, and are bbbbbbbbbbbb now"
    assert "server d0 came back with another model" in caplog.text
    d0.break_streams()  # the same workers, heard again
    await cluster.until(lambda: len(d0.greetings) >= 3 and cluster.state("d0") == "no-peer")
    assert "before" in reason()
    await d0.kill()
    await cluster.until(lambda: cluster.state("d0") == "dead")
    d0.hello = replace(d0.hello, weights_hash="a" * 64, fingerprint=cluster.servers["p0"].hello.fingerprint)
    await d0.restart()
    await cluster.until(lambda: cluster.state("d0") == "ready")
    assert reason() == "", "it has what it had"
    assert "its weights were bbbbbbbbbbbb before, and are aaaaaaaaaaaa now" in caplog.text


async def test_what_is_said_of_other_weights_goes_with_the_next_workers_that_have_them(cluster: Cluster) -> None:
    await cluster.up(NORMAL, hello={"d0": {"weights_hash": "a" * 64}})
    d0 = cluster.servers["d0"]
    d0.hello = replace(d0.hello, weights_hash="b" * 64)
    d0.new_incarnation()

    def reasons() -> set[object]:
        return {server["reason"] for server in cluster.router.status()["servers"]}

    await cluster.until(lambda: "its weights were aaaaaaaaaaaa before, and are bbbbbbbbbbbb now" in reasons())
    d0.new_incarnation()
    await cluster.until(lambda: reasons() == {""})
