"""`python -m bench.embedding [--json FILE]`: the embedding kernels against torch eager and torch.compile."""

from bench.cases import cases
from bench.harness import bench

if __name__ == "__main__":
    bench(cases("embedding"))
