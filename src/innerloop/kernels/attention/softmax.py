"""Which keys count, and the running softmax of a row of scores, in powers of two."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def counted(valid_at, at, keys):
    """Which of the keys at `at` count."""
    seen = at < keys
    if valid_at is not None:
        seen = tl.load(valid_at + at, mask=seen, other=0) != 0
    return seen


@triton.jit
def soften(score, maximum, total, scale):
    """Weights of a block, and what running results shrink by; scale includes log2(e)."""
    raised = tl.maximum(maximum, tl.max(score, axis=1) * scale)
    weight = tl.exp2(score * scale - raised[:, None])
    shrink = tl.exp2(maximum - raised)
    return weight, shrink[:, None], raised, total * shrink + tl.sum(weight, axis=1)
