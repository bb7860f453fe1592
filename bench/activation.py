"""`python -m bench.activation [--json FILE]`: the activation kernels against torch eager and torch.compile."""

from bench.cases import cases
from bench.harness import bench

if __name__ == "__main__":
    bench(cases("activation"))
