"""Other people's packages, imported when they are asked for."""

import importlib
from typing import Any

from innerloop.contract.errors import InnerloopError


def imported(module: str, remedy: str) -> Any:
    """A module. Raises InnerloopError with why it does not import and how to get it."""
    try:
        return importlib.import_module(module)
    except (ImportError, SyntaxError) as error:
        raise InnerloopError(
            f"this comparison needs the module {module}, which does not import here ({error}); {remedy}"
        ) from error
