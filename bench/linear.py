"""`python -m bench.linear [--json FILE]`: the linear kernels against torch eager and torch.compile."""

from bench.cases import cases
from bench.chained import chained
from bench.harness import bench

if __name__ == "__main__":
    bench([*cases("linear"), *chained()])
