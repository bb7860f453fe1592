"""`python -m bench.timestep [--json FILE]`: the timestep kernels against torch eager and torch.compile."""

from bench.cases import cases
from bench.harness import bench

if __name__ == "__main__":
    bench(cases("timestep"))
