"""A whole cluster serving on GPUs, seen from a request's timeline: `python -m bench.gpu_cluster`.

`disagg up` with one prefill and one decode server, each on GPUs of its own, and a model with Llama-3.1-8B's attention
(32 layers, 8 KV heads of 128 dims, hidden 4096, bfloat16) and random weights, made here. It measures

    first contact   the first request to a decode server that has just started, beside later ones: time to the first token
                    (of prefill) and to the second (the first that decode computes), with the transfer's parts
    the tail        of a long prompt that prefill computes in chunks: how long after the first token was there the transfer
                    ended, how much of the KV was still to land then, and what passed meanwhile

Times are those of the servers' own timelines, on one host and one clock; medians over requests that share no prefix.
`--device cpu` with a small shape runs the same on a CPU, to try it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from disagg.cli.timeline import timeline_table
from disagg.messages.legs import TimelineEvent
from tests.cluster.cluster import Cluster

MIB = 1 << 20
PAGE = 4096  # what transfer sizes are multiples of
VOCAB = 512  # of the tokenizer and the model that are made, by default: a large one is as much to read as two layers
FIRST_ID = 3
TIMELINE_S = 10.0
READY_S = 180.0
CLIENT = httpx.Client(timeout=600, trust_env=False, verify=False)  # one for all: to make one takes longer than to ask


class Asked(Struct, frozen=True):
    """One request. Seconds after it was sent until its first and second token, as its client saw them."""

    events: tuple[TimelineEvent, ...]
    first_token_s: float
    second_token_s: float


class Parts(Struct, frozen=True):
    """Where one request's time went, in seconds. Of what comes after the first token, negative is before it.

    waited: until prefill began its first chunk. prefill: from there to the first token. granted, first_piece: after decode
    had heard of the request. landed: after the first token, the end of the last piece's scatter. transferred: the end of the
    transfer as the decode server saw it. pieces, late_pieces: rank slices that landed, and of them after the first token.
    """

    waited: float
    prefill: float
    chunks: int
    granted: float
    first_piece: float
    landed: float
    transferred: float
    pieces: int
    late_pieces: int


def parts_of(events: Sequence[TimelineEvent]) -> Parts:
    """Raises ValueError if the timeline lacks what every request has whose KV was transferred."""
    prefill = _named(events, "prefill-")
    decode = _named(events, "decode-")
    chunks, pieces = prefill.get("chunk", []), decode.get("piece", [])
    lacking = [name for name in ("chunk", "first_token") if name not in prefill]
    lacking += [name for name in ("queued", "grant", "piece", "transfer") if name not in decode]
    if lacking:
        raise ValueError(f"the timeline has no {', '.join(lacking)}")
    sent_s = min(event.start_unix_s for event in events)
    began_s = min(event.start_unix_s for event in chunks)
    first_token_s = prefill["first_token"][0].end_unix_s
    heard_s = decode["queued"][0].start_unix_s
    return Parts(
        waited=began_s - sent_s,
        prefill=first_token_s - began_s,
        chunks=len(chunks),
        granted=decode["grant"][0].end_unix_s - heard_s,
        first_piece=min(event.end_unix_s for event in pieces) - heard_s,
        landed=max(event.end_unix_s for event in pieces) - first_token_s,
        transferred=decode["transfer"][0].end_unix_s - first_token_s,
        pieces=len(pieces),
        late_pieces=sum(event.end_unix_s > first_token_s for event in pieces),
    )


def _named(events: Sequence[TimelineEvent], server: str) -> dict[str, list[TimelineEvent]]:
    """Those of one role's servers, by their name without the server's."""
    found: dict[str, list[TimelineEvent]] = {}
    for event in events:
        if event.name.startswith(server):
            found.setdefault(event.name.partition("/")[2], []).append(event)
    return found


# ---- the model


def make_model(directory: Path, arguments: argparse.Namespace, device: str) -> Path:
    """A random llama of that shape, made on the device and saved with a tokenizer; what is there already is used again."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from tests.models.tiny import write_tokenizer

    if (directory / "tokenizer_config.json").is_file():
        return directory
    config = LlamaConfig(
        vocab_size=arguments.vocab,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.mlp,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
        max_position_embeddings=max(16384, 2 * arguments.tokens),
        bos_token_id=None,
        eos_token_id=arguments.vocab // 2,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, arguments.dtype))
    model.save_pretrained(directory, max_shard_size="100GB")
    write_tokenizer(directory, arguments.vocab)
    return directory


def make_model_apart(directory: Path, arguments: argparse.Namespace) -> Path:
    """make_model on arguments.device, in a process of its own, whose memory there ends with it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(make_model, directory, arguments, arguments.device).result()


# ---- requests


def prompt_of(number: int, tokens: int, vocab: int = VOCAB) -> list[int]:
    """Random, so that no two share a prefix."""
    rng = random.Random(number)
    return [rng.randrange(FIRST_ID, vocab) for _ in range(tokens)]


def ask(cluster: Cluster, prompt: list[int], outputs: int) -> Asked:
    """Raises AssertionError if an answer is not complete, ValueError if its timeline does not become so."""
    request_id, times = answered(cluster, prompt, outputs)
    return Asked(_timeline(cluster, request_id), times[0], times[1])


def answered(cluster: Cluster, prompt: list[int], outputs: int) -> tuple[str, list[float]]:
    """A request's name, and when each of its tokens came, in seconds after it was sent. Raises AssertionError."""
    body = {
        "model": cluster.model,
        "prompt": prompt,
        "max_tokens": outputs,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    times: list[float] = []
    request_id = ""
    started = time.perf_counter()
    with CLIENT.stream("POST", f"{cluster.http}/v1/completions", json=body) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                data = json.loads(line.removeprefix("data: "))
                request_id = data.get("id", request_id)
                for choice in data.get("choices", ()):
                    times += [time.perf_counter() - started] * len(choice.get("token_ids") or [])
    assert len(times) == outputs, f"{len(times)} of {outputs} tokens came"
    return request_id, times


def _timeline(cluster: Cluster, request_id: str) -> tuple[TimelineEvent, ...]:
    """Both servers' parts come after the answer's end."""
    deadline = time.monotonic() + TIMELINE_S
    while True:
        reply = CLIENT.get(f"{cluster.http}/debug/timeline", params={"request_id": request_id})
        events = msgspec.convert(reply.raise_for_status().json()["events"], tuple[TimelineEvent, ...])
        try:
            parts_of(events)
        except ValueError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return events


def restart(cluster: Cluster, name: str, timeout_s: float = READY_S) -> float:
    """Ends a server with SIGTERM, as an operator does, and waits for the one in its place; returns seconds until ready."""
    pid = cluster.server(name)["pid"]
    started = time.perf_counter()
    cluster.kill(pid, signal.SIGTERM)
    cluster.wait(lambda: _replaced(cluster, name, pid), timeout_s, f"another {name}")
    return time.perf_counter() - started


def _replaced(cluster: Cluster, name: str, pid: int) -> bool:
    server = cluster.server(name)
    return bool(server["state"] == "ready" and server["pid"] != pid)


# ---- what is measured


class Measured(Struct, frozen=True):
    """Everything. contacts: by what was fresh, one request each. restart_s: until the decode server was ready again."""

    contacts: dict[str, Asked]
    long: tuple[Asked, ...]
    restart_s: tuple[float, ...]


def measure(cluster: Cluster, arguments: argparse.Namespace, note: Callable[[str], None]) -> Measured:
    numbers = iter(range(1_000_000))

    def one(tokens: int) -> Asked:
        return ask(cluster, prompt_of(next(numbers), tokens), arguments.outputs)

    contacts = {"both servers fresh": one(arguments.short)}
    note("first contact measured")
    one(arguments.tokens)  # the first long prompt is the first of its kind on every kernel
    long = tuple(one(arguments.tokens) for _ in range(arguments.repeats))
    note(f"{len(long)} long prompts measured")
    restart_s = []
    for number in range(arguments.restarts):
        restart_s.append(restart(cluster, "decode-0"))
        contacts[f"decode server fresh, {number + 1}"] = one(arguments.short)
        contacts[f"second request, {number + 1}"] = one(arguments.short)
        note(f"decode server was ready again after {restart_s[-1]:.1f} s")
    return Measured(contacts, long, tuple(restart_s))


def contact_table(contacts: dict[str, Asked], tokens: int) -> Table:
    table = Table(title=f"first contact, {tokens} tokens; ms", title_justify="left")
    for heading in ("", "first token", "second token", "waited", "prefill", "grant", "first piece", "last piece after"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, asked in contacts.items():
        parts = parts_of(asked.events)
        seconds = (parts.waited, parts.prefill, parts.granted, parts.first_piece, parts.landed)
        table.add_row(name, *(f"{s * 1e3:.1f}" for s in (asked.first_token_s, asked.second_token_s, *seconds)))
    return table


def long_table(long: Sequence[Asked], tokens: int, chunk_tokens: int, kv_bytes: int) -> Table:
    """kv_bytes: of the prompt, on all ranks."""
    title = f"{tokens} tokens in chunks of {chunk_tokens}, {kv_bytes / MIB:.0f} MiB of KV; ms, of {len(long)} requests"
    table = Table(title=title, title_justify="left")
    for heading in ("", "median", "least", "most"):
        table.add_column(heading, justify="right" if heading else "left")
    parts = [parts_of(asked.events) for asked in long]
    rows: tuple[tuple[str, list[float]], ...] = (
        ("prefill, first chunk to first token", [each.prefill for each in parts]),
        ("client: first token", [asked.first_token_s for asked in long]),
        ("client: from first to second token", [asked.second_token_s - asked.first_token_s for asked in long]),
        ("after the first token: last piece landed", [each.landed for each in parts]),
        ("after the first token: transfer over", [each.transferred for each in parts]),
    )
    for name, seconds in rows:
        table.add_row(name, *(f"{f(seconds) * 1e3:.1f}" for f in (statistics.median, min, max)))
    late = [each.late_pieces for each in parts]
    share = statistics.median(each.late_pieces / each.pieces for each in parts)
    table.add_row("pieces after the first token", *(f"{f(late):g}" for f in (statistics.median, min, max)))
    table.caption = f"of {parts[0].pieces} pieces and {parts[0].chunks} chunks"
    if share:
        rate = share * kv_bytes / statistics.median(each.landed for each in parts) / 1e9
        table.caption += f"; after the first token landed {share:.0%} of the KV, {rate:.0f} GB/s from then on"
    return table


@contextmanager
def started(arguments: argparse.Namespace, model_dir: Path, run_dir: Path) -> Iterator[Cluster]:
    """The cluster, with pieces, segments and an arena of the sizes that were asked for."""
    sizes: tuple[str, ...] = ()
    if arguments.piece_kib:
        gather_bytes = arguments.piece_kib * 1024 + PAGE  # a piece and its checksum
        segment_bytes = 4 * gather_bytes
        sizes = (
            f"transfer.gather_bytes={gather_bytes}",
            f"transfer.segment_bytes={segment_bytes}",
            f"transfer.arena_bytes={8 * segment_bytes}",
        )
    sets = (f"model.device={arguments.device}", *sizes, *arguments.sets)
    flags = ("--model", str(model_dir), "--dtype", arguments.dtype, "--chunk-tokens", str(arguments.chunk))
    tps = ("--prefill-tp", str(arguments.prefill_tp), "--decode-tp", str(arguments.decode_tp))
    with Cluster(run_dir, *flags, *tps, "--kv-memory", arguments.kv_memory, sets=sets) as cluster:
        yield cluster


def add_shape(parser: argparse.ArgumentParser, vocab: int) -> None:
    """Arguments of make_model. vocab: its size by default."""
    shape = parser.add_argument_group("the model", "Llama-3.1-8B's shape by default")
    shape.add_argument("--vocab", type=int, default=vocab)
    shape.add_argument("--layers", type=int, default=32)
    shape.add_argument("--hidden", type=int, default=4096)
    shape.add_argument("--heads", type=int, default=32)
    shape.add_argument("--kv-heads", type=int, default=8)
    shape.add_argument("--head-dim", type=int, default=128)
    shape.add_argument("--mlp", type=int, default=14336, help="inner width; KV does not depend on it")
    shape.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    shape.add_argument("--model-dir", type=Path, help="keep the model there, and use it if it is there")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    add_shape(parser, VOCAB)
    parser.add_argument("--prefill-tp", type=int, default=1)
    parser.add_argument("--decode-tp", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=8192, help="of the long prompts")
    parser.add_argument("--short", type=int, default=512, help="tokens of the prompts of first contact")
    parser.add_argument("--chunk", type=int, default=2048, help="engine.chunk_tokens")
    parser.add_argument("--outputs", type=int, default=8, help="tokens of each answer, at least 2")
    parser.add_argument("--repeats", type=int, default=7, help="long prompts measured")
    parser.add_argument("--restarts", type=int, default=1, help="of the decode server")
    parser.add_argument(
        "--piece-kib", type=int, default=0, help="KV in one write, and 1/32 of the arena; 0: the device's own"
    )
    parser.add_argument("--kv-memory", default="8GiB", help="pool of each rank")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    parser.add_argument("--json", type=Path, help="keep every timeline")
    arguments = parser.parse_args(argv)
    if arguments.outputs < 2:
        parser.error("--outputs: the second token is the first that decode computes")
    return arguments


def main(argv: Sequence[str] = sys.argv[1:]) -> None:
    arguments = parse(argv)
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    begin = time.perf_counter()

    def note(text: str) -> None:
        console.print(f"[{time.perf_counter() - begin:6.1f} s] {text}", markup=False)

    with tempfile.TemporaryDirectory() as directory:
        model_dir = make_model(arguments.model_dir or Path(directory) / "model", arguments, arguments.device)
        note(f"model made: {sum(file.stat().st_size for file in model_dir.glob('*.safetensors')) / 2**30:.2f} GiB")
        with started(arguments, model_dir, Path(directory) / "run") as cluster:
            note("the cluster is ready")
            for line in cluster.output().splitlines():
                if " on GPU" in line:
                    note(line)
            measured = measure(cluster, arguments, note)
            if arguments.json is not None:
                arguments.json.write_bytes(msgspec.json.encode(measured))
            console.print(timeline_table(measured.long[-1].events, "the last long prompt"))
            console.print(contact_table(measured.contacts, arguments.short))
            console.print(long_table(measured.long, arguments.tokens, arguments.chunk, kv_bytes(arguments)))
        note("the cluster has ended")


def kv_bytes(arguments: argparse.Namespace) -> int:
    """Of a long prompt."""
    width = 4 if arguments.dtype == "float32" else 2
    per_token: int = arguments.layers * 2 * arguments.kv_heads * arguments.head_dim * width
    return per_token * int(arguments.tokens)


if __name__ == "__main__":
    main()
