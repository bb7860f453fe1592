"""starVLA's parameters: Qwen3-VL below, one of three heads above."""

from collections.abc import Iterator

import torch
from torch import nn

from innerloop.blocks import dit, dit_head, flow, qwen3, qwen3_vl
from innerloop.blocks.affine import affine
from innerloop.blocks.dit import DiT, DiTSizes
from innerloop.blocks.projections import Projections
from innerloop.blocks.qwen3_vl import Qwen3VL
from innerloop.blocks.regression import RegressionHead
from innerloop.policies.starvla.config import StarVlaConfig

# Read in float32 at any precision: applied once a checkpoint, or around the solver's own values.
FLOAT32 = tuple(f"head.{name}" for name in ("action_in_*", "action_mix_*", "decode_out_*")) + tuple(
    f"head.dit.{name}" for name in dit.FLOAT32
)


class FlowHead(nn.Module):
    """Noise to actions through a DiT: QwenPI, QwenPI_v3 (a context a block) and QwenGR00T (one context)."""

    def __init__(self, config: StarVlaConfig, sizes: DiTSizes) -> None:
        super().__init__()
        width, hidden, dims = sizes.width, config.hidden, config.max_action_dim
        # Dense where tokens mix: at 49 rows the few-row kernels lose to a chain of dependent launches (docs/LOG.md).
        self.config, self.dit = config, DiT(sizes, 0 if config.tokens_mix else config.head_tokens)
        self.action_in_weight, self.action_in_bias = affine(width, dims)
        self.action_mix_weight, self.action_mix_bias = affine(width, 2 * width)
        self.action_out_weight, self.action_out_bias = affine(width, width)
        self.decode_in_weight, self.decode_in_bias = affine(hidden, sizes.output or width)
        self.decode_out_weight, self.decode_out_bias = affine(dims, hidden)
        if config.positions:
            self.place = nn.Parameter(torch.empty(config.positions, width))
        if config.tokens_mix:
            self.future = nn.Parameter(torch.empty(config.future_tokens, width))
        if config.state_token:
            self.state_in_weight, self.state_in_bias = affine(hidden, config.state_dim)
            self.state_out_weight, self.state_out_bias = affine(width, hidden)
        columns = config.vlm.language.width
        self.projections = (
            Projections(len(sizes.cross_blocks), sizes.context_width, columns) if config.projected else None
        )

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The parameters around the DiT, by name."""
        return dict(self.named_parameters(recurse=False))

    def tables(self) -> dict[str, torch.Tensor]:
        """What depends on weights and step index alone, by static buffer."""
        times = flow.buckets(self.config.steps, self.config.buckets, self.action_mix_weight.device)
        inner, mix = (self.action_in_weight, self.action_in_bias), (self.action_mix_weight, self.action_mix_bias)
        return dit_head.tables(self.dit, times, inner, mix, (self.decode_in_weight, self.decode_in_bias))

    def contexts(self, outputs: Iterator[torch.Tensor]) -> torch.Tensor:
        """The language model's layers in turn -> what the cross blocks read: [B, T, C], or one each, stacked."""
        if not self.config.layerwise:
            return qwen3_vl.last(outputs)
        read = [x for i, x in enumerate(outputs) if self.dit.sizes.crosses(i)]
        return torch.stack(read) if self.projections is None else self.projections(read)

    def prefix(self, state_token: torch.Tensor | None, batch: int) -> torch.Tensor | None:
        """What stands before the action tokens, [B, n, D]; None where no block lets one token see another.

        Then these tokens reach no action (starVLA computes them all the same: 32 rows beside the chunk's).
        """
        if not self.config.tokens_mix:
            return None
        future = self.future[None].expand(batch, -1, -1)
        return future if state_token is None else torch.cat([state_token, future], dim=1)


class StarVla(nn.Module):
    """The backbone and its head; QwenFast has none of its own but the vocabulary's."""

    def __init__(self, config: StarVlaConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Qwen3VL(config.vlm)
        if config.dit is not None:
            self.head = FlowHead(config, config.dit)
        elif config.framework == "QwenOFT":
            self.regression = RegressionHead(config.vlm.language.width, config.max_action_dim)
        else:
            self.vocabulary = qwen3.Qwen3Head(config.vlm.language)
