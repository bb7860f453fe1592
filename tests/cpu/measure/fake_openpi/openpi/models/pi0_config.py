"""The fields of openpi's model configuration, and their defaults."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pi0Config:
    """What PI0Pytorch is built from."""

    dtype: str = "bfloat16"
    paligemma_variant: str = "gemma_2b"
    action_expert_variant: str = "gemma_300m"
    action_dim: int = 32
    action_horizon: int = 50
    max_token_len: int | None = None
    pi05: bool = False
    discrete_state_input: bool | None = None
    pytorch_compile_mode: str | None = "max-autotune"
