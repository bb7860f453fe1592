"""What the engine asks of a policy family: everything that differs between families, as functions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from innerloop.contract import Plan, Previous
from innerloop.process.build import Edge
from innerloop.weights import Checkpoint, NameTable


class PolicyConfig(Protocol):
    """What the engine reads of any family's config."""

    @property
    def cameras(self) -> tuple[str, ...]: ...
    @property
    def chunk(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def prompt_capacity(self) -> int: ...
    @property
    def max_action_dim(self) -> int: ...


class Context(Protocol):
    """What a processor remembers of an observation until its chunk comes back."""

    @property
    def prompt_tokens(self) -> int: ...


class Prepared(Protocol):
    """Plan inputs by name (without noise, and continuing no chunk), and the context."""

    @property
    def inputs(self) -> dict[str, Any]: ...
    @property
    def context(self) -> Any: ...


class Draft(Protocol):
    """An observation half prepared: the plan inputs, by name, that its images alone give."""

    @property
    def inputs(self) -> dict[str, Any]: ...


class Widths(Protocol):
    """Numbers in the robot's state and in one of its actions, and what the model pads them to."""

    @property
    def state(self) -> int: ...
    @property
    def action(self) -> int: ...
    @property
    def max_action(self) -> int: ...
    @property
    def chunk(self) -> int: ...


class Processor(Protocol):
    """Observation -> plan inputs, normalised chunk -> robot units. `prepare` is `begin` and `complete` in one."""

    @property
    def widths(self) -> Widths: ...
    def prepare(self, observation: Mapping[str, Any]) -> Prepared: ...
    def begin(self, observation: Mapping[str, Any]) -> Draft: ...
    def complete(self, draft: Any) -> Prepared: ...
    def finish(self, normalized: np.ndarray, context: Any) -> np.ndarray: ...
    def guidance(self, previous: Previous | None, context: Any) -> dict[str, np.ndarray]: ...
    def noise(self, noise: object = None, seed: int | None = None) -> np.ndarray: ...
    def describe(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Family:
    """One policy family. `recognises` looks at headers and config alone; at most one family may say yes."""

    name: str
    summary: str
    recognises: Callable[[Checkpoint], bool]
    config: Callable[[Checkpoint, int | None], Any]  # checkpoint, horizon given by the caller
    processor: Callable[[Any, Checkpoint, Edge], Processor]
    model: Callable[[Any], nn.Module]
    float32: tuple[str, ...]  # parameter name patterns kept in float32 at any precision
    name_table: Callable[[Any], NameTable]
    plans: Callable[[Any, int, torch.dtype, str], dict[int, Plan]]  # model, batch, dtype, fingerprint
    sample: Callable[[Any, int, int], dict[str, Any]]  # config, batch, capacity -> inputs for warm-up and self-check
    default: Callable[[int, int, int], Any]  # cameras, chunk, steps -> config of the published full size
    synthetic: Callable[[Any], Processor]  # processing for random weights
