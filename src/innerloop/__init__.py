"""innerloop runs robot policies as fast as the GPU allows, and proves that the actions are right."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from innerloop.contract import Chunk, InnerloopError, Plan, Policy, Previous, Receipt
    from innerloop.engine import LoadedPolicy, load, random_policy
    from innerloop.process import Edge, ImageSpec

__version__ = "0.1.0"

# Names are imported on first use: `import innerloop.client` must not bring in torch.
_HOMES = {
    "Chunk": "contract",
    "Edge": "process",
    "ImageSpec": "process",
    "InnerloopError": "contract",
    "LoadedPolicy": "engine",
    "Plan": "contract",
    "Policy": "contract",
    "Previous": "contract",
    "Receipt": "contract",
    "load": "engine",
    "random_policy": "engine",
}

__all__ = [
    "Chunk",
    "Edge",
    "ImageSpec",
    "InnerloopError",
    "LoadedPolicy",
    "Plan",
    "Policy",
    "Previous",
    "Receipt",
    "__version__",
    "load",
    "random_policy",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'innerloop' has no attribute '{name}'")
    return getattr(import_module(f"innerloop.{_HOMES[name]}"), name)
