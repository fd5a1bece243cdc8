"""How fast stored KV goes by the size of its objects: `python -m bench.storage [--storage URL]`.

Parts of 64 KiB to 32 MiB, as `offload/tier` writes and reads them (checksums, frames, four at a time), 128 MiB of each size.
Without a URL: a temporary directory, and an S3 server on loopback, which needs what the tests need (moto).
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Mapping
from random import Random

import numpy as np

from disagg.messages.layout import LayerGroup
from disagg.offload.keys import Scope
from disagg.offload.objects import Compression
from disagg.offload.options import OptionValue
from disagg.offload.store import open_store
from disagg.offload.tier import StorageTier

KIB, MIB = 1 << 10, 1 << 20
UNIT = 32 * KIB
TOTAL = 128 * MIB
AT_ONCE = 4
SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 32 * MIB)
GROUP = LayerGroup("full", tuple(range(4)), 1, 64, "float32")  # 2 KiB per token: 16 tokens are a unit
SCOPE = Scope("bench", "float32", 16, (GROUP,))


async def measure(
    url: str, options: Mapping[str, OptionValue], size: int, compression: Compression
) -> tuple[float, float]:
    """(MB/s written, MB/s read) with parts of this size."""
    tier = StorageTier(open_store(url, options), SCOPE, checkpoint_tokens=16, compression=compression, random=Random())
    pages, count = size // UNIT, max(AT_ONCE, TOTAL // size)
    count = min(count, 512)
    content = np.random.default_rng(0).integers(0, 256, (1, pages, UNIT), dtype=np.uint8)
    draw = Random()
    chains = [[draw.randbytes(32) for _ in range(pages)] for _ in range(count)]
    spans = []
    limit = asyncio.Semaphore(AT_ONCE)

    async def write(hashes: list[bytes]) -> None:
        async with limit:
            part = await tier.write_part(0, hashes, 0, content)
            share = tier.share(0, range(pages), [part])
            spans.append(await tier.publish(tier.span(0, SCOPE.root, hashes, [], [share])))

    async def read(hashes: list[bytes]) -> None:
        async with limit:
            found = await tier.walk(hashes)
            for each in tier.reads(found, 0, range(pages), range(1)):
                await tier.fetch(each)

    began = time.perf_counter()
    await asyncio.gather(*map(write, chains))
    wrote = time.perf_counter()
    await asyncio.gather(*map(read, chains))
    ended = time.perf_counter()
    for span in spans:
        await tier.discard(span)
    return count * size / 1e6 / (wrote - began), count * size / 1e6 / (ended - wrote)


def report(name: str, url: str, options: Mapping[str, OptionValue], compression: Compression) -> None:
    print(f"\n{name}\n{'part':>8}  {'written MB/s':>12}  {'read MB/s':>9}")
    for size in SIZES:
        wrote, read = asyncio.run(measure(url, options, size, compression))
        shown = f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"
        print(f"{shown:>8}  {wrote:12.0f}  {read:9.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--storage", default="")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--compression", choices=["none", "zstd"], default="none")
    arguments = parser.parse_args()
    if arguments.storage:
        options = dict(each.split("=", 1) for each in arguments.option)
        report(arguments.storage, arguments.storage, options, arguments.compression)
        return
    from tests.offload.s3_server import s3_server

    with tempfile.TemporaryDirectory() as directory:
        report("directory", f"file://{directory}/kv", {}, arguments.compression)
    with s3_server() as server:
        report("S3 on loopback", server.url, server.options, arguments.compression)


if __name__ == "__main__":
    main()
