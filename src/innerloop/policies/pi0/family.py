"""pi0 as the engine sees it."""

from innerloop.blocks.flow_checkpoint import reading
from innerloop.policies.interface import Family
from innerloop.policies.pi0.model import FLOAT32, Pi0
from innerloop.policies.pi0.plan import build, sample
from innerloop.policies.pi0.weights import name_table

PI0 = Family(
    name="pi0",
    summary="pi0: state as a token, time mixed into the action tokens",
    model=Pi0,
    float32=FLOAT32,
    name_table=name_table,
    plans=build,
    sample=sample,
    **reading("pi0", mark="action_time_mlp_in.weight", prompt_capacity=48)._asdict(),
)
