"""`python -m bench.expert [--tokens 50] [--prefix 576]`: an action expert's solver over packed and over dense weights.

18 layers and 10 Euler steps in one graph, as the action stage runs them: the few-row kernels, then own tiles in a chain
of dependent launches; both checked against fp32. Then each kernel of the latter 180 times in a row.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch

from bench.skinny import captured, microseconds
from innerloop.blocks.expert import EPS, ActionExpert, Cache, Modulation
from innerloop.blocks.sizes import PUBLISHED, DecoderSizes
from innerloop.kernels import attention, launch, linear, norm, skinny, use_kernels

STEPS, ACTIONS = 10, 32


class Subject:
    """An expert with random weights twice, dense and packed, and what one decision gives it."""

    def __init__(
        self, tokens: int, prefix: int, sizes: DecoderSizes = PUBLISHED["gemma_300m"], device: str = "cuda"
    ) -> None:
        torch.manual_seed(0)
        self.tokens, self.start, self.sizes, self.device = tokens, prefix, sizes, device
        self.dense, self.packed = (self._expert() for _ in range(2))
        for theirs, ours in zip(self.packed.parameters(), self.dense.parameters(), strict=True):
            theirs.data = ours.data.clone()
        if device == "cuda":
            self.packed.pack()
        keys, values = (self._random(sizes.depth, 1, prefix + tokens, sizes.kv_heads, sizes.head_dim) for _ in "kv")
        valid = torch.ones(1, prefix + tokens, dtype=torch.int32, device=device)
        valid[:, prefix - prefix // 36 : prefix] = 0  # the end of a padded prompt
        self.cache = Cache(keys, values, valid)
        self.table = self._random(2, 2 * sizes.depth + 1, 3, sizes.width).float() * 0.2
        angle = self._random(1, tokens, sizes.head_dim // 2).float()
        self.rotary = (angle.cos(), angle.sin())
        self.action_in, self.action_out = (
            self._random(*shape).float() / 8 for shape in ((sizes.width, ACTIONS), (ACTIONS, sizes.width))
        )
        self.bias_in, self.bias_out = self._random(sizes.width).float(), self._random(ACTIONS).float()
        self.noise = self._random(1, tokens, ACTIONS).float()
        self.x, self.residual = (self._random(1, tokens, sizes.width) for _ in range(2))
        self.hidden = self._random(1, tokens, sizes.mlp_dim)
        self.mixed = self._random(1, tokens, sizes.heads * sizes.head_dim)

    def norms(self, given: torch.Tensor | None = None) -> list[Modulation]:
        """Of every layer's two norms; two rows of each where rows are given."""
        rows = self.table[0] if given is None else self.table.movedim(0, 2)
        return [Modulation(*norm) for norm in rows[:-1]]

    def forward(self, expert: ActionExpert, x: torch.Tensor, given: torch.Tensor | None = None) -> torch.Tensor:
        """All layers once."""
        return expert(x, self.norms(given), self.cache, self.rotary, self.start, given)

    def solve(self, expert: ActionExpert, steps: int = STEPS, given: torch.Tensor | None = None) -> torch.Tensor:
        """All Euler steps."""
        state, (scale, shift, _) = self.noise, self.table[0, -1]
        for _ in range(steps):
            x = skinny.project_in(state, self.action_in, self.bias_in, torch.bfloat16)
            x = self.forward(expert, x, given)
            out = (self.action_out, self.bias_out)
            state = skinny.norm_project_step(x, scale, shift, EPS, *out, state, -1 / STEPS)
        return state

    def kernels(self) -> dict[str, Callable[[int], Any]]:
        """What a layer launches over dense weights, by name; each takes the layer's number."""
        s, layers, c = self.sizes, self.dense.layers, self.cache
        q = self._random(1, self.tokens, s.heads, s.head_dim)
        scale, shift, gate = self.table[0, 0]

        def joined(i: int, y: torch.Tensor, weight: str) -> Any:
            delta, _ = linear.deferred(y, getattr(layers[i], weight))
            return norm.gated_add_rms_norm(self.residual, delta, gate, scale, shift, EPS)

        return {
            "qkv, rotation": lambda i: linear.rotated(
                self.x, layers[i].qkv_weight, *self.rotary, s.heads, s.kv_heads, c.keys[i], c.values[i], self.start
            ),
            "attention": lambda i: attention.continued(
                q, c.keys[i], c.values[i], c.valid, s.head_dim**-0.5, self.start
            ),
            "out, norm": lambda i: joined(i, self.mixed, "out_weight"),
            "gate-up, unit": lambda i: linear.gated(self.x, layers[i].gate_up_weight, "gelu_tanh"),
            "down, norm": lambda i: joined(i, self.hidden, "down_weight"),
        }

    def errors(self) -> dict[str, float]:
        """Relative error of one pass of all layers against fp32: torch in bf16, the few-row kernels, own tiles."""
        with use_kernels("reference"):
            same = self.forward(self.dense, self.x).double()
            keys, values = self.cache.keys, self.cache.values
            wide = Cache(keys.float(), values.float(), self.cache.valid)
            self.dense.float()
            truth = self.dense(self.x.float(), self.norms(), wide, self.rotary, self.start).double()
            self.dense.bfloat16()
        found = {"torch": same, "few-row kernels": self.forward(self.packed, self.x).double()}
        found["own tiles"] = self.forward(self.dense, self.x).double()
        return {name: float((y - truth).norm() / truth.norm()) for name, y in found.items()}

    def _expert(self) -> ActionExpert:
        with torch.device(self.device):
            made = ActionExpert(self.sizes).requires_grad_(False)
        for parameter in made.parameters():
            parameter.data = self._random(*parameter.shape) * parameter.shape[1] ** -0.5
        return made

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).bfloat16()


def in_a_row(subject: Subject, call: Callable[[int], Any]) -> float:
    """Microseconds of one kernel (or pair) of a layer, launched once a layer and step, each before its predecessor ends."""

    def many() -> None:
        with launch.dependent_launch():
            for _ in range(STEPS):
                for i in range(subject.sizes.depth):
                    call(i)

    return microseconds(captured(many)) / (STEPS * subject.sizes.depth)


def main() -> None:
    """Prints errors, whole solvers, then kernels."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=50)
    parser.add_argument("--prefix", type=int, default=576)
    options = parser.parse_args()
    subject = Subject(options.tokens, options.prefix)
    layers = STEPS * subject.sizes.depth
    for name, error in subject.errors().items():
        print(f"{name:20s} error {error:.2e} of fp32's norm", flush=True)
    given = torch.full((1, 1), options.tokens // 2, dtype=torch.int32, device="cuda")
    for name, expert in (("few-row kernels", subject.packed), ("own tiles", subject.dense)):
        for label, prefix in (("", None), (", half of the rows given", given)):
            us = microseconds(captured(lambda e=expert, p=prefix: subject.solve(e, given=p)))  # type: ignore[misc]
            print(f"{name + label:45s} {us / 1e3:7.3f} ms  {us / layers:6.2f} us a layer", flush=True)
    for name, call in subject.kernels().items():
        print(f"{name:20s} {in_a_row(subject, call):6.2f} us", flush=True)


if __name__ == "__main__":
    main()
