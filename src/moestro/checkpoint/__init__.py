"""Checkpoints in safetensors files: read by memory-mapping, written a piece at a time, checked before use."""

from moestro.checkpoint.checksums import write_checksums
from moestro.checkpoint.header import Entry, TensorSpec
from moestro.checkpoint.outputs import ExpertSource
from moestro.checkpoint.read import Checkpoint, open_checkpoint
from moestro.checkpoint.write import plan_shards, shard_names, write_file, write_index

__all__ = [
    "Checkpoint",
    "Entry",
    "ExpertSource",
    "TensorSpec",
    "open_checkpoint",
    "plan_shards",
    "shard_names",
    "write_checksums",
    "write_file",
    "write_index",
]
