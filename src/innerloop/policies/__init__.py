"""One folder a policy family: config, model, weights, process, plan. Imports blocks and what lies below."""

from innerloop.policies.family import FAMILIES, Family, detect

__all__ = ["FAMILIES", "Family", "detect"]
