"""Benchmarks: one script an op and a policy. `python -m bench.<name>`; records go to bench/records."""
