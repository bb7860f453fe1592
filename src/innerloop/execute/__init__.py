"""Chunks on the robot: when to ask for the next one, and where it joins what is being executed. numpy alone."""

from innerloop.execute.delay import Delay
from innerloop.execute.executor import MODES, Executor, Mode, Ticket

__all__ = ["MODES", "Delay", "Executor", "Mode", "Ticket"]
