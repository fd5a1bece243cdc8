"""Discovery by an API that fails in every way: what is published comes to be what is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from disagg.discovery.found import Found
from disagg.discovery.kubernetes import KubernetesDiscovery
from disagg.discovery.pods import found_in
from disagg.discovery.reflector import Event, Pod, Reflector, Timing
from disagg.types.errors import ConfigError
from tests.discovery.fake_api import KEPT_EVENTS, NAMESPACE, FakeApi, pod

TIMING = Timing(list_s=0.5, watch_s=1.0, spare_s=0.3, relist_s=3.0, first_backoff_s=0.02, max_backoff_s=0.1)
WITHIN_S = 30.0


class Watched:
    """A discovery that runs, and what it has published."""

    def __init__(self, api: FakeApi, directory: Path, timing: Timing = TIMING, selector: str = "app=x") -> None:
        self.found: Mapping[str, Found] = {}
        self.published = 0
        self.discovery = KubernetesDiscovery(NAMESPACE, selector, api.kubeconfig(directory), timing)
        self.task = asyncio.create_task(self.discovery.run(self.publish))

    def publish(self, found: Mapping[str, Found]) -> None:
        self.found = dict(found)
        self.published += 1

    async def until(self, names: set[str], within_s: float = WITHIN_S) -> None:
        async with asyncio.timeout(within_s):
            while {name for name, each in self.found.items() if not each.held} != names:
                assert not self.task.done(), self.task
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    fake = FakeApi()
    await fake.start()
    yield fake
    await fake.close()


async def test_pods_come_change_and_go(api: FakeApi, tmp_path: Path) -> None:
    for number in range(5):  # more than one page
        api.put(pod(f"d{number}"))
    api.put(pod("elsewhere", app="y"))
    # Neither a watch nor the time to the next list ends before this test, however late it is.
    watched = Watched(api, tmp_path, Timing(first_backoff_s=0.02, max_backoff_s=0.1))
    try:
        await watched.until({f"d{number}" for number in range(5)})
        api.delete("d1")
        api.put(pod("d2", ready=False))
        api.put(pod("p", "prefill"))
        await watched.until({"d0", "d3", "d4", "p"})
        assert watched.found["d2"].held and "d1" not in watched.found
        assert api.calls.count("watch") == 1, "all of it by one watch"
    finally:
        await watched.close()


@pytest.mark.parametrize("fault", [403, 500, 503, 410, "hang", "drop", "nonsense", "silent"])
@pytest.mark.parametrize("calls", [1, 4])
async def test_a_call_that_fails_costs_time_and_nothing_that_was_known(
    api: FakeApi, tmp_path: Path, fault: int | str, calls: int
) -> None:
    api.put(pod("d0"))
    watched = Watched(api, tmp_path)
    try:
        await watched.until({"d0"})
        api.faults += [fault] * calls
        await asyncio.sleep(0.3)
        api.put(pod("d1"))
        seen = []
        async with asyncio.timeout(WITHIN_S):
            while set(watched.found) != {"d0", "d1"}:
                seen.append(set(watched.found))
                await asyncio.sleep(0.01)
        assert all("d0" in each for each in seen)
    finally:
        await watched.close()


async def test_a_pod_that_can_be_no_server_is_said_once_and_until_it_is_mended(
    api: FakeApi, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    api.put(pod("odd", role="admin"))
    api.put(pod("d0"))
    watched = Watched(api, tmp_path)
    try:
        await watched.until({"d0"})
        api.put(pod("far", port=999999))
        api.put(pod("d1"))
        await watched.until({"d0", "d1"})
        lists = api.calls.count("list")
        async with asyncio.timeout(WITHIN_S):  # it is listed again, and not said again
            while api.calls.count("list") < lists + 2:
                await asyncio.sleep(0.01)
        # Not what is said of an API that a busy machine lets wait.
        said = [record.message for record in caplog.records if record.message.startswith("no server: ")]
        assert len(said) == 2 and "no server: pod 'odd': its label disagg/role is 'admin'" in said[0]
        assert "pod 'far': the containerPort of its server is 999999" in said[1]
        assert set(watched.discovery.faults()) == {"'odd'", "'far'"}
        api.put(pod("odd"))
        api.delete("far")
        await watched.until({"d0", "d1", "odd"})
        async with asyncio.timeout(WITHIN_S):
            while watched.discovery.faults():
                await asyncio.sleep(0.01)
    finally:
        await watched.close()


async def test_of_two_pods_with_one_name_the_first_counts_and_that_is_said(
    api: FakeApi, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = pod("d0"), pod("d0", ip="10.0.0.2")
    second["metadata"]["uid"] = "uid-of-another"
    api.pods = {"d0": first, "d0 again": second}
    watched = Watched(api, tmp_path)
    try:
        await watched.until({"d0"})
        assert watched.found["d0"].uid == "uid-d0"
        [said] = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert "pod 'd0': the list has it twice, with the uids 'uid-d0' and 'uid-of-another'" in said
    finally:
        await watched.close()


async def test_a_deletion_that_no_watch_says_is_found_by_the_next_list(api: FakeApi, tmp_path: Path) -> None:
    api.put(pod("d0"))
    api.put(pod("d1"))
    watched = Watched(api, tmp_path)
    try:
        await watched.until({"d0", "d1"})
        api.delete("d0", said=False)
        await watched.until({"d1"})
    finally:
        await watched.close()


async def test_a_version_that_is_too_old_is_a_reason_to_list_at_once(api: FakeApi, tmp_path: Path) -> None:
    """Whatever pauses there are else, and though the next list is far away."""
    for number in range(KEPT_EVENTS + 10):
        api.put(pod(f"d{number % 7}"))
    slow = Timing(watch_s=1.0, relist_s=1000.0, first_backoff_s=100.0, max_backoff_s=100.0)
    watched = Watched(api, tmp_path, slow)
    everyone = {f"d{number}" for number in range(7)}
    try:
        await watched.until(everyone)
        api.faults.append(410)
        api.delete("d3", said=False)
        await watched.until(everyone - {"d3"}, within_s=4.0)
    finally:
        await watched.close()


@pytest.mark.parametrize("how", ["end", "told", "told 410"])
async def test_a_server_that_ends_every_watch_at_once_is_asked_ever_more_seldom(
    api: FakeApi, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And what it says nevertheless is heard."""
    api.put(pod("d0"))
    api.always["watch"] = how
    slow = Timing(watch_s=60.0, relist_s=1000.0, first_backoff_s=0.02, max_backoff_s=100.0)
    watched = Watched(api, tmp_path, slow)
    try:
        await watched.until({"d0"})
        async with asyncio.timeout(WITHIN_S):
            while api.calls.count("watch") < 3:
                await asyncio.sleep(0.01)
        await asyncio.sleep(1.0)
        assert api.calls.count("watch") < 12, "0.02 s doubled each time"
        said = [record.message for record in caplog.records if "ends a watch at once" in record.message]
        assert len(said) == (how == "end")
        del api.always["watch"]
        api.put(pod("d1"))
        await watched.until({"d0", "d1"})
    finally:
        await watched.close()


@pytest.mark.parametrize(("how", "why"), [("again", "has no end"), ("more", "more than 1000 pages")])
async def test_a_list_without_end_is_given_up_with_one_warning(
    api: FakeApi, tmp_path: Path, how: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    api.put(pod("d0"))
    api.always["list"] = how
    slow = Timing(first_backoff_s=0.02, max_backoff_s=100.0)
    watched = Watched(api, tmp_path, slow)
    try:
        async with asyncio.timeout(WITHIN_S):
            while not any(why in record.message for record in caplog.records):
                await asyncio.sleep(0.01)
        if how == "again":
            await asyncio.sleep(1.0)
            assert api.calls.count("list") < 20, "two pages, and 0.02 s doubled each time"
        assert sum("Kubernetes API" in record.message for record in caplog.records) == 1
        assert not watched.found
        del api.always["list"]
        await watched.until({"d0"})
    finally:
        await watched.close()


async def test_all_pages_of_a_list_share_one_bound_of_bytes(
    api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("disagg.discovery.kubernetes.MAX_LIST_BYTES", 2000)  # of five pages, each less
    for number in range(9):
        api.put(pod(f"d{number}"))
    watched = Watched(api, tmp_path)
    try:
        async with asyncio.timeout(WITHIN_S):
            while not any("a list, or a pod, of more than" in record.message for record in caplog.records):
                await asyncio.sleep(0.01)
        assert not watched.found
        for number in range(2, 9):
            api.delete(f"d{number}")
        await watched.until({"d0", "d1"})
    finally:
        await watched.close()


async def test_whether_a_pod_is_gone_is_asked_of_the_api(api: FakeApi, tmp_path: Path) -> None:
    api.put(pod("d0"))
    watched = Watched(api, tmp_path)
    try:
        await watched.until({"d0"})
        assert not await watched.discovery.gone(f"{NAMESPACE}/d0/uid-d0")
        assert await watched.discovery.gone(f"{NAMESPACE}/d0/uid-of-before")
        assert await watched.discovery.gone(f"{NAMESPACE}/d9/uid-d9")
        for wrong in ("", "d9", "other/d9/uid-d9", f"{NAMESPACE}/d9", f"{NAMESPACE}//uid-d9"):
            assert not await watched.discovery.gone(wrong), wrong
        for fault in (403, 500, "drop", "nonsense"):
            api.get_faults.append(fault)
            assert not await watched.discovery.gone(f"{NAMESPACE}/d9/uid-d9"), fault
    finally:
        await watched.close()
    assert not await watched.discovery.gone(f"{NAMESPACE}/d9/uid-d9"), "nothing is known when nobody can be asked"


async def test_what_waiting_cannot_mend_is_said_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        await KubernetesDiscovery(NAMESPACE, "", str(tmp_path / "nowhere")).run(lambda found: None)
    (tmp_path / "bad").write_text("]")
    with pytest.raises(ConfigError, match="bad"):
        await KubernetesDiscovery(NAMESPACE, "", str(tmp_path / "bad")).run(lambda found: None)
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="in no pod with a service account, and has no kubeconfig"):
        await KubernetesDiscovery("", "").run(lambda found: None)


async def test_what_kubectl_would_find_is_found(api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that KUBECONFIG names, and the namespace of its context."""
    file = api.kubeconfig(tmp_path, namespace=NAMESPACE)
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", file)
    api.put(pod("d0"))
    found: dict[str, Found] = {}
    running = asyncio.create_task(KubernetesDiscovery("", "app=x").run(found.update))
    try:
        async with asyncio.timeout(WITHIN_S):
            while set(found) != {"d0"}:
                assert not running.done(), running
                await asyncio.sleep(0.01)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 5), st.booleans()),
        st.tuples(st.just("delete"), st.integers(0, 5), st.booleans()),
        st.tuples(
            st.just("fault"), st.sampled_from([403, 410, 500, 503, "drop", "nonsense", "silent", "hang"]), st.none()
        ),
        st.tuples(st.just("wait"), st.sampled_from([0.0, 0.02, 0.2]), st.none()),
    ),
    max_size=25,
)


@pytest.mark.long
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(steps=actions)
def test_whatever_happens_what_is_found_comes_to_be_what_is_there(
    tmp_path: Path, steps: list[tuple[str, object, object]]
) -> None:
    async def run() -> None:
        api = FakeApi()
        await api.start()
        watched = Watched(api, tmp_path)
        try:
            for kind, what, how in steps:
                if kind == "put":
                    api.put(pod(f"d{what}", ready=bool(how)))
                elif kind == "delete" and f"d{what}" in api.pods:
                    api.delete(f"d{what}", said=bool(how))
                elif kind == "fault":
                    assert isinstance(what, int | str)
                    api.faults.append(what)
                elif kind == "wait":
                    assert isinstance(what, float)
                    await asyncio.sleep(what)
            expected = {name: found_in(each) for name, each in api.pods.items()}
            async with asyncio.timeout(30.0):
                while watched.found != expected or not watched.published:
                    await asyncio.sleep(0.01)
        finally:
            await watched.close()
            await api.close()

    asyncio.run(run())


async def test_an_error_that_nobody_thought_of_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Such as that of a token which the client's library cannot refresh, or of a reader of what is published."""
    lists = 0
    published: list[set[str]] = []

    class Odd:
        async def list(self) -> tuple[list[Pod], str]:
            nonlocal lists
            lists += 1
            if lists == 1:
                raise KeyError("token")
            return [pod("d0")], "1"

        async def watch(self, version: str, timeout_s: float) -> AsyncIterator[Event]:
            if lists == 2:
                yield Event("ADDED", pod("d1"))
            await asyncio.Event().wait()

    def publish(found: Mapping[str, Found]) -> None:
        if "d1" in found:
            raise RuntimeError("odd")
        published.append(set(found))

    reflector = Reflector(Odd(), publish, TIMING)
    running = asyncio.create_task(reflector.run())
    async with asyncio.timeout(WITHIN_S):
        while lists < 3 or len(published) < 2:
            await asyncio.sleep(0.01)
    assert published == [{"d0"}, {"d0"}] and not running.done()
    assert sum("what should not happen" in record.message for record in caplog.records) == 2
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
