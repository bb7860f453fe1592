"""Streaming into final buffers: exact, strict in both directions, and nothing written when anything is wrong."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from innerloop.contract.errors import CheckpointError
from innerloop.weights import Account, NameTable, check_weights, load_weights
from innerloop.weights import load as module
from innerloop.weights.files import open_weight_files
from innerloop.weights.source import TensorSource

STORED = {
    "model.q.weight": torch.randn(4, 3),
    "model.k.weight": torch.randn(2, 3),
    "model.old.norm.weight": torch.randn(3),
    "model.patch.weight": torch.randn(5, 3, 2, 2),
    "model.lm_head.weight": torch.randn(7, 3),
    "model.scale": torch.tensor(2.5),
    "model.unused.bias": torch.randn(3),
}
TABLE = NameTable(
    targets={
        "qk": ("q.weight", "k.weight"),
        "norm": ("norm.weight",),
        "patch": ("patch.weight",),
        "embedding": ("embed.weight",),
        "scale": ("scale",),
    },
    ties={"embed.weight": "lm_head.weight"},
    prefixes=(("model.", ""), ("old.", "")),
    ignored=("unused.*",),
)


def source(directory: Path, **changes: torch.Tensor | None) -> TensorSource:
    """STORED in a file, with tensors changed, added or (None) left out."""
    tensors = {**STORED, **{name.replace("__", "."): tensor for name, tensor in changes.items()}}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, directory / "model.safetensors")
    opened = open_weight_files(directory)
    assert opened is not None
    return opened


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Buffers full of NaN, so that a row left unwritten shows."""
    shapes = {"qk": (6, 3), "norm": (3,), "patch": (5, 12), "embedding": (7, 3), "scale": ()}
    return {name: torch.full(shape, math.nan, dtype=dtype) for name, shape in shapes.items()}


def refused(directory: Path, table: NameTable = TABLE, **changes: torch.Tensor | None) -> str:
    """The message of a refusal, before memory exists and after; no buffer may have been touched."""
    buffers, opened = parameters(), source(directory, **changes)
    with pytest.raises(CheckpointError, match="nothing was loaded"):
        load_weights(buffers, opened, table)
    assert all(buffer.isnan().all() for buffer in buffers.values())
    outlined = {name: buffer.to("meta") for name, buffer in buffers.items()}
    with pytest.raises(CheckpointError, match="nothing was loaded") as error:
        check_weights(outlined, opened, table, {"width": 3, "vocab_size": 7})
    return str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_in_fused_buffers(tmp_path: Path, dtype: torch.dtype) -> None:
    buffers = parameters(dtype)
    account = load_weights(buffers, source(tmp_path), TABLE)
    expected = {
        "qk": torch.cat([STORED["model.q.weight"], STORED["model.k.weight"]]),
        "norm": STORED["model.old.norm.weight"],
        "patch": STORED["model.patch.weight"].flatten(1),
        "embedding": STORED["model.lm_head.weight"],
        "scale": STORED["model.scale"],
    }
    for name, tensor in expected.items():
        assert torch.equal(buffers[name], tensor.to(dtype)), name
    assert sorted(account.loaded) == sorted(set(STORED) - {"model.unused.bias"})
    assert account.tied == ("embed.weight <- model.lm_head.weight",)
    assert account.ignored == ("model.unused.bias",)
    assert "model.old.norm.weight -> norm.weight" in account.renamed
    assert account.bytes == sum(tensor.numel() * 4 for tensor in STORED.values())


def test_account_is_one_line(tmp_path: Path) -> None:
    account = load_weights(parameters(), source(tmp_path), TABLE)
    line = str(account)
    assert line.startswith("weights: 6 loaded, 1 tied, 7 renamed, 1 ignored, 0 merged; 0.000 GB in 0.")
    assert account.digest[:12] in line
    assert "\n" not in line
    merged = Account((), (), (), (), {"a": "rank 4 x 2", "b": "rank 4 x 2"}, 0, 0.0, "0" * 64)
    assert "2 merged (rank 4 x 2)" in str(merged)


def test_a_tensor_larger_than_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 32)
    buffers = parameters()
    load_weights(buffers, source(tmp_path), TABLE)
    assert torch.equal(buffers["embedding"], STORED["model.lm_head.weight"])


def test_one_tensor_may_fill_two_buffers(tmp_path: Path) -> None:
    buffers = {**parameters(), "again": torch.zeros(4, 3)}
    table = NameTable({**TABLE.targets, "again": ("q.weight",)}, TABLE.ties, TABLE.prefixes, TABLE.ignored)
    load_weights(buffers, source(tmp_path), table)
    assert torch.equal(buffers["again"], STORED["model.q.weight"])


def test_both_tied_tensors_stored(tmp_path: Path) -> None:
    embedding = torch.randn(7, 3)
    buffers = parameters()
    account = load_weights(buffers, source(tmp_path, model__embed__weight=embedding), TABLE)
    assert torch.equal(buffers["embedding"], embedding)
    assert account.tied == ()
    assert "model.lm_head.weight" in account.ignored


def test_missing_tensor(tmp_path: Path) -> None:
    message = refused(tmp_path, model__k__weight=None, model__lm_head__weight=None)
    assert "missing: 'k.weight'" in message
    assert "missing: 'embed.weight', nor its tied 'lm_head.weight'" in message
    assert "unexpected" not in message


def test_unexpected_tensor(tmp_path: Path) -> None:
    assert "unexpected: 'model.extra.weight' [2]" in refused(tmp_path, model__extra__weight=torch.ones(2))


def test_every_problem_is_in_one_error(tmp_path: Path) -> None:
    message = refused(tmp_path, model__scale=None, model__a=torch.ones(1), model__old__norm__weight=torch.ones(4))
    assert "(3 problems)" in message
    for part in ("missing: 'scale'", "unexpected: 'model.a'", "wrong shape"):
        assert part in message


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        ("model__old__norm__weight", (4,), "'model.old.norm.weight' [4]; the model's 'norm' is [3]"),
        ("model__k__weight", (3, 3), "'model.q.weight' [4, 3], 'model.k.weight' [3, 3]; the model's 'qk' is [6, 3]"),
        ("model__k__weight", (2, 4), "'model.k.weight' [2, 4]; the model's 'qk' is [6, 3]"),
        ("model__patch__weight", (5, 3, 2, 3), "the model's 'patch' is [5, 12]"),
        ("model__patch__weight", (60,), "the model's 'patch' is [5, 12]"),
        ("model__lm_head__weight", (3, 7), "the model's 'embedding' is [7, 3] because the config says width = 3, voc"),
        ("model__lm_head__weight", (8, 3), "'embedding' is [7, 3] because the config says vocab_size = 7"),
        ("model__lm_head__weight", (7, 1, 3, 1), None),
        ("model__scale", (2,), "'model.scale' [2]; the model's 'scale' is []"),
    ],
)
def test_wrong_shape(tmp_path: Path, name: str, shape: tuple[int, ...], text: str | None) -> None:
    if text is None:  # a convolution's weight as rows
        load_weights(parameters(), source(tmp_path, **{name: torch.ones(shape)}), TABLE)
        return
    assert text in refused(tmp_path, **{name: torch.ones(shape)})


def test_integers_are_not_weights(tmp_path: Path) -> None:
    message = refused(tmp_path, model__old__norm__weight=torch.ones(3, dtype=torch.int8))
    assert "wrong dtype: 'model.old.norm.weight' is torch.int8, the model's 'norm' torch.float32" in message


def test_two_names_of_one_tensor(tmp_path: Path) -> None:
    message = refused(tmp_path, norm__weight=torch.ones(3))
    assert "are the same tensor 'norm.weight', one is stale" in message


def test_table_and_model_disagree(tmp_path: Path) -> None:
    targets = {**{k: v for k, v in TABLE.targets.items() if k != "norm"}, "ghost": ("norm.weight",)}
    message = refused(tmp_path, NameTable(targets, TABLE.ties, TABLE.prefixes, TABLE.ignored))
    assert "parameter 'norm' has no entry in the name table" in message
    assert "fills 'ghost', which the model does not have" in message


def test_digest_covers_every_byte_and_nothing_else(tmp_path: Path) -> None:
    def digest(name: str, **changes: torch.Tensor | None) -> str:
        directory = tmp_path / name
        directory.mkdir()
        return load_weights(parameters(), source(directory, **changes), TABLE).digest

    base = digest("base")
    changed = STORED["model.unused.bias"].clone()
    changed[2] = -changed[2]
    assert digest("same") == base
    assert digest("ignored tensors count too", model__unused__bias=changed) != base
    assert digest("so does the dtype", model__scale=STORED["model.scale"].double()) != base
    assert digest("and the shape", model__patch__weight=STORED["model.patch.weight"].flatten(1)) != base


def test_digest_does_not_depend_on_sharding(tmp_path: Path) -> None:
    names = sorted(STORED)
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        (tmp_path / "sharded").mkdir(exist_ok=True)
        save_file(
            {name: STORED[name] for name in part}, tmp_path / "sharded" / f"model-0000{number}-of-00002.safetensors"
        )
    sharded = open_weight_files(tmp_path / "sharded")
    assert sharded is not None
    (tmp_path / "whole").mkdir()
    whole = source(tmp_path / "whole")
    digests = {load_weights(parameters(), opened, TABLE).digest for opened in (sharded, whole)}
    assert len(digests) == 1


def test_progress_counts_bytes_up_to_the_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        calls.append((done, total))

    account = load_weights(parameters(), source(tmp_path), TABLE, progress=note)
    assert calls == [], "nothing to say about a load of under two seconds"
    monkeypatch.setattr(module, "_QUIET", 0.0)
    load_weights(parameters(), source(tmp_path), TABLE, progress=note)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert calls[-1] == (account.bytes, account.bytes)
