"""pi05 as the engine sees it."""

from innerloop.blocks.flow_checkpoint import reading
from innerloop.policies.interface import Family
from innerloop.policies.pi05.model import FLOAT32, Pi05
from innerloop.policies.pi05.plan import build, sample
from innerloop.policies.pi05.weights import name_table

PI05 = Family(
    name="pi05",
    summary="pi0.5: state written into the prompt, time through modulated norms",
    model=Pi05,
    float32=FLOAT32,
    name_table=name_table,
    plans=build,
    sample=sample,
    **reading("pi05", mark="time_mlp_in.weight", prompt_capacity=200)._asdict(),
)
