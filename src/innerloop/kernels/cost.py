"""What an op must do at least: the two numbers a roofline needs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """flops: multiply and add count as two. bytes: every operand and result moved once."""

    flops: int
    bytes: int

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def microseconds(self, bytes_per_second: float, flops_per_second: float) -> float:
        """The time below which no device with these ceilings can go."""
        return 1e6 * max(self.bytes / bytes_per_second, self.flops / flops_per_second)
