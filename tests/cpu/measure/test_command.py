"""The command on the shipped tiny checkpoint: every kind of record, the report, and a second run of the first."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from innerloop import engine
from innerloop.contract import InnerloopError
from innerloop.measure import record
from innerloop.measure.command import bench_command, report_command, reproduce_command, run_bench
from innerloop.measure.message import Message
from innerloop.measure.options import BenchOptions, parse_command
from innerloop.measure.progress import progress
from innerloop.measure.reproduce import differences, reproduced
from innerloop.measure.side_by_side import Bench
from innerloop.measure.subject import PolicySubject, make_workload
from recipes.tiny import groot

TINY = Path(__file__).parents[3] / "examples/checkpoints/tiny-pi05"
OPTIONS = BenchOptions(
    str(TINY), device="cpu", frames="64x48", prompt_tokens=60, ticks=8, ladder=True, control=True, batch=(1, 2)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("records")
    bench_command(OPTIONS, Console(quiet=True), place / "tiny.json", place / "trace.txt")
    return place


def test_every_record_is_written_and_valid(folder: Path) -> None:
    names = ["tiny-batch.json", "tiny-control.json", "tiny-ladder.json", "tiny.json"]
    assert sorted(file.name for file in folder.glob("*.json")) == names
    whole = record.load(folder / "tiny.json")
    assert isinstance(whole, record.LatencyRecord)
    assert 50 < whole.prompt_tokens <= 60
    assert whole.prompt_capacity == 64
    assert whole.agreement["interpreter"]["cosine"] > 0.99999
    assert all(whole.stages_flops[name] > 0 for name in ("vision", "context", "action"))
    ladder = record.load(folder / "tiny-ladder.json")
    assert isinstance(ladder, record.LadderRecord)
    assert ladder.rungs[-1].max_abs < 1e-4
    assert sum(rung.share for rung in ladder.rungs) == pytest.approx(1)
    batch = record.load(folder / "tiny-batch.json")
    assert isinstance(batch, record.BatchRecord)
    assert [row.batch for row in batch.rows] == [1, 2]


def test_a_trace_is_written(folder: Path) -> None:
    assert '"traceEvents"' in (folder / "trace.txt").read_text()


def test_the_report_reads_the_folder(folder: Path) -> None:
    report_command([folder], Console(quiet=True), html=folder / "page.html")
    assert (folder / "page.html").read_text().count("<svg") >= 6


def test_the_same_record_is_within_its_own_spread_and_a_slower_one_is_not(folder: Path) -> None:
    whole = record.load(folder / "tiny.json")
    assert isinstance(whole, record.LatencyRecord)
    assert reproduced(differences(whole, whole))
    slower = record.parse(whole.to_json() | {"p50_ms": whole.max_ms * 1.01, "commit": "another"})
    assert isinstance(slower, record.LatencyRecord)
    rows = differences(whole, slower)
    assert not reproduced(rows)
    assert any(row.figure == "commit" and row.now == "another" for row in rows)


def test_a_record_runs_again_on_the_same_inputs(folder: Path) -> None:
    out = Console(record=True, width=200, quiet=True)
    reproduce_command(folder / "tiny.json", out, target=str(TINY))
    with pytest.raises(InnerloopError, match="one of a whole call"):
        reproduce_command(folder / "tiny-ladder.json", out)


def test_a_record_of_a_checkpoint_runs_again_where_that_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(InnerloopError, match=r"of the checkpoint 'tiny-pi05': say where it is, innerloop bench CKPT"):
        reproduce_command(folder / "tiny.json", Console(quiet=True))


def test_a_document_without_a_place_for_tables_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InnerloopError, match=r"tables\.md has no place for tables; add the lines"):
        report_command([folder], Console(quiet=True), markdown=tmp_path / "tables.md")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_load_says_how_far_it_has_come(terminal: bool) -> None:
    out = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with progress("loading pi05", out) as report:
        report("weights", 1_500_000_000, 7_000_000_000)
    said = out.file.getvalue()  # type: ignore[attr-defined]
    assert "loading pi05" in said
    assert ("weights 1.5 of 7.0 GB\n" in said) != terminal


def test_other_inputs_are_no_reproduction(folder: Path) -> None:
    whole = record.load(folder / "tiny.json")
    assert isinstance(whole, record.LatencyRecord)
    other = record.parse(whole.to_json() | {"inputs": "another"})
    assert isinstance(other, record.LatencyRecord)
    with pytest.raises(InnerloopError, match="this run's another"):
        differences(whole, other)


@pytest.mark.parametrize(
    "options",
    [
        BenchOptions("pi05", random_weights=True),
        BenchOptions("pi0", random_weights=True, against=("lerobot",), batch=(1, 2, 32), horizon=5, control_hz=12.5),
        BenchOptions("a dir", frames="640x480", encoding="jpeg", ladder=True, precision="bf16", delay_ms=3.0),
        BenchOptions("a dir", assets="libero_sim", tokenizer="tokenizer.json"),
        BenchOptions("a dir", adapter="my lora", edge="edge.json"),
    ],
)
def test_a_command_line_gives_its_options_again(options: BenchOptions) -> None:
    assert parse_command(options.command()) == options


def test_a_robot_and_a_tokenizer_are_chosen_as_for_a_load(tmp_path: Path) -> None:
    directory, elsewhere = groot.write(tmp_path / "groot"), tmp_path / "tokenizer.json"
    (directory / "tokenizer.json").rename(elsewhere)
    with pytest.raises(InnerloopError, match="serves 2 robots"):
        _ = Bench(BenchOptions(str(directory), device="cpu", against=("lerobot",)))
    made = Bench(BenchOptions(str(directory), device="cpu", assets=groot.DROID, tokenizer=str(elsewhere)))
    policy = made.policy()
    assert (made.family, policy.cameras) == ("groot", ("exterior", "wrist"))
    policy.close()
    assert made.options.command().endswith("--assets oxe_droid_relative_eef_relative_joint --tokenizer tokenizer.json")


def test_what_only_the_caller_knows_counts_for_a_benchmark(tmp_path: Path) -> None:
    edge = tmp_path / "edge.json"
    edge.write_text(json.dumps({"rename": {"front": "base"}}))
    asked = BenchOptions(str(TINY), device="cpu", edge=str(edge), ticks=4)
    whole = next(run_bench(asked))
    assert isinstance(whole, record.LatencyRecord)
    assert whole.command == "innerloop bench tiny-pi05 --device cpu --ticks 4 --edge edge.json"
    policy = Bench(asked).policy()
    assert policy.processor.describe()["rename"] == {"front": "base"}
    policy.close()
    for name in ("lerobot", "lerobot-compiled"):
        with pytest.raises(InnerloopError, match="leave these out, or LeRobot"):
            Bench(BenchOptions(str(TINY), edge=str(edge), against=(name,)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (BenchOptions("a dir", steps=5), "--steps changes nothing here: a checkpoint states its own"),
        (BenchOptions("pi05", random_weights=True, assets="x"), "--assets changes nothing here: there are no files"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(options: BenchOptions, words: str) -> None:
    with pytest.raises(InnerloopError, match=words):
        Bench(options)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"control": True, "control_hz": 0.0}, "control rate 0.0 Hz is not positive"),
        ({"control": True, "horizon": 0}, "horizon 0 is outside 1..10"),
        ({"control": True, "delay_ms": -5.0}, "delay of -5.0 ms is negative"),
        ({"prompt_tokens": 1000}, "holds prompts of up to 64 tokens, not 1000"),
        ({"prompt_tokens": 1}, "shortest prompt has .* tokens; ask for at least as many"),
        ({"frames": "4000x4000"}, "4000x4000 .* is larger than 1080x1920"),
        ({"profile": True}, "kernels are profiled on a GPU"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(
    asked: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("innerloop.measure.command.bench", lambda *_: pytest.fail("it was measured"))
    with pytest.raises(InnerloopError, match=words):
        next(run_bench(BenchOptions(str(TINY), device="cpu", **asked)))


def test_the_usual_prompt_is_no_shorter_than_the_policys_shortest() -> None:
    policy = engine.load(TINY, device="cpu")
    raised = make_workload(policy, (48, 64), 1, Message("raw"), raised=True)
    assert {one["prompt"] for one in raised.observations} == {"pick"}
    policy.close()


@pytest.mark.parametrize("frames", ["", "640", "x480", "0x4", "640x480x3", "a x b"])
def test_what_is_no_frame_size_is_refused(frames: str) -> None:
    with pytest.raises(InnerloopError, match="no size"):
        _ = BenchOptions("pi05", frames=frames).frame


def test_commands_that_are_not_ours_are_refused() -> None:
    for line in ("ls", "innerloop bench", "innerloop bench x --unheard 1"):
        with pytest.raises(InnerloopError):
            parse_command(line)


@pytest.mark.parametrize("encoding", ["raw", "jpeg"])
def test_messages_bring_back_the_observation(encoding: str) -> None:
    policy = engine.load(TINY, device="cpu")
    wire = Message(encoding)
    workload = make_workload(policy, (48, 64), 60, wire)
    sent = workload.observations[0]
    got = wire.unpack(wire.pack(sent))
    assert got["prompt"] == sent["prompt"]
    np.testing.assert_array_equal(got["state"], sent["state"])
    for name, frame in sent["images"].items():
        difference = np.abs(got["images"][name].astype(int) - frame)
        assert difference.max() == 0 if encoding == "raw" else difference.mean() < 25
    PolicySubject(policy).infer(got, workload.noises[0])
    policy.close()
