"""How fast, how close to the machine's limits, and against whom: clocks, ceilings, records and their reports."""
