"""Bringing workers up: processes, model, pool, transfer agents, and at last an engine that knows all of them.

    start ──> load ──> the ranks agree ──> profile, make pool ──> open transfer ──> hear plans ──> open offload ──> Incarnation

Raises WorkersLost for what may go better next time, and ConfigError for what cannot with this configuration.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import msgspec

from disagg.config.check import check_host_memory, check_memory, check_role, check_staging
from disagg.config.load import ucx_log_is_theirs
from disagg.config.sizes import format_size, show_bytes
from disagg.config.staging import Device, size_staging
from disagg.config.steps import mixed_step_tokens, size_steps
from disagg.config.tree import Config, ModelConfig
from disagg.convert.inspect import ModelFacts as InspectedModel
from disagg.convert.inspect import inspect_model
from disagg.engine.data_parallel import AnyEngine
from disagg.engine.facts import EngineFacts, MemoryFacts, ModelFacts, OffloadFacts, SchedulingFacts, TransferFacts
from disagg.memory.groups import GroupSpec, spec_of
from disagg.memory.layout import PageSizing, PoolLayout, pool_layout, stage_layout
from disagg.memory.sizing import size_pool
from disagg.messages.control import (
    Computation,
    Load,
    Loaded,
    MakePool,
    OffloadOpen,
    OpenOffload,
    OpenTransfer,
    Profile,
    Profiled,
    StagePool,
    TransferOpen,
)
from disagg.messages.heads import SliceError
from disagg.messages.layout import KV_FORMAT, Fingerprint, LayerGroup
from disagg.messages.link import RankInfo
from disagg.offload.host_size import size_host
from disagg.offload.keys import Scope
from disagg.offload.rules import offload_rules
from disagg.scheduler.policies import DEFAULT_MIXED, POLICIES
from disagg.server.device import (
    UCX_TLS_ON_CPU,
    check_weights,
    choose_device,
    choose_dtype,
    memory_bytes,
    ucx_choice,
)
from disagg.server.model_identity import ModelIdentity, disagreement, identity_of
from disagg.server.networks import net_devices_in_time
from disagg.server.pids import started
from disagg.server.piece_sizes import check_longest, check_rows
from disagg.server.role import ServerRole
from disagg.server.workers import Workers, WorkersLost
from disagg.types.errors import ConfigError
from disagg.types.ids import Role

logger = logging.getLogger(__name__)

BARRIER_S = 30.0
GEMV_COPY_BYTES = 2 << 30  # a decode server on CPU keeps two copies of weights up to this size


@dataclass(frozen=True, slots=True)
class Incarnation:
    """Workers that are up, and their engine."""

    engine: AnyEngine
    facts: EngineFacts
    ranks: tuple[RankInfo, ...]
    fingerprint: str
    model: ModelIdentity
    what: str  # for the log


def with_device(config: Config, role: ServerRole) -> tuple[Config, Device]:
    """What the configuration leaves to the device is decided here. Raises ConfigError for what does not go with it."""
    device = choose_device(config.model.device)
    transfer = size_staging(config.transfer, device)
    check_staging(transfer, device)
    if device == "cpu":
        check_memory(config, transfer, role.role.value, memory_bytes())
    offload = config.offload
    if offload.enabled and offload.host_bytes:  # what the ratio gives is known when the device pool is
        why = f"offload.host_bytes = {format_size(offload.host_bytes)}"
        check_host_memory(config.server.tp, offload.host_bytes, 0, why, memory_bytes())
    return msgspec.structs.replace(config, transfer=transfer), device


async def on_this_machine(config: Config, role: ServerRole, link_address: str) -> tuple[Config, Device]:
    """As with_device, with the network devices of a server that peers dial at link_address. Raises ConfigError."""
    config, device = await asyncio.get_running_loop().run_in_executor(None, with_device, config, role)
    if config.transfer.ucx_net_devices == "auto" and device == "cpu":
        devices = await net_devices_in_time(link_address)
        config = msgspec.structs.replace(
            config, transfer=msgspec.structs.replace(config.transfer, ucx_net_devices=devices)
        )
    return config, device


def why_not_role(config: Config, role: ServerRole) -> str:
    """What of the configuration does not go with the role, as far as it can be said before anything is loaded."""
    try:
        check_role(config, role.role.value)
        with_device(config, role)
    except ConfigError as error:
        return str(error)
    return ""


PREFILL_DECODE_ROWS = 64  # prompts of which one token is left, at once, in a step that does not wait for Python


def spent(call_s: Mapping[str, float], load_s: float) -> str:
    """Where the time of a start went. call_s: of calls to workers, by the request's name. load_s: of weights, at rank 0."""
    parts = {
        "starting workers": call_s["Load"] - load_s,
        "loading": load_s,
        "largest step": call_s["Profile"],
        "pool and captures": call_s["MakePool"],
        "transfers": call_s["OpenTransfer"],
        "offload": call_s.get("OpenOffload", 0.0),
    }
    return ", ".join(f"{name} {took_s:.1f} s" for name, took_s in parts.items())


Stages = tuple[tuple[LayerGroup | None, ...], ...]


def stages_of(groups: Sequence[LayerGroup], cuts: Sequence[int]) -> Stages:
    """What each pipeline stage has of the groups; nothing where there is one stage. cuts: see messages/control.Loaded."""
    return tuple(tuple(layers.on_stage(first, stop) for layers in groups) for first, stop in pairwise(cuts))


def computation_of(model: ModelConfig, role: Role, local_prefill_tokens: int) -> Computation:
    """local_prefill_tokens: where a decode server computes some, its steps are of both phases, too. What a role hardly ever runs
    is not captured."""
    usual = Computation(model.prefill_attention, model.decode_attention, model.graphs, model.fusions)
    if role is Role.PREFILL:
        return msgspec.structs.replace(usual, decode_rows=PREFILL_DECODE_ROWS)
    if role is Role.DECODE:
        return msgspec.structs.replace(usual, mixed=local_prefill_tokens > 0, chunk_rows=local_prefill_tokens)
    return msgspec.structs.replace(usual, mixed=True)


@dataclass(frozen=True, slots=True)
class Bringup:
    """See the module. config: with what its device decides."""

    config: Config
    role: ServerRole
    device: Device
    model_dir: Path

    def inspect(self) -> InspectedModel:
        """What the files say now: of every incarnation, since they may have been replaced. Raises ConfigError. Blocks."""
        inspected = inspect_model(self.model_dir)
        tp = self.config.server.tp
        try:
            inspected.check_heads(tp)
        except SliceError as error:
            raise ConfigError(f"server.tp = {tp}: {error}") from error
        inspected.check_stages(self.config.server.pp, f"server.pp = {self.config.server.pp}")
        self.model_len(inspected.max_model_len)
        if self.device == "cpu":
            check_weights(inspected, choose_dtype(self.config.model.dtype, "cpu", ""), memory_bytes())
        return inspected

    def model_len(self, possible: int) -> int:
        """Tokens of the longest context. Raises ConfigError if the model allows fewer than are configured."""
        wanted = self.config.model.max_model_len
        if wanted > possible:
            raise ConfigError(f"model.max_model_len is {wanted}; the model allows at most {possible}")
        return wanted or possible

    async def run(self, workers: Workers, inspected: InspectedModel) -> Incarnation:
        """From processes that have been started on."""
        rank_parameters = inspected.num_parameters // self.config.server.tp
        mixed = self.role.role is Role.MIXED
        engine, chosen = size_steps(self.config.engine, self.device, rank_parameters, mixed=mixed)
        if chosen:
            logger.info("%s", chosen)
        if inspected.max_model_len_note:
            logger.warning("contexts hold %d tokens: %s", inspected.max_model_len, inspected.max_model_len_note)
        if POLICIES[engine.policy or DEFAULT_MIXED].whole_prompts:
            engine = msgspec.structs.replace(engine, chunk_tokens=self.model_len(inspected.max_model_len))
            logger.info(
                "engine.policy = %s: a step has room for a prompt of %d tokens", engine.policy, engine.chunk_tokens
            )
        elif mixed and engine.chunk_tokens < (
            most := mixed_step_tokens(engine.chunk_tokens, engine.max_running, engine.page_tokens, whole_prompts=False)
        ):
            logger.info(
                "steps have up to %d tokens, for engine.max_running = %d answers and a page (engine.page_tokens = %d) of a "
                "prompt, though engine.chunk_tokens is %d",
                *(most, engine.max_running, engine.page_tokens, engine.chunk_tokens),
            )
        sized = replace(self, config=msgspec.structs.replace(self.config, engine=engine))
        return await sized._run(workers, inspected)

    async def _run(self, workers: Workers, inspected: InspectedModel) -> Incarnation:
        dtype = choose_dtype(self.config.model.dtype, self.device, inspected.torch_dtype)
        loaded = await self._load(workers, inspected, dtype)
        groups = loaded.groups
        if self.config.engine.keep_windows:
            groups = tuple(layers.keeping_all() for layers in groups)
        on_rank = tuple(layers.on_rank(self.config.server.tp) for layers in groups)
        stages = stages_of(on_rank, loaded.cuts)
        moves = self.role.sends or self.role.receives
        if moves:
            check_rows(on_rank, self.config.transfer)
        layout, num_large = await self._make_pool(workers, on_rank, stages)
        ranks = await self._open_transfer(workers)
        model = ModelFacts(
            groups=groups,
            vocab_size=loaded.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            max_model_len=self.model_len(min(inspected.max_model_len, loaded.max_model_len)),
        )
        memory = MemoryFacts(
            layout=layout,
            num_large=num_large,
            prefix_cache=self.config.engine.prefix_cache,
            scope=Scope(loaded.weights_hash, dtype, layout.page_tokens, groups),
        )
        offload = await self._open_offload(workers, memory)
        facts = self._facts(workers.incarnation, model, memory, offload)
        engine = self._engine(facts, loaded.lockstep)
        for sends in (True,) * self.role.sends + (False,) * self.role.receives:
            check_longest(facts, engine.max_tokens_in_pool, sends=sends)
        return Incarnation(
            engine=engine,
            facts=facts,
            ranks=ranks,
            fingerprint=self._fingerprint(loaded.weights_hash, groups),
            model=identity_of(loaded),
            what=f"{inspected.model_type} in {dtype}; {spent(workers.call_s, loaded.load_s)}",
        )

    def _engine(self, facts: EngineFacts, lockstep: bool) -> AnyEngine:
        dp, data_parallel = self.config.server.dp, self.role.data_parallel
        if dp == 1 or data_parallel is None:
            return self.role.engine(facts)
        shared = "experts are shared, and all step together" if lockstep else "each steps by itself"
        logger.info("%d data-parallel ranks, each with a KV pool of its own: %s", dp, shared)
        return data_parallel(facts, dp, lockstep, time.monotonic)

    async def _load(self, workers: Workers, inspected: InspectedModel, dtype: str) -> Loaded:
        """What rank 0 says of the model; the others say the same."""
        config, timeout_s = self.config, self.config.worker.load_timeout_s
        small = 4 * inspected.num_parameters <= GEMV_COPY_BYTES
        load = Load(
            model_dir=str(self.model_dir),
            dtype=dtype,
            device=self.device,
            first_gpu=config.server.first_gpu,
            threads=config.worker.threads,
            gemv_copies=self.role.small_steps and (self.device, dtype) == ("cpu", "float32") and small,
            tp=config.server.tp,
            meet_s=timeout_s,
            collective_s=config.worker.step_deadline_s,
            computation=computation_of(config.model, self.role.role, config.engine.local_prefill_tokens),
            dp=config.server.dp,
            pp=config.server.pp,
        )
        loaded = [rank for rank in await workers.call(load, timeout_s) if isinstance(rank, Loaded)]
        if why := disagreement(loaded):
            raise WorkersLost(why)
        return loaded[0]

    async def _make_pool(
        self, workers: Workers, groups: tuple[LayerGroup, ...], stages: Stages
    ) -> tuple[PoolLayout, int]:
        """Decide on the pool's pages and size, and have every rank make it. Raises ConfigError if nothing fits.

        groups: as a rank that has all layers would keep them. stages: as each stage's ranks do.
        """
        engine, timeout_s = self.config.engine, self.config.worker.load_timeout_s
        tp = self.config.server.tp
        specs = [spec_of(layers, engine.page_tokens) for layers in groups]
        profiled = await workers.call(Profile(engine.chunk_tokens, self._max_slots), timeout_s)
        measured = [rank for rank in profiled if isinstance(rank, Profiled)]
        try:
            layout = pool_layout(specs, engine.page_tokens, engine.checkpoint_tokens, PageSizing(engine.page_sizing))
            cuts = [stage_layout(layout, self._specs(stage)) for stage in stages] or [layout]
            sizes = [
                size_pool(
                    cut,
                    set_bytes=engine.kv_memory_bytes,
                    total_bytes=min(rank.total_bytes for rank in of_stage),
                    peak_bytes=max(rank.peak_bytes for rank in of_stage),
                    staging_bytes=self._transfer(workers.incarnation).staging_bytes,
                    utilization=engine.gpu_memory_utilization,
                )
                for stage, cut in enumerate(cuts)
                for of_stage in [measured[stage * tp : (stage + 1) * tp] if stages else measured]
            ]
        except ValueError as error:
            raise ConfigError(f"engine: {error}") from error
        size = min(sizes, key=lambda each: each.num_large)  # pages have one number on all stages
        if layout.reason:
            logger.warning("%s", layout.reason)
        logger.info(
            "KV memory: %s; per large page %s",
            size.why,
            ", ".join(
                f"{count} of {layers.name} ({len(layers.layers)} layers, {layers.page_bytes(engine.page_tokens)} bytes)"
                for count, layers in zip(layout.per_large, groups, strict=True)
            ),
        )
        pools = tuple(StagePool(cut.large_bytes, cut.strides) for cut in cuts) if stages else ()
        made = MakePool(size.num_large, layout.large_bytes, layout.strides, engine.page_tokens, self._max_slots, pools)
        await workers.call(made, timeout_s)
        return layout, size.num_large

    def _specs(self, stage: Sequence[LayerGroup | None]) -> list[GroupSpec | None]:
        page_tokens = self.config.engine.page_tokens
        return [None if layers is None else spec_of(layers, page_tokens) for layers in stage]

    async def _open_transfer(self, workers: Workers) -> tuple[RankInfo, ...]:
        """Every rank has its agent, and hears plans. What peers need to know of each."""
        transfer = self._transfer(workers.incarnation)
        if not ucx_log_is_theirs():
            transfer = msgspec.structs.replace(transfer, ucx_log=workers.directory)
        opened = await workers.call(transfer, self.config.worker.load_timeout_s)
        await workers.barrier(BARRIER_S)
        return tuple(
            RankInfo(
                rank.rank,
                rank.pid,
                started(rank.pid),
                rank.metadata,
                rank.arena_address,
                rank.arena_device,
                rank.arena_bytes,
            )
            for rank in opened
            if isinstance(rank, TransferOpen)
        )

    def _transfer(self, incarnation: str) -> OpenTransfer:
        """An arena for what lands, or gather buffers for what leaves."""
        transfer = self.config.transfer
        return OpenTransfer(
            backend=transfer.backend,
            incarnation=incarnation,
            arena_bytes=transfer.arena_bytes if self.role.receives else 0,
            gather_bytes=transfer.gather_bytes,
            gather_buffers=transfer.gather_buffers if self.role.sends else 0,
            ucx_tls=ucx_choice(transfer.ucx_tls, self.device, UCX_TLS_ON_CPU),
            ucx_net_devices="" if transfer.ucx_net_devices == "auto" else transfer.ucx_net_devices,
            kernels=transfer.kernels,
            follows_layers=not self.role.hands_over,  # that sends only what stands still
        )

    async def _open_offload(self, workers: Workers, memory: MemoryFacts) -> OffloadFacts | None:
        """Every rank has its host pool, if there shall be one. Raises ConfigError for one that cannot be."""
        config, offload, layout = self.config, self.config.offload, memory.layout
        if not offload.enabled:
            return None
        try:
            rules = offload_rules(layout, offload.stride_tokens)
            size = size_host(offload, rules, memory.num_large)
        except ValueError as error:
            raise ConfigError(f"offload: {error}") from error
        beside = 0
        if self.device == "cpu":
            beside = memory.num_large * layout.large_bytes + self._transfer(workers.incarnation).staging_bytes
        host_bytes = size.num_large * layout.large_bytes
        check_host_memory(config.server.tp, host_bytes, beside, size.why, memory_bytes())
        stride_tokens = rules.stride * layout.page_tokens
        if stride_tokens != offload.stride_tokens:
            logger.info(
                "offload.stride_tokens = %d: it is %d here, in whole %s",
                offload.stride_tokens,
                stride_tokens,
                f"pages of {layout.page_tokens} tokens"
                if rules.unit == 1
                else f"checkpoints of {layout.checkpoint_tokens}",
            )
        opened = await workers.call(self._offload(size.num_large, memory), config.worker.load_timeout_s)
        logger.info(
            "host KV memory: %d large pages, %s on each rank: %s; pages are copied by %s",
            size.num_large,
            show_bytes(host_bytes),
            size.why,
            ", ".join(sorted({rank.copy for rank in opened if isinstance(rank, OffloadOpen)})),
        )
        return OffloadFacts(
            size.num_large,
            offload.stride_tokens,
            storage=bool(config.storage.url),
            load_always=offload.load == "always",
        )

    def _offload(self, num_large: int, memory: MemoryFacts) -> OpenOffload:
        offload, storage, layout, scope = self.config.offload, self.config.storage, memory.layout, memory.scope
        return OpenOffload(
            num_large=num_large,
            large_bytes=layout.large_bytes,
            strides=layout.strides,
            copy=offload.copy,
            url=storage.url,
            options=storage.options,
            compression=storage.compression,
            weights=scope.weights,
            dtype=scope.dtype,
            page_tokens=layout.page_tokens,
            checkpoint_tokens=layout.checkpoint_tokens,
            groups=scope.groups,
        )

    @property
    def _max_slots(self) -> int:
        """Choices sampled at once."""
        return self.config.engine.max_running + self.role.slots_beside

    def _facts(
        self, incarnation: str, model: ModelFacts, memory: MemoryFacts, offload: OffloadFacts | None
    ) -> EngineFacts:
        engine, transfer = self.config.engine, self.config.transfer
        scheduling = SchedulingFacts(
            max_slots=self._max_slots,
            max_running=engine.max_running,
            chunk_tokens=engine.chunk_tokens,
            target_step_s=engine.target_step_ms / 1000,
            policy=engine.policy,
            max_waiting=engine.max_waiting,
            local_prefill_tokens=engine.local_prefill_tokens,
            ungranted_share=engine.ungranted_share,
            spare_tokens=engine.grant_headroom_tokens,
            lookahead_tokens=engine.lookahead_tokens,
            preempt_after_s=engine.preempt_after_s,
            preemption=engine.preemption,
            prefill_delay_passes=engine.prefill_delay_passes,
            prefill_delay_low_usage=engine.prefill_delay_low_usage,
        )
        moving = TransferFacts(
            gather_bytes=transfer.gather_bytes,
            arena_bytes=transfer.arena_bytes,
            segment_bytes=transfer.segment_bytes,
            link_segments=transfer.link_segments,
            link_idle_s=transfer.link_idle_s,
            progress_s=transfer.progress_s,
        )
        server = self.config.server
        return EngineFacts(incarnation, server.tp, model, memory, scheduling, moving, offload, server.pp)

    def _fingerprint(self, weights_hash: str, groups: tuple[LayerGroup, ...]) -> str:
        engine = self.config.engine
        return Fingerprint(KV_FORMAT, weights_hash, engine.page_tokens, engine.checkpoint_tokens, groups).digest()
