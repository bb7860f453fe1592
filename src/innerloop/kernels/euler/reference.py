"""The last projection and the solver's update."""

import torch.nn.functional as F
from torch import Tensor


def project_and_step(hidden: Tensor, weight: Tensor, bias: Tensor, x: Tensor, dt: float) -> Tensor:
    """x + dt * (hidden W^T + b), all in fp32."""
    return x + dt * F.linear(hidden.float(), weight.float(), bias.float())
