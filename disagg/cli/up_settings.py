"""The flags of `disagg up` that stand for settings of all its processes, in the order of its help."""

from __future__ import annotations

import click

from disagg.cli.flags import Command, setting

ON_OFF = click.Choice(["on", "off"])
FLAGS = (
    setting(
        "--model",
        "model.name",
        metavar="NAME|DIR",
        help="A known model, or a Hugging Face directory.  [default: smollm2-135m]",
    ),
    setting(
        "--dtype",
        "model.dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        help="[default: auto]",
    ),
    setting(
        "--page-tokens",
        "engine.page_tokens",
        type=int,
        metavar="N",
        help="Tokens per KV page.  [default: by the device]",
    ),
    setting(
        "--chunk-tokens",
        "engine.chunk_tokens",
        type=int,
        metavar="N",
        help="Token budget of one prefill step.  [default: 256]",
    ),
    setting(
        "--policy",
        "engine.policy",
        type=click.Choice(["sarathi", "vllm", "simple_chunking", "orca", "faster_transformer"]),
        help="What a step of mixed servers computes.  [default: sarathi]",
    ),
    setting(
        "--kv-memory",
        "engine.kv_memory_bytes",
        metavar="SIZE",
        help="KV pool of each rank, such as 2GiB, or 2Gi as Kubernetes writes it.  [default: 512MiB on CPU]",
    ),
    setting(
        "--max-model-len",
        "model.max_model_len",
        type=int,
        metavar="N",
        help="Longest prompt and output.  [default: the model's own]",
    ),
    setting("--prefix-cache", "engine.prefix_cache", type=ON_OFF, help="[default: on]"),
    setting(
        "--offload",
        "offload.enabled",
        type=ON_OFF,
        help="Keep KV beyond the GPU: in host memory, and in storage if there is one.  [default: off]",
    ),
    setting(
        "--host-memory",
        "offload.host_bytes",
        metavar="SIZE",
        help="Host memory of each rank for KV, with --offload on.  [default: twice its KV pool]",
    ),
    setting(
        "--storage",
        "storage.url",
        metavar="URL",
        help="Where KV is stored, with --offload on: file:///directory, s3://bucket/folder, gs:// or az://.  [default: nowhere]",
    ),
    setting(
        "--record",
        "record.dir",
        metavar="DIR",
        help="Where servers record each step and request, for `disagg report DIR`.  [default: nowhere]",
    ),
    setting("--host", "router.host", metavar="HOST", help="Where the router listens.  [default: 127.0.0.1]"),
    setting(
        "--http-port",
        "router.http_port",
        type=int,
        metavar="PORT",
        help="OpenAI HTTP; 0 takes a free one.  [default: 8000]",
    ),
    setting(
        "--grpc-port",
        "router.grpc_port",
        type=int,
        metavar="PORT",
        help="gRPC; 0 takes a free one.  [default: 50051]",
    ),
)


def up_settings(command: Command) -> Command:
    for flag in reversed(FLAGS):
        command = flag(command)
    return command
