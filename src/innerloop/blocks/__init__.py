"""What two families share: vision towers, decoder layers, experts, flow solvers. Imports process, weights, kernels, contract."""
