"""One set of weights on both sides: official modules share ours, under the checkpoint's names."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import nn

from innerloop.contract.errors import InnerloopError
from innerloop.engine import LoadedPolicy
from innerloop.weights import NameTable


def share(policy: LoadedPolicy, module: nn.Module, prefix: str = "") -> None:
    """Make every parameter of `module` the policy's own memory, or a copy in the parameter's dtype where that differs.

    prefix: what stands before the module's names in a checkpoint. The policy is loaded with kernels="reference", whose
    weights are not packed. Raises InnerloopError, with nothing changed, where names or shapes do not match.
    """
    table, ours = policy.family.name_table(policy.config), dict(policy.model.named_parameters())
    theirs = {prefix + name: value for name, value in module.named_parameters(remove_duplicate=False)}
    wanted = {target: parts for target, parts in table.targets.items() if parts[0].startswith(prefix)}
    filled = {part for parts in wanted.values() for part in parts}
    problems = [f"a checkpoint has no '{name}'" for name in theirs if name not in filled and not _unread(name, table)]
    for target, parts in wanted.items():
        problems += _problems(ours.get(target), parts, theirs)
    if problems:
        shown = "; ".join(problems[:3])
        raise InnerloopError(
            f"{type(module).__name__} does not take the weights of this {policy.family.name} ({len(problems)} problems, "
            f"such as {shown}): it is built with the published sizes, or is of another version; see docs/measuring.md"
        )
    for target, parts in wanted.items():
        rows = torch.split(ours[target], [theirs[part].shape[0] for part in parts])
        for part, piece in zip(parts, rows, strict=True):
            theirs[part].data = piece.detach().view(theirs[part].shape).to(theirs[part].dtype)
    module.requires_grad_(False).eval()


def _unread(name: str, table: NameTable) -> bool:
    """Whether no decision reads it."""
    return name in table.ties.values() or any(fnmatchcase(name, unused) for unused in table.ignored)


def _problems(ours: torch.Tensor | None, parts: tuple[str, ...], theirs: Mapping[str, torch.Tensor]) -> list[str]:
    missing = [f"it has no '{part}'" for part in parts if part not in theirs]
    if missing or ours is None:
        return missing or [f"the weights of '{parts[0]}' are packed"]
    shapes = [tuple(theirs[part].shape) for part in parts]
    rows, inner = sum(shape[0] for shape in shapes), [torch.Size(shape[1:]).numel() for shape in shapes]
    if rows != ours.shape[0] or set(inner) != {ours[0].numel()}:
        return [f"'{parts[0]}' is {list(shapes[0])}, which does not fit {list(ours.shape)} of ours"]
    return []
