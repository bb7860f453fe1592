"""Packing, the fragment arithmetic, the meaning of the ops and their composition, without a GPU."""

import ctypes

import pytest
import torch

from innerloop.contract.errors import InnerloopError
from innerloop.kernels import compile, skinny
from innerloop.kernels.launch import Limits, candidates
from innerloop.kernels.skinny import arguments, compose, cost, cuda, reference
from innerloop.kernels.skinny.packing import pack, unpack
from innerloop.kernels.skinny.start import SOURCE

H200 = Limits("Hopper", 90, 132, 232448, 60 << 20)
GEFORCE = Limits("Blackwell", 120, 170, 101376, 96 << 20)
EXPERT = {
    "qkv": (cuda.NORM_QKV_ROPE, 2560, 1024),
    "gate-up": (cuda.NORM_GLU, 8192, 1024),
    "out": (cuda.RESIDUAL, 1024, 2048),
    "down": (cuda.RESIDUAL, 1024, 4096),
}
# starVLA QwenPI_v3's diffusion transformer
BLOCK = {
    "query": (cuda.NORM_LINEAR, 1024, 1024),
    "up": (cuda.NORM_LINEAR, 4096, 1024),
    "out": (cuda.RESIDUAL, 1024, 1024),
}


@pytest.mark.parametrize(("rows", "columns", "pair"), [(2560, 64, 128), (64, 96, 32), (32, 64, 8), (48, 32, 24)])
def test_packing_is_undone_bit_for_bit(rows: int, columns: int, pair: int) -> None:
    weight = torch.randint(-(1 << 15), 1 << 15, (rows, columns), dtype=torch.int16).view(torch.bfloat16)
    packed = pack(weight, pair)
    assert torch.equal(unpack(packed).view(torch.int16), weight.view(torch.int16))
    assert packed.data.is_contiguous()


@pytest.mark.parametrize(("rows", "columns", "pair"), [(40, 64, 8), (32, 48, 8), (32, 64, 12)])
def test_what_cannot_be_packed_is_refused(rows: int, columns: int, pair: int) -> None:
    with pytest.raises(InnerloopError, match="cannot be packed"):
        pack(torch.zeros(rows, columns), pair)


def _fragment_product(packed: skinny.Packed, x: torch.Tensor) -> torch.Tensor:
    """W x for 8 tokens, with the registers of mma.m16n8k16 (PTX ISA) filled as source/linear.cu fills them."""
    tiles, blocks = packed.rows // 16, packed.columns // 32
    a_all = packed.data.view(tiles, blocks, 2, 32, 4, 2)
    out = torch.zeros(tiles, 16, 8)
    for lane in range(32):
        r, j = lane // 4, lane % 4
        words = x[r].view(blocks, 4, 4, 2)[:, j]  # 16 bytes of token r: four pairs a block
        for other in range(32):
            row, slot = other // 4, other % 4
            if slot != j:
                continue
            for step in range(2):
                a = a_all[:, :, step, other]
                b_low, b_high = words[:, 2 * step], words[:, 2 * step + 1]
                for half in range(2):  # registers 0 and 2 hold row r, 1 and 3 row r + 8
                    low, high = a[:, :, half], a[:, :, 2 + half]
                    out[:, row + 8 * half, r] += ((low * b_low).sum(-1) + (high * b_high).sum(-1)).sum(-1)
    return out


def test_fragments_multiply_to_the_dense_product_and_pairs_share_a_lane() -> None:
    weight, x, pair = torch.randn(64, 96), torch.randn(8, 96), 16
    product = weight @ x.T
    tiles = _fragment_product(pack(weight, pair), x)
    for tile in range(4):
        first = tile // 2 * 2 * pair + tile % 2 * 8
        rows = [*range(first, first + 8), *range(first + pair, first + pair + 8)]
        torch.testing.assert_close(tiles[tile], product[rows], atol=1e-4, rtol=1e-4)


def _layer(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    shapes = {"qkv": (96, 64), "out": (64, 64), "gate_up": (128, 64), "x": (2, 5, 64), "y": (2, 5, 64)}
    return {name: (torch.randn(shape) / 8).to(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("modulated", [False, True])
def test_ops_mean_their_compositions(packed: bool, modulated: bool) -> None:
    t = _layer(torch.float32)
    scale, shift, gate = torch.randn(3, 64)
    mod = (scale, shift if modulated else None, 1e-6)
    angle = torch.randn(2, 5, 8)
    caches = [torch.zeros(2, 9, 1, 16) for _ in range(4)]

    def weight(name: str, pair: int) -> torch.Tensor | skinny.Packed:
        return pack(t[name], pair) if packed else t[name]

    def q_of(module: object, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return module.norm_qkv_rope(t["x"], *mod, weight("qkv", 8), angle.cos(), angle.sin(), 4, 1, k, v, 3)

    q = q_of(skinny, caches[0], caches[1])
    torch.testing.assert_close(q, q_of(compose, caches[2], caches[3]))
    torch.testing.assert_close(caches[0], caches[2])
    assert (caches[1][:, :3] == 0).all()
    assert (caches[1][:, 3:8] != 0).all()
    valid = torch.ones(2, 9, dtype=torch.int32)
    valid[:, 8] = 0
    mixed = skinny.attend(q, caches[0], caches[1], valid, 0.25, 3)
    torch.testing.assert_close(mixed, compose.attend(q, caches[2], caches[3], valid, 0.25, 3))
    out = (mixed, weight("out", 8), gate if modulated else None, t["x"])
    torch.testing.assert_close(skinny.project_residual(*out), compose.project_residual(*out))
    glu = (t["x"], *mod, weight("gate_up", 64))
    torch.testing.assert_close(skinny.norm_glu(*glu), compose.norm_glu(*glu))


@pytest.mark.parametrize("packed", [False, True])
def test_tokens_below_a_prefix_take_the_second_row(packed: bool) -> None:
    """Each entry alone, its tokens in two parts, against one call over all."""
    t = _layer(torch.float32)
    (scale, shift, gate), prefix = torch.randn(3, 2, 64), torch.tensor([[2], [5]], dtype=torch.int32)
    weights = {"qkv": 8, "out": 8, "gate_up": 64}
    w = {name: pack(t[name], pair) if packed else t[name] for name, pair in weights.items()}
    angle = torch.randn(2, 5, 8)

    def run(module: object, rows: slice, entry: slice, pick: object) -> list[torch.Tensor]:
        s, h, g, given = (scale, shift, gate, prefix) if pick is None else (scale[pick], shift[pick], gate[pick], None)
        x, y, a = (v[entry, rows] for v in (t["x"], t["y"], angle))
        caches = [torch.zeros(len(x), x.shape[1], 1, 16) for _ in range(2)]
        q = module.norm_qkv_rope(x, s, h, 1e-6, w["qkv"], a.cos(), a.sin(), 4, 1, *caches, 0, given)
        hidden = module.norm_glu(x, s, h, 1e-6, w["gate_up"], given)
        return [q, *caches, hidden, module.project_residual(y, w["out"], g, x, None, given)]

    for module in (skinny, compose):
        found = run(module, slice(0, 5), slice(0, 2), None)
        for entry, length in enumerate(prefix.flatten().tolist()):
            for rows, pick in ((slice(0, length), 1), (slice(length, 5), 0)):
                if rows.stop > rows.start:
                    alone = run(module, rows, slice(entry, entry + 1), pick)
                    for one, all_of in zip(alone, found, strict=True):
                        torch.testing.assert_close(one[0], all_of[entry, rows])


def test_the_residual_is_added_and_gated() -> None:
    y, w, residual = torch.ones(1, 1, 4), torch.eye(4), torch.full((1, 1, 4), 10.0)
    gated = skinny.project_residual(y, w, torch.tensor([0.0, 1.0, 2.0, 3.0]), residual)
    assert gated.flatten().tolist() == [10.0, 11.0, 12.0, 13.0]


@pytest.mark.parametrize("packed", [False, True])
def test_layer_norm_bias_and_gelu_of_a_linear(packed: bool) -> None:
    x, weight, bias = torch.randn(2, 3, 64) + 0.5, torch.randn(32, 64) / 8, torch.randn(32)
    scale, shift = torch.randn(2, 64)
    taken = pack(weight) if packed else weight
    for mod in ((scale, shift), (None, None)):
        normed = torch.nn.functional.layer_norm(x, (64,), *mod, eps=1e-5)
        expected = normed @ weight.T + bias
        for module in (skinny, compose):
            plain = module.norm_linear(x, *mod, 1e-5, taken, bias, False)
            torch.testing.assert_close(plain, expected, atol=1e-5, rtol=1e-5)
            curved = module.norm_linear(x, *mod, 1e-5, taken, bias, True)
            expected_curve = torch.nn.functional.gelu(expected, approximate="tanh")
            torch.testing.assert_close(curved, expected_curve, atol=1e-5, rtol=1e-5)


def test_a_residual_product_has_a_bias_inside_its_gate() -> None:
    y, w, residual = torch.ones(1, 1, 4), torch.eye(4), torch.full((1, 1, 4), 10.0)
    for module in (skinny, compose):
        out = module.project_residual(y, w, torch.tensor([0.0, 1.0, 2.0, 3.0]), residual, torch.full((4,), 2.0))
        assert out.flatten().tolist() == [10.0, 13.0, 16.0, 19.0]


def test_both_ends_of_a_step() -> None:
    state, x = torch.randn(1, 5, 8), torch.randn(1, 5, 64)
    w_in, w_out, scale, shift = torch.randn(64, 8), torch.randn(8, 64), torch.randn(64), torch.randn(64)
    entered = skinny.project_in(state, w_in, torch.ones(64), torch.bfloat16)
    torch.testing.assert_close(entered, (state @ w_in.T + 1).bfloat16())
    step = (x, scale, shift, 1e-6, w_out, torch.zeros(8), state, -0.1)
    torch.testing.assert_close(skinny.norm_project_step(*step), compose.norm_project_step(*step))
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + scale) + shift
    torch.testing.assert_close(skinny.norm_project_step(*step), state - 0.1 * (normed @ w_out.T), atol=1e-4, rtol=1e-4)


def test_support_is_told_not_assumed() -> None:
    assert not skinny.supported(torch.device("cpu"), torch.bfloat16, 10)


@pytest.mark.parametrize("own", [H200, GEFORCE])
@pytest.mark.parametrize("rows", [1, 10, 50, 64])
@pytest.mark.parametrize("product", [*EXPERT.values(), *BLOCK.values()])
def test_every_product_has_a_launch_that_fits(product: tuple[int, int, int], rows: int, own: Limits) -> None:
    shape = (*product, rows)
    for launch in candidates(cuda.LINEAR, shape, own):
        assert cuda._linear_bytes(launch, shape) <= own.shared_bytes
        assert launch.warps * launch["SPLIT"] * cuda.WARP_COLUMNS == shape[2]


def test_the_measured_launches_come_first() -> None:
    preferred = {name: candidates(cuda.LINEAR, (*shape, 10), H200)[0] for name, shape in EXPERT.items()}
    found = {name: (one.warps, one["SPLIT"], one["TILES"], one["RESIDENT"]) for name, one in preferred.items()}
    assert found == {"qkv": (8, 1, 2, 1), "gate-up": (8, 1, 4, 1), "out": (8, 2, 1, 1), "down": (8, 4, 1, 1)}


def test_arguments_have_the_size_that_the_sources_lay_out() -> None:
    assert [ctypes.sizeof(a) for a in (arguments.LinearArgs, arguments.AttendArgs, arguments.StepArgs)] == [
        176,
        80,
        128,
    ]


def test_costs() -> None:
    layer = (
        cost.norm_qkv_rope(10, 1024, 8, 1, 256)
        + cost.project_residual(10, 1024, 2048)
        + cost.norm_glu(10, 1024, 4096)
        + cost.project_residual(10, 1024, 4096)
    )
    weights = 2 * 1024 * (2560 + 2048 + 8192 + 4096)
    assert weights < layer.bytes < 1.02 * weights
    assert cost.attend(10, 586, 8, 1, 256).flops == 4 * 10 * 586 * 8 * 256
    assert cost.project_in(10, 32, 1024).flops == cost.norm_project_step(10, 1024, 32).flops == 2 * 10 * 32 * 1024


@pytest.mark.skipif(not compile.available(), reason="needs NVRTC")
@pytest.mark.parametrize("capability", [90, 100, 120])
def test_one_source_compiles_for_every_architecture(
    capability: int, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    common = {"NT": 2, "MODULATION_FLOAT": 1, "RESIDENT": 1}
    kinds = {
        "linear": {"PHASE": 2, "N": 1024, "K": 2048, "TILES": 1, "WARPS": 8, "SPLIT": 2, "HALF": 8},
        "attend": {"CHUNK": 80, "OVERLAY": 1},
        "step": {"K": 1024, "A": 32, "HAS_IN": 1},
    }
    behind_a_norm = {"PHASE": 3, "N": 4096, "K": 1024, "TILES": 2, "WARPS": 8, "SPLIT": 1, "HALF": 8, "GELU": 1}
    gated = {**kinds["linear"], "PREFIXED": 1}
    normed = {**behind_a_norm, "PHASE": 0, "N": 2560, "HALF": 128, "PREFIXED": 1}
    ended = {"K": 1024, "A": 32, "HAS_OUT": 1, "GUIDED": 1}
    more = [("linear", behind_a_norm), ("linear", gated), ("linear", normed), ("step", ended)]
    for name, defines in (*kinds.items(), *more):
        code = compile.machine_code(SOURCE / f"{name}.cu", {**common, **defines}, f"sm_{capability}")
        assert code[:4] == b"\x7fELF"
        assert code == compile.machine_code(
            SOURCE / f"{name}.cu", {**common, **defines}, f"sm_{capability}"
        )  # now from the disk
    with pytest.raises(InnerloopError, match="does not compile"):
        compile.machine_code(SOURCE / "linear.cu", {"PHASE": 2}, f"sm_{capability}")


def test_reference_takes_dense_and_packed_weights_alike() -> None:
    t = _layer(torch.bfloat16)
    for weight in (t["gate_up"], pack(t["gate_up"], 64)):
        out = reference.norm_glu(t["x"], torch.zeros(64), None, 1e-6, weight)
        assert torch.equal(out, reference.norm_glu(t["x"], torch.zeros(64), None, 1e-6, t["gate_up"]))


def test_a_kept_weight_is_read_instead_of_unpacked() -> None:
    weight = torch.randn(32, 64)
    kept = pack(weight, keep=True)
    assert reference.dense(kept) is weight
    assert torch.equal(reference.dense(pack(weight)), weight)
