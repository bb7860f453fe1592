"""Policies on the GPU: the toy plan and both tiny checkpoints, in fp32 and bf16."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "cpu/runtime"))  # the toy plan
sys.path.append(str(Path(__file__).parents[2] / "cpu/policies"))  # the tiny checkpoints

from cuda_subjects import SUBJECTS, make


@pytest.fixture(scope="session")
def subjects():
    """Subjects by name, each made on first use."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = make(name)
        return made[name]

    yield get
    for subject in made.values():
        subject.close()


@pytest.fixture(params=SUBJECTS)
def subject(request, subjects):
    """Each subject in turn, with no session open."""
    found = subjects(request.param)
    for name in found.machine.sessions:
        found.machine.session(name).end()
    return found
