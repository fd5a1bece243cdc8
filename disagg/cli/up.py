"""`disagg up`: one router and its servers on this machine, as children that are watched and started again.

Decides names, ports and files; what happens to children is decided in `supervise` and done in `children`.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from disagg.cli.announce import announce
from disagg.cli.children import Children, ChildSpec
from disagg.cli.logecho import shown
from disagg.cli.logfiles import RotatedFile
from disagg.cli.logpump import LogPump
from disagg.cli.placement import Placement, describe, place
from disagg.cli.rundir import cannot_write, make_run_dir, pick_ports, prune_run_dirs, require_free
from disagg.cli.supervise import Limits
from disagg.cli.terminal import StageProgress, UnblockedStream, note, problem, unblock_streams
from disagg.config.check import check_config, check_exposure, check_role, without_mixed_only
from disagg.config.load import child_environ, dump_config, load_config
from disagg.config.tree import Config, LogConfig, ProcessRole, ServerRef, ServerRole
from disagg.messages.heads import SliceError
from disagg.offload.options import storage_target
from disagg.router.names import drawn_name
from disagg.server.device import choose_device, count_gpus
from disagg.telemetry.line_writer import LineWriter, Target
from disagg.telemetry.logs import notice_of
from disagg.telemetry.loop import LoopWatch
from disagg.telemetry.process import describe_status, ending_signals, raise_descriptor_limit
from disagg.telemetry.record_files import require_directory
from disagg.types.addresses import join
from disagg.types.errors import ConfigError
from disagg.types.plain import one_line
from disagg.types.small_files import home_expanded
from disagg.types.status import REFUSED

DRAIN_MARGIN_S = 5.0  # a child bounds its own drain; this is for what comes after
LAST_LINES_S = 1.0  # how long the last lines of a child that has ended may be on their way
LAST_LOGS_S = 2.0
SERVER_HOST = "127.0.0.1"


class UpOptions(Struct, frozen=True, kw_only=True):
    """How many servers, and where the run's files go."""

    num_prefill: int
    num_decode: int
    num_mixed: int = 0
    num_routers: int = 1
    prefill_tp: int | None = None  # None: server.tp
    decode_tp: int | None = None
    mixed_tp: int | None = None
    mixed_dp: int | None = None  # None: server.dp
    mixed_pp: int | None = None  # None: server.pp
    run_parent: Path = Path()

    @property
    def pools(self) -> tuple[tuple[ServerRole, int, int | None], ...]:
        """Role, servers and their ranks."""
        return (
            ("prefill", self.num_prefill, self.prefill_tp),
            ("decode", self.num_decode, self.decode_tp),
            ("mixed", self.num_mixed, self.mixed_tp),
        )


class ProcessSpec(Struct, frozen=True):
    """One process of the cluster: its name, role, and the whole configuration that it is given."""

    name: str
    role: ProcessRole
    config: Config


def run_up(options: UpOptions, file: Path | None, overrides: Mapping[str, object]) -> int:
    """Runs the cluster until SIGTERM, SIGHUP or Ctrl-C; returns the exit code. Raises DisaggError before anything was started.

    Who reads what this says is not needed: the cluster goes on without, and `up.log` in the run directory has it, too.
    """
    streams = unblock_streams()
    raise_descriptor_limit()  # children inherit it
    base = load_config(file, overrides)
    check_exposure(base, "router")
    if base.offload.enabled and base.storage.url:
        storage_target(base.storage.url, base.storage.options)  # refused here rather than by every child
    router = base.router
    require_free(router.host, router.http_port, "router.http_port", "--http-port")
    require_free(router.host, router.grpc_port, "router.grpc_port", "--grpc-port")
    if base.record.dir:
        require_directory(home_expanded(base.record.dir, "record.dir"))
    processes = cluster_processes(base, options)
    model_dir = _convert(base)
    routers, servers = processes[: options.num_routers], processes[options.num_routers :]
    _check_ranks(model_dir, servers)
    if choose_device(base.model.device) == "cuda":
        ranks = {process.name: process.config.server.num_ranks for process in servers}
        placement = place(ranks, count_gpus(), base.server.first_gpu)
        servers = on_gpus(servers, placement)
        note(describe(placement, ranks))
    held = make_run_dir(options.run_parent)
    try:
        prune_run_dirs(options.run_parent)
        run_files = _RunFiles(held.path)
        specs = [run_files.write(each) for each in routers], [run_files.write(each) for each in servers]
        files = log_files([*(spec.log for group in specs for spec in group), held.path / "up.log"], base.log)
        keep_copy(streams, files.pop("up"))
        note(f"run directory: {held.path}")
        if idle := without_work(options):
            note(idle)
        note(f"starting {', '.join(process.name for process in (*routers, *servers))}")
        return asyncio.run(_run([each.config for each in routers], specs, run_files, LogPump(files, _echo)))
    finally:
        held.release()


def log_files(paths: Sequence[Path], log: LogConfig) -> dict[str, Target]:
    """By the name of their process: files that rotate, and that say what a full disk did not take."""
    return {
        path.stem: Target(RotatedFile(path, log.max_bytes, log.keep), notice_of("up", log.format)) for path in paths
    }


def keep_copy(streams: Sequence[UnblockedStream], file: Target) -> None:
    """Whatever is said from now on is said to this file as well."""
    copy = LineWriter(file)
    for stream in streams:
        stream.copy = copy


def cluster_processes(base: Config, options: UpOptions) -> tuple[ProcessSpec, ...]:
    """The routers and their servers, with ports that stay theirs over restarts. The routers come first.

    Raises ConfigError for what one of them would refuse.
    """
    if not options.num_mixed and not (options.num_prefill and options.num_decode):
        raise ConfigError(
            f"--prefill {options.num_prefill} --decode {options.num_decode} --mixed 0: no request could be answered; there "
            "must be servers of both roles, or mixed ones"
        )
    if not options.num_mixed:
        check_role(base, "prefill")
    _check_pools(options)
    fixed = [port for port in (base.router.http_port, base.router.grpc_port) if port]
    tps = {
        (role, f"{role}-{index}"): tp or base.server.tp for role, number, tp in options.pools for index in range(number)
    }
    ports = pick_ports(SERVER_HOST, 2 * len(tps) + 2 + options.num_routers - len(fixed), taken=fixed)
    http_port = base.router.http_port or ports.pop()
    grpc_port = base.router.grpc_port or ports.pop()
    servers, refs = [], []
    for (role, name), tp in tps.items():
        own = replace(
            base.server,
            name=name,
            tp=tp,
            dp=(options.mixed_dp or base.server.dp) if role == "mixed" else 1,
            pp=(options.mixed_pp or base.server.pp) if role == "mixed" else 1,
            host=SERVER_HOST,
            advertise_host="",
            port=ports.pop(),
            metrics_port=ports.pop(),
        )
        engine = base.engine if role == "mixed" else without_mixed_only(base.engine)
        process = ProcessSpec(name, role, replace(base, server=own, engine=engine))
        servers.append(process)
        refs.append(ServerRef(name=name, role=role, address=_address(process)))
    router = replace(base.router, http_port=http_port, grpc_port=grpc_port, servers=tuple(refs))
    processes = *_routers(replace(base, router=router), options.num_routers, ports), *servers
    for process in processes:
        check_config(process.config)
        check_role(process.config, process.role)
    return processes


def without_work(options: UpOptions) -> str:
    """What to say of servers that have no counterpart beside mixed ones, which answer alone; empty where all have work."""
    counts = {"prefill": options.num_prefill, "decode": options.num_decode}
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        if counts[role] and not counts[other]:
            return (
                f"--{role} {counts[role]} --{other} 0: {role} servers have nothing to do while there are no {other} servers, "
                "since mixed ones take whole requests; `disagg role` gives one another role"
            )
    return ""


def _routers(base: Config, count: int, ports: list[int]) -> Iterator[ProcessSpec]:
    """Several share the ports of their faces, and have one each beside them."""
    name = base.router.name or drawn_name()  # its own for as long as `up` runs: a router that is started again keeps it
    for index in range(count):
        own = replace(base.router, name=name if count == 1 else f"{name}-{index}")
        if count > 1:
            own = replace(own, share_ports=True, own_http_port=ports.pop())
        yield ProcessSpec("router" if count == 1 else f"router-{index}", "router", replace(base, router=own))


def _check_pools(options: UpOptions) -> None:
    """Raises ConfigError for what is said of servers that there are none of."""
    said = [(role, "tp", number, tp) for role, number, tp in options.pools]
    said += [("mixed", "dp", options.num_mixed, options.mixed_dp), ("mixed", "pp", options.num_mixed, options.mixed_pp)]
    for role, what, number, value in said:
        if value is not None and not number:
            raise ConfigError(f"--{role}-{what} {value}: there are no {role} servers (--{role} 0)")


def on_gpus(processes: Sequence[ProcessSpec], placement: Placement) -> tuple[ProcessSpec, ...]:
    """The same with the GPUs of each server. Those that share one share what each would otherwise take of its memory."""
    placed = []
    for process in processes:
        config = process.config
        if process.name in placement.first_gpu:
            share = config.engine.gpu_memory_utilization / placement.sharers[process.name]
            config = replace(
                config,
                server=replace(config.server, first_gpu=placement.first_gpu[process.name]),
                engine=replace(config.engine, gpu_memory_utilization=share),
            )
        placed.append(replace(process, config=config))
    return tuple(placed)


def _address(process: ProcessSpec) -> str:
    return join(process.config.server.host, process.config.server.port)


def _check_ranks(model_dir: Path, processes: Sequence[ProcessSpec]) -> None:
    """Raises ConfigError for a TP size that cannot share the model's heads, and for more pipeline stages than it has layers,
    here rather than in every child.
    """
    if all(process.config.server.tp == process.config.server.pp == 1 for process in processes):
        return
    from disagg.convert.inspect import inspect_model

    facts = inspect_model(model_dir)
    for process in processes:
        tp = process.config.server.tp
        try:
            facts.check_heads(tp)
        except SliceError as error:
            raise ConfigError(f"{process.role} servers with tp = {tp}: {error}") from error
        pp = process.config.server.pp
        facts.check_stages(pp, f"{process.role} servers with pp = {pp}")


def _convert(config: Config) -> Path:
    """The model's directory. Made once, here, rather than in every child at the same time."""
    from disagg.convert.model_dir import resolve

    progress = StageProgress()
    try:
        return resolve(config.model.name, home_expanded(config.model.cache_dir, "model.cache_dir"), progress)
    finally:
        progress.close()


class _RunFiles:
    """The children's configuration files, which whoever clears up caches may remove while they run."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._texts: dict[str, str] = {}
        self._gone = False

    def write(self, process: ProcessSpec) -> ChildSpec:
        """The child's, and how to start it. Raises ConfigError, or DisaggError for a full disk."""
        self._texts[process.name] = dump_config(process.config)
        file = self._file(process.name)
        try:
            self._write(process.name)
        except OSError as error:
            raise cannot_write(f"{file} cannot be written", error, "--run-dir takes another directory") from error
        argv = (sys.executable, "-m", "disagg.cli", process.role, "--config", str(file))
        return ChildSpec(process.name, argv, self._run_dir / f"{process.name}.log")

    def restore(self, name: str) -> None:
        """The child's file is there, whatever became of the directory. Raises OSError."""
        if self._file(name).exists():
            return
        if not self._gone:
            self._gone = True
            problem(f"{self._run_dir} was removed, or part of it; what children read of it is written again")
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._write(name)

    def _file(self, name: str) -> Path:
        return self._run_dir / f"{name}.toml"

    def _write(self, name: str) -> None:
        file = self._file(name)
        file.touch(mode=0o600)  # there may be secrets in storage.options
        file.write_text(self._texts[name], "utf-8")


class _Terminal:
    """Tells the operator what happens to children."""

    def __init__(self, pump: LogPump) -> None:
        self._pump = pump

    def cannot_start(self, spec: ChildSpec, why: str) -> None:
        problem(f"{spec.name} cannot be started now: {why}")

    def died(self, spec: ChildSpec, status: int, restart_in_s: float) -> None:
        problem(f"{spec.name} {describe_status(status)}; starting it again in {restart_in_s:g} s; log: {spec.log}")
        self._why(spec, status)

    def died_draining(self, spec: ChildSpec, status: int) -> None:
        problem(f"{spec.name} {describe_status(status)} while draining; log: {spec.log}")
        self._why(spec, status)

    def _why(self, spec: ChildSpec, status: int) -> None:
        """The last word of one that refuses what it was given."""
        for line in self._pump.last_lines(spec.name, LAST_LINES_S)[-1:] if status == REFUSED else ():
            note(f"  {one_line(line)}")

    def killed(self, spec: ChildSpec, why: str) -> None:
        problem(f"killing {spec.name} and its workers: {why}")

    def gave_up(self, spec: ChildSpec) -> None:
        problem(f"{spec.name} cannot run with this configuration; log: {spec.log}")
        for line in self._pump.last_lines(spec.name, LAST_LINES_S):
            note(f"  {one_line(line)}")

    def draining(self) -> None:
        note("draining; a second Ctrl-C kills")


async def _run(
    configs: Sequence[Config], specs: tuple[list[ChildSpec], list[ChildSpec]], run_files: _RunFiles, pump: LogPump
) -> int:
    """configs: of the routers. specs: of the routers, and of the servers."""
    config = configs[0]

    def open_output(name: str) -> int:
        run_files.restore(name)
        return pump.open(name)

    limits = Limits(drain_s=(config.router.drain_s + DRAIN_MARGIN_S, config.server.drain_s + DRAIN_MARGIN_S))
    children = Children((tuple(specs[0]), tuple(specs[1])), limits, _Terminal(pump), child_environ(), open_output)
    loop = asyncio.get_running_loop()
    for number in ending_signals():
        loop.add_signal_handler(number, children.interrupt if number == signal.SIGINT else children.drain)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a terminal set to `tostop` would stop this process for what it says
    routers = {spec.name: each for spec, each in zip(specs[0], configs, strict=True)}
    announcing = asyncio.create_task(announce(routers, children), name="announce")
    watch = LoopWatch(None, warn=problem)
    watch.start()
    try:
        exit_code = await children.run()
    finally:
        watch.stop()
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)
        await asyncio.to_thread(pump.close, LAST_LOGS_S)
    note("all processes have ended")
    return exit_code


def _echo(name: str, line: str) -> None:
    text = shown(line)
    if text is not None:
        note(f"{name}: {text}")
