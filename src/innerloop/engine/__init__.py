"""Checkpoint -> policy -> plan -> session: the only room that knows every other."""

from innerloop.engine.assembly import NO_FILES, Identity, RandomWeights, assemble
from innerloop.engine.loaded import LoadedPolicy
from innerloop.engine.opening import Opened, Sketch, load, open_policy, random_policy, sketch
from innerloop.engine.placement import DTYPES, Placement, place

__all__ = [
    "DTYPES",
    "NO_FILES",
    "Identity",
    "LoadedPolicy",
    "Opened",
    "Placement",
    "RandomWeights",
    "Sketch",
    "assemble",
    "load",
    "open_policy",
    "place",
    "random_policy",
    "sketch",
]
