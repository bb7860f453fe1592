"""One face for the toy plan and the tiny checkpoints: a machine, its plans, inputs from a seed."""

import dataclasses
from pathlib import Path

import numpy as np
import torch
import toy_plan
from loaded_policies import CHECKPOINTS, observe

import innerloop
from innerloop.blocks import flow_plan
from innerloop.contract import Plan
from innerloop.kernels import use_kernels
from innerloop.runtime.arena import Arena
from innerloop.runtime.interpret import Interpreter
from innerloop.runtime.machine import Machine

ROOT = Path(__file__).parents[3]
DEVICE = "cuda"
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
SUBJECTS = [f"{policy} {precision}" for policy in ("toy", "pi05", "pi0") for precision in PRECISIONS]


def make(name):
    policy, precision = name.split()
    return Toy(precision) if policy == "toy" else Tiny(policy, precision)


class Subject:
    """What the tests ask of a policy."""

    kernels = "fused"

    def capacity(self, tokens):
        return next(c for c in sorted(self.plans) if tokens <= c)

    @property
    def longest(self):
        return max(self.plans)

    def interpreted(self, capacity, inputs, check=False, plan=None):
        """Actions by an interpreter of its own that skips nothing."""
        plan = plan or self.plans[capacity]
        with use_kernels(self.kernels):
            interpreter = Interpreter(plan, Arena(plan, DEVICE), check=check)
            for name, value in inputs.items():
                interpreter.write(name, value)
            interpreter.run(skip=False)
        return interpreter.read("actions")[0].cpu()

    def decide(self, session, inputs, capacity=None):
        capacity = capacity or self.capacity(int(inputs["prompt_length"][0]))
        decision = self.machine.decide(session, inputs, capacity)
        return torch.from_numpy(decision.outputs["actions"]), decision.stages

    def close(self):
        self.machine.close()


class Toy(Subject):
    """The toy plan on the GPU."""

    def __init__(self, precision):
        self.dtype = PRECISIONS[precision]
        self.plans = toy_plan.plans(dtype=self.dtype, device=DEVICE)
        self.machine = Machine(self.plans, DEVICE)

    def inputs(self, seed, tokens=5):
        return toy_plan.observation(seed, tokens)

    def noise(self, seed):
        return toy_plan.noise(seed)

    def exact(self, tokens):
        shared, context, last = toy_plan.stages(toy_plan.Weights(0, self.dtype, DEVICE))
        return Plan("exact", toy_plan.buffers(self.dtype), (*shared, context(tokens), last), toy_plan.TICKS)


class Tiny(Subject):
    """A tiny checkpoint, loaded as a user does."""

    def __init__(self, family, precision):
        self.dtype = PRECISIONS[precision]
        self.policy = innerloop.load(CHECKPOINTS[family], device=DEVICE, precision=precision)
        self.machine, self.plans = self.policy.runtime, self.policy.plans

    def inputs(self, seed, tokens=9):
        prepared = dict(self.policy.processor.prepare(observe(self.policy, seed)).inputs)
        rng = np.random.default_rng(seed)
        words = np.zeros_like(prepared["tokens"])
        words[:tokens] = rng.integers(3, self.policy.config.language.vocab_size, tokens)
        length = np.array([tokens], np.int32)
        return {**prepared, "tokens": words, "prompt_length": length, "noise": self.noise(seed)}

    def noise(self, seed):
        return self.policy.processor.noise(seed=seed)

    def exact(self, tokens):
        plan, config = self.plans[self.longest], self.policy.config
        layout = config.layout(state_tokens=1 if self.policy.family.name == "pi0" else 0)
        context = flow_plan.context_stage(layout, self.policy.model.language, tokens)
        return dataclasses.replace(plan, stages=tuple(context if s.name == "context" else s for s in plan.stages))

    def close(self):
        self.policy.close()
