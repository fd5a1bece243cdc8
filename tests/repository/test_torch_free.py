"""Only workers pay for torch: everything that the router, the servers and the command line load comes without it."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.repository.source import PACKAGE, name_of, source_files

HEAVY = ("torch", "transformers", "triton", "nixl_cu13")
STAGING_WITH_TORCH = ("checksum", "copy", "kernels", "mover", "rows", "triton_mover")
WITH_TORCH = (
    "disagg.bench.engine.ceilings.",
    "disagg.bench.transfer.rank.",  # processes that `disagg bench` starts, as servers start workers
    "disagg.bench.transfer.unstaged.",
    "disagg.models.",
    "disagg.worker.",
    *(f"disagg.staging.{name}." for name in STAGING_WITH_TORCH),
    "disagg.transfer.backends.memory.",
)
MUST_BE_THERE = {
    "disagg.bench.transfer.measure",
    "disagg.bench.transfer.trial",
    "disagg.api.app",
    "disagg.cli.main",
    "disagg.config.load",
    "disagg.convert.converter",
    "disagg.decode_server.role",
    "disagg.mixed_server.role",
    "disagg.engine.engine",
    "disagg.engine.handoff.receive",
    "disagg.engine.handoff.send",
    "disagg.memory.kv_memory",
    "disagg.messages.plan",
    "disagg.prefill_server.role",
    "disagg.router.service",
    "disagg.scheduler.policies",
    "disagg.server.lifecycle",
    "disagg.server.run",
    "disagg.staging.arena",
    "disagg.staging.ring",
    "disagg.streams.stream",
    "disagg.text.tokenizer",
    "disagg.transfer.buffers",
    "disagg.transfer.landed",
    "disagg.transfer.session",
    "disagg.wire.services",
}
PROGRAM = """
import importlib, json, sys
heavy, modules = json.loads(sys.argv[1])
found = {}
for module in modules:
    importlib.import_module(module)
    loaded = [name for name in heavy if name in sys.modules]
    if loaded:
        found[module] = loaded
        break
print(json.dumps(found))
"""


def modules_without_torch() -> list[str]:
    modules = [name_of(file).removesuffix(".py").replace("/", ".") for file in source_files()]
    return [
        module
        for module in (each.removesuffix(".__init__") for each in modules)
        if not f"{module}.".startswith(WITH_TORCH) and not module.endswith("__main__")
    ]


def first_that_loads_something_heavy(modules: list[str]) -> dict[str, list[str]]:
    """The first of the modules, imported in turn in one fresh process, after which something heavy is loaded."""
    argv = [sys.executable, "-c", PROGRAM, json.dumps([HEAVY, modules])]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True, cwd=PACKAGE.parent)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_router_servers_and_pure_modules_load_without_torch() -> None:
    modules = modules_without_torch()
    assert set(modules) >= MUST_BE_THERE
    assert first_that_loads_something_heavy(modules) == {}


def test_a_module_that_loads_torch_is_noticed() -> None:
    found = first_that_loads_something_heavy(["disagg.staging.pieces", "disagg.staging.checksum"])
    assert "torch" in found["disagg.staging.checksum"]
