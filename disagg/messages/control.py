"""The control call: one request to every rank, one reply from each, with a timeout. Start-up, dumps and shutdown."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from disagg.messages.layout import LayerGroup


class Computation(Struct, frozen=True):
    """How a model's layers are computed, where the device allows it.

    prefill_attention, decode_attention: names of backends (models/attention/choice), or "auto". graphs: steps are captured as
    CUDA graphs, of up to decode_rows sequences that decode and of up to chunk_rows tokens of prompts, as far as it pays; 0: none
    of that kind. fusions: names of passes over modules (models/fused/passes). mixed: steps of both phases are usual, and are
    captured, too.
    """

    prefill_attention: str = "auto"
    decode_attention: str = "auto"
    graphs: bool = True
    fusions: tuple[str, ...] = ("norm", "residual", "gate_up", "qkv", "few_rows", "rank_sums", "rotation", "ends")
    mixed: bool = False
    decode_rows: int = 512
    chunk_rows: int = 768


class Load(Struct, frozen=True, tag="load"):
    """Load the model, or one rank's part of it, and meet the other ranks."""

    model_dir: str
    dtype: str  # a concrete one ("float32", ...)
    device: str  # "cpu", or "cuda": rank r then has GPU first_gpu + r
    first_gpu: int
    threads: int
    gemv_copies: bool  # see models/gemv
    tp: int  # workers of one data-parallel rank
    meet_s: float  # how long to wait for the other ranks once loaded
    collective_s: float  # how long to wait for them in any later collective
    computation: Computation = Computation()
    dp: int = 1  # data-parallel ranks, which may share experts (models/experts)
    pp: int = 1  # stages, of tp workers each, where dp is 1; rank r is in stage r // tp


class Profile(Struct, frozen=True, tag="profile"):
    """Run the largest step that can come (chunk_tokens of prefill, and max_slots sequences) and say what it took."""

    chunk_tokens: int
    max_slots: int


class StagePool(Struct, frozen=True):
    """How a pipeline stage cuts its pool; see MakePool. strides: of the layer groups of which it has layers."""

    large_bytes: int
    strides: tuple[int, ...]


class MakePool(Struct, frozen=True, tag="make_pool"):
    """Make the pool and the sampler. strides: bytes from one small page to the next, per layer group as a rank keeps it.

    stages: how each pipeline stage cuts its pool, in place of large_bytes and strides; none where there is one stage.
    """

    num_large: int
    large_bytes: int
    strides: tuple[int, ...]
    page_tokens: int
    max_slots: int
    stages: tuple[StagePool, ...] = ()


class OpenTransfer(Struct, frozen=True, tag="open_transfer"):
    """Open the transfer agent, with its arena (decode) and gather buffers (prefill). kernels: see staging/mover.

    ucx_log: directory for UCX's logs, one file for each rank (`ucx_log_of`); empty: UCX's log goes where its environment says.
    """

    backend: str
    incarnation: str
    arena_bytes: int
    gather_bytes: int
    gather_buffers: int
    ucx_tls: str
    ucx_net_devices: str
    kernels: Literal["auto", "triton", "torch"] = "auto"
    follows_layers: bool = True  # what is sent may still be computed; else plans that it waits for have been
    ucx_log: str = ""

    def ucx_log_of(self, rank: int) -> str:
        return ucx_log_of(self.ucx_log, rank) if self.ucx_log else ""

    @property
    def staging_bytes(self) -> int:
        """Memory of the device that this takes."""
        return self.arena_bytes + self.gather_bytes * self.gather_buffers


def ucx_log_of(directory: str, rank: int) -> str:
    return f"{directory}/ucx.{rank}.log"


class OpenOffload(Struct, frozen=True, tag="open_offload"):
    """Make the host pool, and open storage if there is one (`url`). After OpenTransfer.

    num_large: large pages of the host pool, as long and cut in the same way as the pool's (MakePool). copy: how pages cross,
    "auto" is what is faster here. groups: of the whole model, as they are kept. The rest: offload/keys.Scope, and settings.
    """

    num_large: int
    large_bytes: int
    strides: tuple[int, ...]
    copy: Literal["auto", "kernel", "memcpy"]
    url: str
    options: dict[str, bool | int | float | str]
    compression: Literal["none", "zstd"]
    weights: str
    dtype: str
    page_tokens: int
    checkpoint_tokens: int
    groups: tuple[LayerGroup, ...]


class OffloadOpen(Struct, frozen=True, tag="offload_open"):
    """host_bytes: of this rank's host pool. copy: how pages cross, and why."""

    rank: int
    host_bytes: int
    copy: str


class Dump(Struct, frozen=True, tag="dump"):
    """Say what you are doing (stacks, plans, transfers). Answered by the transfer thread, so also during a step."""


class Shutdown(Struct, frozen=True, tag="shutdown"):
    """Exit cleanly."""


class Loaded(Struct, frozen=True, tag="loaded"):
    """A rank has loaded its part. Every rank says the same but for rank and load_s, or they have loaded different models."""

    rank: int
    groups: tuple[LayerGroup, ...]  # of the whole model, with all KV heads
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    load_s: float
    weights_hash: str  # see models/identity
    files: dict[str, str]  # digests of the small files beside the weights, by name
    lockstep: bool = False  # data-parallel ranks share its experts, so that all take part in each step
    cuts: tuple[int, ...] = ()  # stage s has layers [cuts[s], cuts[s + 1]); none where there is one stage


class Profiled(Struct, frozen=True, tag="profiled"):
    """total_bytes: of the device; 0 on CPU, where memory is not measured. peak_bytes: most that was in use, whoever used it."""

    rank: int
    total_bytes: int
    peak_bytes: int


class PoolMade(Struct, frozen=True, tag="pool_made"):
    """The rank's pool is there, and takes so many bytes."""

    rank: int
    pool_bytes: int


class TransferOpen(Struct, frozen=True, tag="transfer_open"):
    """metadata: the agent's, to be given to peers. arena_address: base of the arena; 0, like arena_bytes, without one."""

    rank: int
    pid: int
    metadata: bytes
    arena_address: int
    arena_device: int
    arena_bytes: int


class Dumped(Struct, frozen=True, tag="dumped"):
    """The rank's state, for people."""

    rank: int
    text: str


class ControlFailed(Struct, frozen=True, tag="control_failed"):
    """The call did not work. config: it is the operator's fault (bad model directory, ...), so do not restart."""

    rank: int
    reason: str
    config: bool


ControlRequest = Load | Profile | MakePool | OpenTransfer | OpenOffload | Dump | Shutdown
ControlReply = Loaded | Profiled | PoolMade | TransferOpen | OffloadOpen | Dumped | ControlFailed

encode_request = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(ControlRequest).decode
encode_reply = msgspec.msgpack.Encoder().encode
decode_reply = msgspec.msgpack.Decoder(ControlReply).decode
