"""A batch of requests through the policy: one bad request never fails its neighbours."""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from innerloop.contract import Chunk, Policy, Previous
from innerloop.contract.errors import InnerloopError, NonFiniteError, ObservationError
from innerloop.process.action import ActionLimitError, ActionLimits, check_finite
from innerloop.process.image import ImageSpec, from_frame
from innerloop.serve.pending import Entry
from innerloop.serve.protocol import RequestError

log = logging.getLogger(__name__)
Outcome = tuple[Chunk | Exception, int]  # and how many values a limit clamped


class BatchPolicy(Policy, Protocol):
    """A policy whose metadata says `max_batch` > 1 and that decides for several robots at once."""

    def infer_batch(
        self,
        observations: Sequence[Mapping[str, Any]],
        *,
        noises: Sequence[np.ndarray | None],
        seeds: Sequence[int | None],
        sessions: Sequence[str],
        previous: Sequence[Previous | None],
    ) -> list[Chunk]:
        """One decision a row, continuing `previous[i]` if given; row i depends on input i alone."""
        ...


class SessionPolicy(Policy, Protocol):
    """A policy whose sessions hold memory until they are ended."""

    def session(self, name: str) -> Any:
        """The session of this name; its `end()` gives the memory back."""
        ...


def largest_batch(policy: Policy) -> int:
    """How many robots a policy decides for at once."""
    return int(policy.metadata.get("max_batch", 1)) if hasattr(policy, "infer_batch") else 1


def end_session(policy: Policy, name: str) -> None:
    """Forget a robot for good."""
    if hasattr(policy, "session"):
        keeping: SessionPolicy = policy  # type: ignore[assignment]
        keeping.session(name).end()
    else:
        policy.reset(name)


def close(policy: Policy) -> None:
    """Free what a policy holds, where it has a `close`."""
    if hasattr(policy, "close"):
        policy.close()


def decide(policy: Policy, batch: Sequence[Entry], limits: ActionLimits | None) -> list[Outcome]:
    """A chunk or the error of each entry, in order; never raises for what a policy or a request does."""
    if len(batch) > 1:
        try:
            chunks = _together(policy, batch)
        except Exception as error:  # one of them is bad: find out which by running them alone
            log.warning("a batch of %d failed (%s); its requests run one by one", len(batch), error)
        else:
            return [_checked(chunk, limits) for chunk in chunks]
    return [_alone(policy, entry, limits) for entry in batch]


def describe(error: Exception) -> tuple[str, str]:
    """The code and the text that a client is told; the cause of an unexpected error stays in the log."""
    codes: tuple[tuple[type[Exception], str], ...] = (
        (ObservationError, "observation"),
        (NonFiniteError, "non_finite"),
        (ActionLimitError, "limits"),
        (InnerloopError, "refused"),
    )
    if isinstance(error, RequestError):
        return error.code, str(error)
    for kind, code in codes:
        if isinstance(error, kind):
            return code, str(error)
    return "failed", f"the policy failed with {type(error).__name__}; the server's log has the details"


def self_check(policy: Policy, limits: ActionLimits | None) -> None:
    """Two decisions on one made-up observation with one seed must be finite, equal bit for bit, as wide as `limits`.

    Raises NonFiniteError or InnerloopError; a policy that does not say its cameras and state width is not checked.
    """
    metadata = policy.metadata
    if "cameras" not in metadata or "state_dim" not in metadata:
        return
    random = np.random.default_rng(0)
    sent = ImageSpec(range=metadata.get("processing", {}).get("image", {}).get("range", "uint8"))
    pictures = {str(name): random.integers(0, 256, (64, 64, 3), np.uint8) for name in metadata["cameras"]}
    observation = {
        "images": {name: from_frame(picture, sent) for name, picture in pictures.items()},
        "state": np.zeros(int(metadata["state_dim"]), np.float32),
        "prompt": "self-check",
    }
    chunks = [policy.infer(observation, seed=0, session="self-check") for _ in range(2)]
    end_session(policy, "self-check")
    check_finite(chunks[0].actions, "the actions of the self-check")
    if limits is not None:
        limits.check(chunks[0].actions.shape[-1])
    if chunks[0].actions.tobytes() != chunks[1].actions.tobytes():
        raise InnerloopError(
            "the self-check got two answers to one observation and seed; only a reproducible policy is served"
        )


def _together(policy: Policy, batch: Sequence[Entry]) -> list[Chunk]:
    requests = [entry.request for entry in batch]
    batched: BatchPolicy = policy  # type: ignore[assignment]
    chunks = batched.infer_batch(
        [request.observation for request in requests],
        noises=[request.noise for request in requests],
        seeds=[request.seed for request in requests],
        sessions=[request.session for request in requests],
        previous=[request.previous for request in requests],
    )
    if len(chunks) != len(batch):
        raise InnerloopError(f"a batch of {len(batch)} got {len(chunks)} answers")
    return chunks


def _alone(policy: Policy, entry: Entry, limits: ActionLimits | None) -> Outcome:
    request = entry.request
    continued = {} if request.previous is None else {"previous": request.previous}
    try:
        chunk = policy.infer(
            request.observation, noise=request.noise, seed=request.seed, session=request.session, **continued
        )
    except InnerloopError as error:
        return error, 0
    except Exception as error:  # the edge of the server: the client gets an answer, the log the cause
        log.exception("the policy failed for session %r", request.session)
        return error, 0
    finally:
        entry.finished = time.perf_counter()
    return _checked(chunk, limits)


def _checked(chunk: Chunk, limits: ActionLimits | None) -> Outcome:
    try:
        check_finite(chunk.actions, "the actions")
        if limits is None:
            return chunk, 0
        within = limits.apply(chunk.actions)
    except InnerloopError as error:
        return error, 0
    if within is chunk.actions:
        return chunk, 0
    clamped = int((within != chunk.actions).sum())
    return Chunk(within, chunk.normalized, chunk.timing, chunk.receipt), clamped
