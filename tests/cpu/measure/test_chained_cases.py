"""The benchmark cases of a chain of dependent launches: their reference is one graph for torch.compile."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from bench.case import Case
from bench.chained import chained


@pytest.mark.parametrize("case", chained(), ids=lambda case: case.label)
def test_a_reference_is_one_graph(case: Case) -> None:
    torch.compiler.reset()
    given, graphs = case.make(torch.device("cpu")), []

    def counted(graph: Any, examples: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    reference = case.reference()
    torch.compile(lambda *given: case.call(reference, given), dynamic=False, fullgraph=True, backend=counted)(*given)
    assert len(graphs) == 1
