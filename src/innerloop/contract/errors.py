"""Errors a user can act on: each names the thing that is wrong and the remedy."""


class InnerloopError(Exception):
    """Base of every error raised on purpose."""


class PlanError(InnerloopError):
    """A plan breaks the contract, or a stage touched what it did not declare."""


class CheckpointError(InnerloopError):
    """A checkpoint directory cannot be read as what it claims to be."""


class MemoryPlanError(InnerloopError):
    """The memory plan exceeds the cap or the free memory; nothing was allocated."""


class ObservationError(InnerloopError):
    """An observation (image, state, prompt, noise) is not what the checkpoint expects."""


class NonFiniteError(InnerloopError):
    """The model produced NaN or infinity; no action is returned."""


class PrecisionError(InnerloopError):
    """The requested precision cannot be met on this device or by these weights."""


class CapsuleError(InnerloopError):
    """A capsule was refused: wrong fingerprint, bad checksum, or a stage in flight."""
