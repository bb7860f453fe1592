"""Checkpoint files become tensors in their final buffers, statistics and an identity. Knows no model and no robot."""

from innerloop.weights.checkpoint import Checkpoint, open_checkpoint
from innerloop.weights.identity import digest_json, fingerprint, processors_digest, statistics_digest
from innerloop.weights.load import Account, NameTable, check_weights, load_weights
from innerloop.weights.memory import MemoryPlan, MemoryRow, free_memory
from innerloop.weights.processors import ProcessorStep
from innerloop.weights.source import TensorInfo, TensorSource

__all__ = [
    "Account",
    "Checkpoint",
    "MemoryPlan",
    "MemoryRow",
    "NameTable",
    "ProcessorStep",
    "TensorInfo",
    "TensorSource",
    "check_weights",
    "digest_json",
    "fingerprint",
    "free_memory",
    "load_weights",
    "open_checkpoint",
    "processors_digest",
    "statistics_digest",
]
