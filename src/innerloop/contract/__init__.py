"""The nouns everybody passes: buffer, stage, plan, policy, errors. Imports nothing of ours."""

from innerloop.contract.buffer import Buffer, Role
from innerloop.contract.errors import (
    CapsuleError,
    CheckpointError,
    InnerloopError,
    MemoryPlanError,
    NonFiniteError,
    ObservationError,
    PlanError,
    PrecisionError,
)
from innerloop.contract.plan import Plan
from innerloop.contract.policy import Chunk, Policy, Previous, Receipt
from innerloop.contract.stage import Stage

__all__ = [
    "Buffer",
    "CapsuleError",
    "CheckpointError",
    "Chunk",
    "InnerloopError",
    "MemoryPlanError",
    "NonFiniteError",
    "ObservationError",
    "Plan",
    "PlanError",
    "Policy",
    "PrecisionError",
    "Previous",
    "Receipt",
    "Role",
    "Stage",
]
