"""Products in warp group tiles, without a GPU: what is launched for a size, that it compiles, and what C++ reads."""

import ctypes
import itertools
import random

import pytest

from innerloop.kernels import compile, launch
from innerloop.kernels.launch import Launch
from innerloop.kernels.linear import pairs, rings
from innerloop.kernels.linear import triton as tables

pytestmark = pytest.mark.skipif(not compile.available(), reason="needs NVRTC: without it no choice is of this kernel")
H200 = launch.Limits("sm_90", 90, 132, 232448, 50 << 20)
TABLES = (tables.WHOLE, tables.DEFERRED, tables.CHAINED, tables.CHAINED_SHARES, pairs.WIDE, pairs.GATED)
LISTED = [(table.op, choice) for table in TABLES for choice in dict.fromkeys(table.rows[90]) if rings.is_rings(choice)]


def _names(entry: object) -> str:
    if not isinstance(entry, Launch):
        return str(entry)
    depth, rows = entry["DEPTH"], rings.groups_of(entry) * 64
    return f"{rows}x{entry['WIDTH']} of {entry['SPLIT']} by {depth}"


def test_sizes_are_taken_only_as_the_kernel_works() -> None:
    """Every row, column and step in one program; whole boxes and swizzles; no empty share; everything in flight."""
    random.seed(0)
    taken = 0
    for table, choice in itertools.product(TABLES, {choice for _, choice in LISTED}):
        gated = table in (pairs.WIDE, pairs.GATED)
        for _ in range(40):
            rows, columns, inner = random.randint(1, 700), random.randint(1, 1200) * 8, random.randint(1, 1200) * 8
            if not rings.suits(choice, rows, columns, inner, H200, gated):
                continue
            taken += 1
            groups, out = rings.groups_of(choice), choice["WIDTH"] // (2 if gated else 1)
            row_tiles, column_tiles = rings.grid(choice, rows, columns, gated)
            assert rings.programs(choice, rows, columns, gated) <= 132
            assert row_tiles * groups * 64 >= rows > (row_tiles - 1) * groups * 64
            assert column_tiles * out >= columns
            steps = -(-inner // 64)
            share = -(-steps // choice["SPLIT"])
            assert (choice["SPLIT"] - 1) * share < steps <= choice["SPLIT"] * share
            assert out % 8 == 0
    assert taken > 200


@pytest.mark.parametrize(
    ("choice", "rows", "columns", "inner"),
    [
        (rings.tile(1, 64), 41, 64, 68),  # rows of x not 16 bytes apart
        (rings.tile(1, 64), 41, 60, 64),  # rows of the result not 16 bytes apart
        (rings.tile(1, 64, split=2), 41, 64, 64),  # an empty share
        (rings.tile(2, 64), 41, 64, 64),  # a group without rows
        (rings.tile(1, 8), 41, 8 * 133, 64),  # more programs than multiprocessors
        (rings.tile(3, 200), 182, 200, 64),  # more registers than there are
        (rings.tile(2, 128, depth=4), 100, 128, 64),  # more groups than registers
    ],
)
def test_what_the_kernel_cannot_do(choice: Launch, rows: int, columns: int, inner: int) -> None:
    assert rings.suits(rings.tile(1, 64), 41, 64, 64, H200)
    assert not rings.suits(choice, rows, columns, inner, H200)


def test_no_choice_for_other_rows_than_16_bits_or_other_devices() -> None:
    newer = launch.Limits("sm_100", 100, 148, 232448, 50 << 20)
    for table, size in zip(TABLES, [(192, 6144, 2560), (192, 2560, 9728), *[(41, 1536, 6144)] * 2], strict=False):
        for device, element, some in ((H200, 2, True), (H200, 4, False), (newer, 2, False)):
            listed = launch.candidates(table, (*size, element), device)
            assert any(map(rings.is_rings, listed)) == some, (table.op, device.name, element)


def test_without_a_compiler_others_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "available", lambda: False)
    for table, size in zip(TABLES, [(192, 6144, 2560), (192, 2560, 9728), *[(41, 1536, 6144)] * 2], strict=False):
        assert not any(map(rings.is_rings, launch.candidates(table, (*size, 2), H200)))


def test_rings_fill_what_they_may() -> None:
    for _, choice in LISTED:
        step = (rings.groups_of(choice) * 64 + choice["WIDTH"]) * 128
        assert choice["WIDTH"] % 8 == 0
        assert choice.stages % choice["DEPTH"] == 0
        assert 2 * choice["DEPTH"] <= choice.stages <= 16
        assert rings.shared_bytes(choice) <= H200.shared_bytes - 16 * choice.stages
        assert choice.stages == 16 or rings.shared_bytes(choice) + step * choice["DEPTH"] > rings.ROOM


def test_the_arguments_are_laid_out_as_the_source_has_them() -> None:
    assert rings.RingsArgs.w.offset == 128
    assert rings.RingsArgs.bias.offset == 256
    assert rings.RingsArgs.rows.offset == 272
    assert ctypes.sizeof(rings.RingsArgs) % 64 == 0
    named = rings.SOURCE.read_text().split("struct Args {")[1].split("}")[0]
    names = [line.split(";")[0].split()[-1].strip("*,") for line in named.splitlines() if ";" in line]
    fields = [name for name, *_ in rings.RingsArgs._fields_]
    assert names[1:] == fields[2:-1]


@pytest.mark.parametrize(("op", "choice"), LISTED, ids=_names)
def test_every_listed_tile_compiles(op: str, choice: Launch, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    gated = op in (pairs.WIDE.op, pairs.GATED.op)
    defines = rings.defines(choice, not gated and choice["SPLIT"] == 1, "silu" if gated else "gelu_tanh", gated)
    code = compile.machine_code(rings.SOURCE, defines, "sm_90a", rings.multiply(choice["WIDTH"]))
    assert code[:4] == b"\x7fELF"
