"""The generated protobuf modules. The only place that names `disagg.v1`; others say `pb.server.RouterFrame`."""

from __future__ import annotations

from disagg.v1 import inference_pb2 as inference
from disagg.v1 import peer_pb2 as peer
from disagg.v1 import server_pb2 as server

__all__ = ["inference", "peer", "server"]
