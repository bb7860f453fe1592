"""One folder a policy family: config, model, weights, process, plan. Imports blocks and what lies below."""

from innerloop.policies.family import FAMILIES, detect
from innerloop.policies.interface import Family

__all__ = ["FAMILIES", "Family", "detect"]
