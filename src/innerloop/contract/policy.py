"""What a policy is to everybody who calls one: engine, server, client, evaluator."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class Receipt:
    """What really ran: enough to say later where these actions came from."""

    fingerprint: str
    policy: str
    precision: str
    device: str
    kernels: str
    stages: tuple[str, ...]  # the stages refreshed for this decision, in order
    capacity: int  # prompt capacity used, tokens
    prompt_tokens: int
    seed: int | None = None
    statistics: str = ""
    weights_version: int = 0
    bytes: Mapping[str, int] = field(default_factory=dict)  # of weights and of buffers by role


@dataclass(frozen=True)
class Chunk:
    """actions: float32 [horizon, action_dim] in robot units; normalized: the same before un-normalisation."""

    actions: np.ndarray
    normalized: np.ndarray
    timing: dict[str, float] = field(default_factory=dict)  # milliseconds by stage
    receipt: Receipt | None = None


@dataclass(frozen=True)
class Previous:
    """What real-time chunking continues: the part of the last chunk that is not executed yet.

    actions: float [n, action_dim] in robot units, row 0 due now; delay: control steps that will pass before the new
    chunk can act; horizon: rows of `actions` that count at all (default: n). schedule: how the pull falls from row `delay`
    to row `horizon`: LINEAR, EXP, ONES (it does not) or ZEROS (there is none); LeRobot's RTCAttentionSchedule. Or PREFIX,
    for policies trained so (arXiv:2512.05964): nothing pulls, the first `delay` rows of the new chunk are these actions.
    """

    actions: np.ndarray
    delay: int = 0
    horizon: int | None = None
    schedule: str = "LINEAR"


class Policy(Protocol):
    """The two-method interface that the engine, the server and the remote client share."""

    @property
    def metadata(self) -> dict[str, Any]:
        """Plain data: family, fingerprint, precision, cameras, state and action widths, horizon, capacities."""
        ...

    def infer(
        self,
        observation: Mapping[str, Any],
        *,
        noise: np.ndarray | None = None,
        seed: int | None = None,
        session: str = "default",
        previous: Previous | None = None,
    ) -> Chunk:
        """One decision, continuing `previous` if given. Raises ObservationError on bad input and NonFiniteError on bad output."""
        ...

    def reset(self, session: str = "default") -> None:
        """Forget a session's episode state."""
        ...
