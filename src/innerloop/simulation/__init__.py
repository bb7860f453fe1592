"""A policy in simulation: worlds, episodes, their statistics, the evaluation command and the demonstration."""
