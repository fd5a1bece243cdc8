"""Frames, writes and notifications are lost, repeated, late or damaged; workers die and freeze: no answer changes.

So it is also while KV goes to the host and to a store that fails, and pools are so small that sequences give way. Every
answer is compared with what `transformers` says, every request is answered, nothing leaks, and every damaged piece is found
by its checksum. The same damage with checksums that notice nothing shows wrong tokens.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster import reference
from tests.cluster.campaign import total
from tests.cluster.cluster import Cluster
from tests.cluster.failing_store import FAULTS, failing_store
from tests.cluster.wire_faults.plan import COMMAND, FaultPlan, FrozenWrite, Rates
from tests.cluster.wire_faults.questions import Questions, ask, two_layers

CONCURRENCY = 48
FLAGS = ("--page-tokens", "4", "--chunk-tokens", "16", "--dtype", "float32", "--kv-memory", "4MiB")
FIVE_PERCENT = Rates(drop=0.05, duplicate=0.05, delay=0.05)
FIVE_PERCENT_AND_DAMAGE = Rates(drop=0.05, duplicate=0.05, delay=0.05, flip=0.01)

# Room for a few requests, each of which may come to want more when there is none left.
PARKING = ("--offload", "on", "--host-memory", "1MiB", "--kv-memory", "64KiB")
PARKING_SETS = ("engine.grant_headroom_tokens=0", "engine.lookahead_tokens=0", "offload.stride_tokens=16")

# One piece in a hundred is damaged, and with it an attempt is lost; workers die beside. With three attempts one request in
# some ten thousand would rightly fail.
ATTEMPTS = "router.max_attempts=8"

MAX_DAMAGED_ROUNDS = 12

IDLE_S = 1.0  # transfer.link_idle_s
LINK_BYTES = 2 * (4 << 20)  # transfer.link_segments of transfer.segment_bytes


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Questions:
    """Prompts of up to four chunks, each of which is a piece."""
    return two_layers(tmp_path_factory.mktemp("short"), prompts=32, shortest=1, longest=60, outputs=8)


@dataclass(frozen=True)
class Strike:
    """A worker dies, or stops for a while that nobody calls silence yet."""

    server: str
    frozen_s: float  # 0: it dies

    def at(self, cluster: Cluster) -> None:
        pid = cluster.server(self.server)["worker_pids"][0]
        if not self.frozen_s:
            cluster.kill(pid)
            return
        cluster.kill(pid, signal.SIGSTOP)
        time.sleep(self.frozen_s)
        cluster.kill(pid, signal.SIGCONT)


def strikes(seed: int, count: int, servers: Sequence[str]) -> list[Strike]:
    """Deaths and frozen workers by turns, of every server by turns."""
    rng = random.Random(seed)
    return [
        Strike(servers[number // 2 % len(servers)], 0.0 if number % 2 else rng.uniform(1.0, 4.0))
        for number in range(count)
    ]


def campaign(
    run_dir: Path,
    questions: Questions,
    flags: Sequence[str],
    requests: int,
    every: int,
    concurrency: int = CONCURRENCY,
    sets: Sequence[str] = (),
    look: Callable[[Cluster], None] = lambda cluster: None,
) -> None:
    """Half of the requests while the wire is bad, half while workers die and freeze too, one every `every` requests.

    look: at what was counted, before the first worker dies and at the end.
    """
    plan = FaultPlan(
        log_dir=str(run_dir / "faults"),
        seed=requests,
        frames=FIVE_PERCENT,
        writes=FIVE_PERCENT_AND_DAMAGE,
        notifications=FIVE_PERCENT,
    )
    model = ("--model", str(questions.model_dir))
    started = time.monotonic()
    with Cluster(run_dir, *model, *flags, sets=(ATTEMPTS, *sets), env=plan.environ(), cli=COMMAND) as cluster:
        first = requests // 2
        ask(cluster, questions, range(first), concurrency).check()
        while not plan.log.counts()["landing damaged checksum"] and first < 2 * requests:
            # So few pieces are damaged that none may have landed yet.
            ask(cluster, questions, range(first, first + every), concurrency).check()
            first += every
        cluster.check_adds_up()
        counts = plan.log.counts()
        print(f"a bad wire: {first} requests in {time.monotonic() - started:.0f} s; {dict(counts)}")
        damaged, failures = counts["landing damaged checksum"], total(cluster, "disagg_checksum_failures")
        assert failures == damaged > 0, f"{damaged} damaged pieces were verified, {failures:g} are counted"
        look(cluster)

        servers = [*cluster.servers("prefill"), *cluster.servers("decode")]
        for strike in strikes(requests, requests // 2 // every, servers):
            cluster.wait_healthy()
            serials = range(first, first + every)
            ask(cluster, questions, serials, concurrency, lambda strike=strike: strike.at(cluster)).check()
            first += every
        cluster.wait_healthy()
        cluster.check_adds_up()
        look(cluster)
        counts = plan.log.counts()
        print(f"all: {first} requests in {time.monotonic() - started:.0f} s; {dict(counts)}")
    for what in ("frame", "write", "notification"):
        for fault in ("drop", "duplicate", "delay"):
            assert counts[f"{what} {fault}"] > 0, f"no {what} met {fault}"
    assert counts["landing damaged taken"] == 0, "a damaged piece was taken"
    assert counts["landing intact checksum"] == 0, "an intact piece was refused"


def offloading_campaign(run_dir: Path, questions: Questions, pools: Sequence[str], requests: int, every: int) -> None:
    """The same with KV that goes to the host and to a store that fails, and pools in which sequences give way."""

    def look(cluster: Cluster) -> None:
        servers = [cluster.metrics(server["name"]) for server in cluster.status()["servers"]]
        gave_way, went_on = total(cluster, "disagg_preemptions"), sum(m["disagg_parked_seconds_count"] for m in servers)
        from_host = sum(m.get('disagg_tier_bytes_total{direction="in",tier="host"}', 0) for m in servers)
        published, failures = (total(cluster, f"disagg_store_{what}") for what in ("published_pages", "failures"))
        print(
            f"{gave_way:g} gave way, {went_on:g} went on, {from_host:g} bytes came from the host; {published:g} pages were "
            f"stored, and {failures:g} calls failed, while the store failed like this: {dict(store.turns)}"
        )
        # One that gives way may come to its end by the step that is under way.
        assert gave_way >= went_on > 0 < from_host and published > 0 < failures

    with failing_store() as store:
        flags = (*FLAGS, *PARKING, *store.flags, *pools)
        campaign(run_dir, questions, flags, requests, every, sets=PARKING_SETS, look=look)
        assert set(store.turns) == set(FAULTS) or requests < 1000, f"only {set(store.turns)} had a turn"


@pytest.mark.timeout(1800)
def test_no_answer_is_wrong_or_missing_on_a_bad_wire(tmp_path: Path, short: Questions) -> None:
    campaign(tmp_path, short, FLAGS, requests=150, every=25)


@pytest.mark.timeout(1800)
def test_no_answer_is_wrong_or_missing_on_a_bad_wire_with_parking_and_a_failing_store(
    tmp_path: Path, short: Questions
) -> None:
    offloading_campaign(tmp_path, short, (), requests=150, every=25)


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_no_answer_of_ten_thousand_is_wrong_or_missing_with_parking_and_a_failing_store(
    tmp_path: Path, short: Questions
) -> None:
    offloading_campaign(tmp_path, short, ("--prefill", "2", "--decode", "2"), requests=10_000, every=250)


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_no_answer_of_ten_thousand_is_wrong_or_missing_on_a_bad_wire(tmp_path: Path, short: Questions) -> None:
    campaign(tmp_path, short, (*FLAGS, "--prefill", "2", "--decode", "2"), requests=10_000, every=250)


@pytest.mark.slow
@pytest.mark.timeout(2 * 3600)
def test_no_answer_of_smollm2_is_wrong_or_missing_on_a_bad_wire(tmp_path: Path, smollm2: Path) -> None:
    answers = reference.load("boundary", smollm2)
    questions = Questions(smollm2, [answer.prompt for answer in answers], answers)
    campaign(tmp_path, questions, ("--chunk-tokens", "64"), requests=300, every=50, concurrency=16)


@pytest.mark.timeout(1200)
def test_without_checksums_the_same_damage_makes_answers_wrong(tmp_path: Path, short: Questions) -> None:
    """Most single bits change no token, so every write is damaged, and every prompt is sent anew until an answer is wrong."""
    plan = FaultPlan(log_dir=str(tmp_path / "faults"), writes=Rates(flip=1.0), ignore_checksums=True)
    model = ("--model", str(short.model_dir))
    sets = (ATTEMPTS, "engine.prefix_cache=off")
    with Cluster(tmp_path, *model, *FLAGS, sets=sets, env=plan.environ(), cli=COMMAND) as cluster:
        for _ in range(MAX_DAMAGED_ROUNDS):
            outcome = ask(cluster, short, range(2 * len(short.prompts)), CONCURRENCY)
            assert not outcome.failed
            if outcome.wrong:
                break
        assert total(cluster, "disagg_checksum_failures") == 0
    assert plan.log.counts()["landing damaged taken"] > 0
    assert outcome.wrong


# ---- a worker stops in the middle of a write


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Questions:
    """Prompts of one chunk or two, in pieces of some 200 KiB."""
    return two_layers(tmp_path_factory.mktemp("long"), prompts=12, shortest=400, longest=700, outputs=24)


class Trio:
    """Two prefill servers and a decode server that gives up after GIVE_UP_S."""

    GIVE_UP_S = 3.0

    def __init__(self, cluster: Cluster, plan: FaultPlan, questions: Questions) -> None:
        self.cluster = cluster
        self.plan = plan
        self.questions = questions

    @property
    def frozen_pid(self) -> int:
        return self.cluster.server("prefill-0")["worker_pids"][0]

    def arena(self, state: str) -> float:
        return self.cluster.metrics("decode-0")[f'disagg_arena_bytes{{state="{state}"}}']

    def lost(self, reason: str) -> float:
        return self.cluster.metrics("decode-0").get(f'disagg_transfer_failures_total{{reason="{reason}"}}', 0.0)

    def ask_the_other(self, asked: list[Future[None]], pool: ThreadPoolExecutor, first: int) -> None:
        """Asks, until prefill-1 has sent more pieces: what waits for prefill-0 is its own queue. It counts from before they are
        asked: all of them may be sent before the first look."""

        def sent() -> float:
            return self.cluster.metrics("prefill-1")['disagg_transfer_pieces_total{direction="sent"}']

        before = sent()
        asked.append(pool.submit(self.ask, first))
        self.cluster.wait(lambda: sent() >= before + 4, 120, "pieces of another link")

    def ask(self, first: int) -> None:
        serials = range(first, first + len(self.questions.prompts))
        ask(self.cluster, self.questions, serials, len(serials)).check()

    def ask_until(self, frozen: FrozenWrite, pool: ThreadPoolExecutor, first: int) -> list[Future[None]]:
        """Again, where all of it was written by the other prefill server: this one failed just before, and routers know."""
        asked: list[Future[None]] = []

        def in_a_write() -> bool:
            if all(each.done() for each in asked):
                asked.append(pool.submit(self.ask, first + 100 * len(asked)))
            return frozen.frozen

        self.cluster.wait(in_a_write, 120, "a worker in the middle of a write")
        return asked


@pytest.fixture(scope="module", params=["posix,cma,tcp", pytest.param("tcp", marks=pytest.mark.slow)])
def trio(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, long: Questions) -> Iterator[Trio]:
    run_dir = tmp_path_factory.mktemp("trio")
    plan = FaultPlan(log_dir=str(run_dir / "faults"))
    flags = ("--model", str(long.model_dir), "--prefill", "2", "--chunk-tokens", "512", "--kv-memory", "16MiB")
    sets = (
        f"transfer.ucx_tls={request.param}",
        f"transfer.link_lease_s={Trio.GIVE_UP_S:g}",
        f"transfer.progress_s={Trio.GIVE_UP_S:g}",
        "worker.silent_s=120",  # prefill's own server lets it freeze
    )
    with Cluster(run_dir, *flags, sets=sets, env=plan.environ(), cli=COMMAND) as cluster:
        yield Trio(cluster, plan, long)


@pytest.mark.timeout(1200)
def test_what_a_write_may_still_reach_comes_back_when_the_writer_has_answered(trio: Trio) -> None:
    cluster = trio.cluster
    cluster.wait_healthy()
    given_up = trio.lost("peer_lost")
    frozen = trio.plan.freeze_next_write("prefill-0")
    with ThreadPoolExecutor(2) as pool:
        asked = trio.ask_until(frozen, pool, 1000)
        pid = trio.frozen_pid
        cluster.wait(lambda: trio.lost("peer_lost") > given_up, 120, "a receiver that has given up")
        trio.ask_the_other(asked, pool, 2000)
        time.sleep(2 * IDLE_S)
        assert trio.arena("leased") > 0, "segments came back while half a write was to come"
        assert trio.arena("quarantined") == 0, "the link is up: nobody's fate is unknown"
        cluster.kill(pid, signal.SIGCONT)
        cluster.wait(lambda: frozen.resumed, 120, "the other half of the write")
        for each in asked:
            each.result()
    assert trio.frozen_pid == pid
    cluster.check_adds_up()


@pytest.mark.timeout(1200)
def test_only_segments_of_a_writer_of_unknown_fate_are_quarantined_until_it_is_quiet_or_gone(trio: Trio) -> None:
    cluster = trio.cluster
    cluster.wait_healthy()
    frozen = trio.plan.freeze_next_write("prefill-0")
    with ThreadPoolExecutor(2) as pool:
        asked = trio.ask_until(frozen, pool, 3000)
        worker, server = trio.frozen_pid, cluster.server("prefill-0")["pid"]
        cluster.kill(server, signal.SIGSTOP)
        cluster.wait(lambda: trio.arena("quarantined"), 120, "a lost link")
        cluster.kill(server, signal.SIGCONT)  # or it would be taken for hung, and killed with its worker
        trio.ask_the_other(asked, pool, 4000)
        assert trio.arena("quarantined") == LINK_BYTES
        cluster.kill(worker, signal.SIGCONT)
        cluster.wait(lambda: frozen.resumed, 120, "the other half of the write")
        for each in asked:
            each.result()
    for serial in range(5000, 5010):  # the two servers speak to each other again
        trio.ask(serial)
    if trio.arena("quarantined"):  # another write had failed meanwhile, and nobody can tell what of it may yet land
        cluster.kill(worker)
        cluster.wait_healthy()
    cluster.check_adds_up()
