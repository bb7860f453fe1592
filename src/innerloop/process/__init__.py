"""Observation to model inputs and actions back: small numpy steps, each beside its inverse. No device, no model."""

from innerloop.process.action import ActionLimitError, ActionLimits, LimitsError, RelativeActions
from innerloop.process.build import Edge, flow_processor
from innerloop.process.cameras import Cameras
from innerloop.process.edge import edge_of, read_edge
from innerloop.process.image import FRAME_BYTES, ImageSpec, from_frame, resize_with_pad, to_frame
from innerloop.process.pipeline import Context, Prepared, Processor
from innerloop.process.state import Normalizer, discretize
from innerloop.process.synthetic import synthetic_processor
from innerloop.process.text import Tokenizer

__all__ = [
    "FRAME_BYTES",
    "ActionLimitError",
    "ActionLimits",
    "Cameras",
    "Context",
    "Edge",
    "ImageSpec",
    "LimitsError",
    "Normalizer",
    "Prepared",
    "Processor",
    "RelativeActions",
    "Tokenizer",
    "discretize",
    "edge_of",
    "flow_processor",
    "from_frame",
    "read_edge",
    "resize_with_pad",
    "synthetic_processor",
    "to_frame",
]
