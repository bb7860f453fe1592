"""Processing for an embodiment: camera frames and an instruction as one chat turn, state and actions by modality key."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from innerloop.contract import CheckpointError, ObservationError, Previous
from innerloop.process import modality
from innerloop.process.build import Edge
from innerloop.process.cameras import Cameras
from innerloop.process.chat import ChatStep, framing
from innerloop.process.crop import Framing
from innerloop.process.guidance import holds
from innerloop.process.image import ImageSpec
from innerloop.process.modality import Group
from innerloop.process.pipeline import Context, LimitStep, Pipeline, Processor, Widths
from innerloop.process.qwen3vl import ChatTokenizer, Encoder, ImageRules, Patches, Slots, Special, image_rules
from innerloop.process.synthetic import token_a_word
from innerloop.weights import Checkpoint
from innerloop.weights.embodiments import Embodiment, embodiment


class Sizes(Protocol):
    """What the processing needs of a policy's sizes. frames: time steps of each camera."""

    @property
    def vision(self) -> Patches: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def slots(self) -> Slots: ...
    @property
    def cameras(self) -> tuple[str, ...]: ...
    @property
    def frames(self) -> int: ...
    @property
    def chunk(self) -> int: ...
    @property
    def max_state_dim(self) -> int: ...
    @property
    def max_action_dim(self) -> int: ...


RAMP = 6.0  # rtc_ramp_rate of GR00T N1.7's configuration
_NOT_ASKED = ("normalization", "state_dim", "action_dim", "relative", "state_in_prompt")


def embodied_processor(sizes: Sizes, checkpoint: Checkpoint, edge: Edge) -> Processor:
    """Raises CheckpointError or ObservationError, naming what is wrong, before any weight is read."""
    given = [name for name in _NOT_ASKED if getattr(edge, name) is not None]
    if given:
        raise CheckpointError(f"{', '.join(given)} were given; a GR00T checkpoint states them itself: leave them out")
    tokenizer = Path(edge.tokenizer) if edge.tokenizer else checkpoint.tokenizer
    tokenizer = tokenizer / "tokenizer.json" if tokenizer is not None and tokenizer.is_dir() else tokenizer
    if tokenizer is None or tokenizer.suffix != ".json":
        raise CheckpointError(
            f"{checkpoint.path} has no tokenizer.json: copy the one of nvidia/Cosmos-Reason2-2B (a Qwen3-VL-2B) there, "
            "or pass its path as tokenizer="
        )
    found = embodiment(checkpoint)
    encoder = Encoder(
        ChatTokenizer.open(tokenizer),
        image_rules([checkpoint.path], sizes.vision),
        sizes.slots,
        answer=False,
    )
    chat = ChatStep(
        Cameras(sizes.cameras, edge.rename, absent=edge.absent),
        edge.images,
        framing(found.settings),
        encoder,
        sizes.frames,
        found.settings.get("formalize_language") is not False,
    )
    return _assembled(sizes, found, chat, edge)


def synthetic_embodied(sizes: Sizes) -> Processor:
    """Processing for random weights: one token a word, state and actions of the model's width between -1 and 1."""
    vision, vocabulary = sizes.vision, sizes.vocabulary
    special = Special(vocabulary - 3, vocabulary - 2, vocabulary - 1)
    rules = ImageRules(vision.patch_size, vision.merge, vision.temporal, min_pixels=1)
    side = int(sizes.slots.patches**0.5) * vision.patch_size
    tokenizer = ChatTokenizer(partial(token_a_word, vocabulary=vocabulary - 3), lambda ids: "", special)
    encoder = Encoder(tokenizer, rules, sizes.slots, answer=False)
    chat = ChatStep(Cameras(sizes.cameras), ImageSpec(), Framing((side, side), side), encoder, 1, formal=True)
    widths = {"state": sizes.max_state_dim, "action": sizes.max_action_dim}
    made = Embodiment(
        name="random weights",
        index=0,
        modality={kind: {"modality_keys": [kind]} for kind in widths},
        statistics={k: {k: {"min": [-1.0] * width, "max": [1.0] * width}} for k, width in widths.items()},
        settings={},
    )
    return _assembled(sizes, made, chat, Edge())


class EmbodiedProcessor(Processor):
    """Both directions of one embodiment's processing."""

    def guidance(self, previous: Previous | None, context: Context) -> dict[str, np.ndarray]:
        """`previous` as the base class, `guidance` by GR00T's own rule, which has one schedule. Raises ObservationError."""
        if getattr(previous, "schedule", None) == "PREFIX":
            raise ObservationError(
                "a GR00T policy is not trained to be given a prefix of actions; it continues a chunk by its own rule: "
                "leave schedule= out (in execution, mode realtime)"
            )
        found = super().guidance(previous, context)
        del found["prefix_length"]
        if previous is not None:
            count = len(previous.actions)
            horizon = count if previous.horizon is None else min(previous.horizon, count)
            found["guidance"] = holds(self.widths.chunk, previous.delay, horizon, RAMP)
        return found


def _assembled(sizes: Sizes, found: Embodiment, chat: ChatStep, edge: Edge) -> Processor:
    states, actions = tuple(modality.states(found)), tuple(modality.actions(found))
    widths = _widths(sizes, found, states, actions)
    horizon = min(len(found.modality["action"].get("delta_indices") or range(sizes.chunk)), sizes.chunk)
    clip = found.settings.get("clip_outliers") is not False
    pipeline = Pipeline()
    if edge.limits is not None:
        edge.limits.check(widths.action)
        pipeline = pipeline.push(LimitStep(edge.limits))
    gripper = modality.gripper(found, actions)
    if gripper is not None:
        pipeline = pipeline.push(modality.GripperStep(gripper))
    pipeline = pipeline.push(modality.GroupStep(states, actions, horizon, clip, sizes.max_state_dim)).push(chat)
    facts = {
        "family": "groot",
        "embodiment": found.name,
        "cameras": list(chat.cameras.required),
        "image": {**vars(edge.images), "time_steps": sizes.frames, "resized_by": "plan", **vars(chat.framing)},
        "state": {"width": widths.state, "padded": widths.max_state, "keys": _facts(states)},
        "action": {"width": widths.action, "horizon": horizon, "keys": _facts(actions), "libero_gripper": gripper},
        "prompt": {
            "template": "Qwen3-VL chat",
            "capacity": sizes.slots.tokens,
            "formal": chat.formal,
            "tokenizer": chat.encoder.tokenizer.source,
        },
        "horizon": horizon,
        "state_groups": {one.key: one.width for one in states},
        "action_groups": {one.key: one.width for one in actions},
    }
    return EmbodiedProcessor(pipeline, chat.cameras, widths, np.float32, facts)


def _widths(sizes: Sizes, found: Embodiment, states: Sequence[Group], actions: Sequence[Group]) -> Widths:
    state, action = (sum(one.width for one in groups) for groups in (states, actions))
    taken = state + sum(one.width for one in states if one.scale == "angle")
    for name, used, room in (("state", taken, sizes.max_state_dim), ("action", action, sizes.max_action_dim)):
        if not 0 < used <= room:
            raise CheckpointError(f"the {name} of '{found.name}' has {used} numbers; the model takes 1 to {room}")
    return Widths(state, sizes.max_state_dim, action, sizes.max_action_dim, sizes.chunk)


def _facts(groups: Sequence[Group]) -> dict[str, Any]:
    return {one.key: {"scale": one.scale, "relative": one.relative} for one in groups}
