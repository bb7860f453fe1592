"""Both Qwen levels against transformers, live, in both meanings that its hidden states have had.

transformers 4.57 returned the last layer's output before the final norm and with DeepStack added in place, which is what
innerloop's levels give. Since 5 the last entry comes after the final norm, and the first ones lack DeepStack's addition.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2VLImageProcessorFast, Qwen3VLForConditionalGeneration

from innerloop.levels import Level, load_level
from innerloop.process.qwen3vl import ImageRules
from recipes.tiny import qwen

TOLERANCE = 1e-4


@pytest.fixture(params=qwen.TURNS, ids=[f"{turn.kind}-{len(turn.images)}" for turn in qwen.TURNS])
def sides(request, tmp_path):
    """One turn, our level, their model and its inputs."""
    turn = request.param
    directory = qwen.write(tmp_path, turn.kind, turn.seed, turn.tied)
    kind = AutoModelForCausalLM if turn.kind == "qwen3" else Qwen3VLForConditionalGeneration
    model = kind.from_pretrained(directory, dtype=torch.float32).eval()
    level = load_level(directory, device="cpu")
    return SimpleNamespace(turn=turn, level=level, model=model, inputs=inputs(level, turn))


def inputs(level: Level, turn: qwen.Turn) -> dict[str, torch.Tensor]:
    """What transformers' processor would hand to its model."""
    images = [torch.from_numpy(image).permute(2, 0, 1) for image in qwen.pictures(turn)]
    grids = [level.rules.grid(*image.shape[1:]) for image in images]
    ids = torch.tensor([level.tokenizer.turn([h * w // 4 for h, w in grids], turn.text)])
    if not images:
        return {"input_ids": ids}
    processor = Qwen2VLImageProcessorFast(
        **qwen.IMAGES, image_mean=[0.5] * 3, image_std=[0.5] * 3, do_convert_rgb=False
    )
    seen = processor(images=images, return_tensors="pt")
    marks = (ids == level.tokenizer.special.pad).int()
    assert seen["image_grid_thw"][:, 1:].tolist() == [list(grid) for grid in grids]
    return {"input_ids": ids, "mm_token_type_ids": marks, **seen}


def test_last_hidden_state_before_and_after_the_final_norm(sides):
    ours = torch.from_numpy(sides.level.hidden(sides.turn.text, qwen.pictures(sides.turn)))
    language = sides.model.model.language_model if sides.turn.kind == "qwen3_vl" else sides.model.model
    before = []
    hook = language.norm.register_forward_pre_hook(lambda _module, args: before.append(args[0][0]))
    with torch.no_grad():
        theirs = sides.model(**sides.inputs, output_hidden_states=True).hidden_states
        hook.remove()
        normed = language.norm(ours[-1])
    torch.testing.assert_close(ours[-1], before[0], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(normed, theirs[-1][0], atol=TOLERANCE, rtol=0)
    assert (ours[-1] - theirs[-1][0]).abs().max() > 0.1  # the two meanings differ


def test_the_first_layers_differ_by_deepstack_alone(sides):
    ours = torch.from_numpy(sides.level.hidden(sides.turn.text, qwen.pictures(sides.turn)))
    with torch.no_grad():
        theirs = sides.model(**sides.inputs, output_hidden_states=True).hidden_states
    difference = (ours[0] - theirs[1][0]).abs().amax(-1)
    marks = sides.inputs.get("mm_token_type_ids", torch.zeros(1, len(difference)))[0].bool()
    assert difference[~marks].amax() < TOLERANCE
    if marks.any():
        with torch.no_grad():
            features = sides.model.model.visual(
                sides.inputs["pixel_values"], grid_thw=sides.inputs["image_grid_thw"]
            ).deepstack_features
        torch.testing.assert_close((ours[0] - theirs[1][0])[marks], features[0], atol=TOLERANCE, rtol=0)


def test_greedy_answers_agree(sides):
    sides.level.ends = frozenset()
    ours = sides.level.answer(sides.turn.text, qwen.pictures(sides.turn), 10)
    with torch.no_grad():
        ids = sides.model.generate(**sides.inputs, max_new_tokens=10, do_sample=False, eos_token_id=[], pad_token_id=0)
    assert ours == ids[0, sides.inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("size", [(224, 224), (480, 640), (720, 1280), (37, 500), (90, 61)])
def test_patches_of_the_published_rules(size):
    image = qwen.picture(7, *size)
    sizes = {"shortest_edge": 65536, "longest_edge": 16777216}
    processor = Qwen2VLImageProcessorFast(
        size=sizes, patch_size=16, merge_size=2, temporal_patch_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    seen = processor(images=[torch.from_numpy(image).permute(2, 0, 1)], return_tensors="pt")
    pixels, grid = ImageRules().patches(image)
    assert seen["image_grid_thw"].tolist() == [[1, *grid]]
    theirs = seen["pixel_values"].view(-1, 3, 2, 256)
    np.testing.assert_array_equal(
        np.rint((theirs[:, :, 0].numpy() + 1) * 127.5).astype(np.uint8),
        pixels.reshape(-1, 256, 3).transpose(0, 2, 1),
    )
    torch.testing.assert_close(theirs[:, :, 0], theirs[:, :, 1], atol=0, rtol=0)
