"""Trains the demonstration policy on recorded experts, with LeRobot's own model and loss, on one device.

Run from the repository's root in an environment with LeRobot 0.6.1 and innerloop on the path:
python -m recipes.demo_policy.train OUTPUT --seconds 360
"""

import argparse
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from recipes.demo_policy import data, model

_VARIANTS = 16  # of every sample's prompt, each with other noise on its state


Statistics = dict[str, dict[str, Tensor]]


class Words:
    """Prompts as LeRobot's processor tokenises them."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.tokenizer.enable_padding(length=model.CAPACITY)

    def __call__(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        """-> tokens and mask, int64 [N, CAPACITY]."""
        found = self.tokenizer.encode_batch(texts)
        return torch.tensor([each.ids for each in found]), torch.tensor([each.attention_mask for each in found])


def prompts(samples: data.Samples, statistics: Statistics, jitter: tuple[float, float]) -> list[str]:
    """LeRobot's pi0.5 prompts, the normalised states disturbed by noise whose size is drawn for every sample."""
    of = statistics["observation.state"]
    normal = (samples.states - of["q01"]) / (of["q99"] - of["q01"]) * 2 - 1
    low, high = jitter
    if high > 0:
        size = low * (high / low) ** torch.rand(len(samples), 1)
        normal = normal + size * torch.randn_like(normal)
    bins = np.digitize(normal.numpy(), np.linspace(-1, 1, 257)[:-1]) - 1
    return [
        f"Task: {task}, State: {' '.join(map(str, row))};\nAction: "
        for task, row in zip(samples.prompts, bins.tolist(), strict=True)
    ]


class Batches:
    """Everything on the device: frames, tokens of the states as they are and disturbed, normalised chunks.

    jitter: smallest and largest standard deviation of the states' noise, normalised. A prompt spells its state out, so
    with little noise it is the sample's name: the policy learns chunks by heart and does not look at the frames.
    """

    def __init__(self, samples: data.Samples, before: Any, statistics: Statistics, options: argparse.Namespace) -> None:
        device, words = options.device, Words(options.directory)
        given = {"observation.state": samples.states, "action": samples.chunks, "task": list(samples.prompts)}
        batch = before(given)
        exact = words(prompts(samples, statistics, (0.0, 0.0)))
        assert torch.equal(exact[0], batch["observation.language.tokens"]), "our prompts are not LeRobot's"
        variants = [exact, *(words(prompts(samples, statistics, options.jitter)) for _ in range(_VARIANTS))]
        self.tokens = torch.stack([each[0] for each in variants]).to(device)
        self.valid = torch.stack([each[1] for each in variants]).bool().to(device)
        self.actions = torch.nn.functional.pad(batch["action"].float(), (0, 28)).to(device)
        self.frames = samples.frames.to(device)
        rows = torch.arange(len(samples))
        self.training, self.held_out = rows[~samples.held_out].to(device), rows[samples.held_out].to(device)
        counts = Counter(samples.prompts)
        shares = torch.tensor([1.0 / counts[prompt] for prompt in samples.prompts])  # every task as often
        self.shares = shares[~samples.held_out].to(device)

    def draw(self, size: int) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor, Tensor]:
        """A random augmented batch: images, their masks, tokens, token mask, actions."""
        device = self.frames.device
        rows = self.training[torch.multinomial(self.shares, size, replacement=True)]
        variant = torch.randint(1, _VARIANTS + 1, (size,), device=device)
        images = data.augmented(self.frames[rows]) * 2 - 1
        return self._arguments(images, self.tokens[variant, rows], self.valid[variant, rows], rows)

    def held(self, size: int) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor, Tensor]:
        """The first held-out samples as they are."""
        rows = self.held_out[torch.linspace(0, len(self.held_out) - 1, min(size, len(self.held_out))).long()]
        return self._arguments(self.frames[rows].float() / 127.5 - 1, self.tokens[0, rows], self.valid[0, rows], rows)

    def _arguments(self, images: Tensor, tokens: Tensor, valid: Tensor, rows: Tensor) -> Any:
        masks = [torch.ones(len(rows), dtype=torch.bool, device=rows.device) for _ in range(images.shape[1])]
        return list(images.unbind(1)), masks, tokens, valid, self.actions[rows]


def loss_of(policy: Any, arguments: Any, actions: int) -> Tensor:
    """LeRobot's flow-matching loss over the robot's columns, and a tenth of it over the padding."""
    target = arguments[-1]
    noise = torch.randn_like(target)
    # The inverse of the distribution function of LeRobot's Beta(1.5, 1).
    moment = 0.999 * torch.rand(len(target), device=target.device) ** (1 / 1.5) + 0.001
    losses = policy.model.forward(*arguments, noise, moment)
    return losses[..., :actions].mean() + 0.1 * losses[..., actions:].mean()


@torch.no_grad()
def error_of(policy: Any, batches: Batches, executed: int, actions: int) -> float:
    """Root mean square difference of sampled and expert chunks on held-out samples, normalised units."""
    policy.eval()
    arguments = batches.held(256)
    torch.manual_seed(0)
    sampled = policy.model.sample_actions(*arguments[:4])
    policy.train()
    difference = (sampled - arguments[4])[:, :executed, :actions]
    return float(difference.square().mean().sqrt())


class Average:
    """Exponential moving average of the weights, short at first."""

    def __init__(self, policy: Any, decay: float) -> None:
        self.decay, self.count = decay, 0
        self.source = list(policy.parameters())  # a tied tensor once
        self.values = [value.clone() for value in self.source]

    def update(self) -> None:
        """After every optimizer step."""
        self.count += 1
        decay = min(self.decay, (1 + self.count) / (10 + self.count))
        torch._foreach_lerp_(self.values, self.source, 1 - decay)

    def swap(self) -> None:
        """Exchanges average and weights."""
        for mine, theirs in zip(self.values, self.source, strict=True):
            kept = mine.clone()
            mine.copy_(theirs)
            theirs.copy_(kept)


def rate(progress: float, step: int, peak: float) -> float:
    """Learning rate: 200 steps up, then a cosine to a hundredth."""
    cosine = 0.5 * (1 + float(torch.cos(torch.tensor(min(progress, 1.0) * torch.pi))))
    return peak * min(1.0, (step + 1) / 200) * (0.01 + 0.99 * cosine)


def train(policy: Any, batches: Batches, options: argparse.Namespace) -> None:
    """Until the time is over; leaves the averaged weights in the policy."""
    device = next(policy.parameters()).device.type
    groups = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.95), weight_decay=0.05, fused=device == "cuda")
    average, start, said, step = Average(policy, 0.999), time.monotonic(), 0.0, 0
    while (elapsed := time.monotonic() - start) < options.seconds:
        optimizer.param_groups[0]["lr"] = rate(elapsed / options.seconds, step, options.rate)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss = loss_of(policy, batches.draw(options.batch), 4)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(groups, 1.0)
        optimizer.step()
        with torch.no_grad():
            average.update()
            step += 1
            if elapsed - said >= options.report:
                said = elapsed
                average.swap()
                error = error_of(policy, batches, 16, 4)
                average.swap()
                print(f"{elapsed:.0f} s, step {step}, loss {loss.item():.4f}, held-out error {error:.4f}", flush=True)
    with torch.no_grad():
        average.swap()
        print(f"{step} steps of {options.batch}, held-out error {error_of(policy, batches, 16, 4):.4f}", flush=True)


def main() -> None:
    """Command line of the recipe's second half."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seconds", type=float, default=360)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rate", type=float, default=6e-4)
    parser.add_argument(
        "--jitter", type=float, nargs=2, default=(0.1, 0.1), help="of states, least and most, normalised"
    )
    parser.add_argument("--tower", type=Path, help="what recipes.demo_policy.sight wrote: a vision tower to begin with")
    parser.add_argument("--report", type=float, default=10, help="seconds between two lines")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--data", type=Path, default=data.DATA, help="folder of recordings, one file a task")
    options = parser.parse_args()
    torch.manual_seed(0)
    samples = data.load(options.data)
    statistics = data.statistics(samples)
    config = model.configuration()
    before, after = model.processors(config, statistics, options.directory)
    policy = model.build(config)
    if options.tower is not None:
        model.tower(policy).load_state_dict(load_file(options.tower))
    count = sum(parameter.numel() for parameter in policy.parameters())
    print(f"{len(samples)} samples, {count / 1e6:.2f} million parameters", flush=True)
    batches = Batches(samples, before, statistics, options)
    train(policy.to(options.device).train(), batches, options)
    model.save(policy, before, after, options.directory)
    print(f"wrote {options.directory}", flush=True)


if __name__ == "__main__":
    main()
