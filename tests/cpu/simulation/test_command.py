"""`innerloop eval` from the command line to the record, in a toy world; comparing two records; what is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from toys import Seen
from typer.testing import CliRunner

from innerloop.cli import app
from innerloop.contract import InnerloopError
from innerloop.execute import MODES
from innerloop.measure import record
from innerloop.measure.record import SuccessRecord
from innerloop.simulation import command, display, episode, evaluate
from innerloop.simulation.episode import Latency

TINY = str(Path(__file__).resolve().parents[3] / "examples" / "checkpoints" / "tiny-pi05")
EVAL = ["eval", TINY, "--device", "cpu", "--tasks", "reach-v3,push-v3", "--seeds", "3"]


@pytest.fixture(autouse=True)
def toy_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "World", Seen)
    monkeypatch.setattr(command, "check_fits", lambda policy: None)  # the tiny checkpoint is not of these worlds
    monkeypatch.setattr(evaluate, "version", lambda name: "0")
    monkeypatch.setattr(episode, "LIMIT", 24)
    monkeypatch.setattr(display, "prepare", lambda say: "osmesa")


def invoke(*words: str) -> str:
    done = CliRunner().invoke(app, [*EVAL, *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_from_the_command_line_to_the_record(mode: str, tmp_path: Path) -> None:
    file = tmp_path / "made" / f"{mode}.json"
    printed = invoke("--mode", mode, "--execute", "4", "--delay-ms", "50", "--jitter-ms", "0", "--json", str(file))
    assert "reach-v3: 2 of 3 solved push-v3: 0 of 3 solved" in printed
    assert "all │ 2 of 6 │ 10% to 70%" in printed
    found = record.load(file)
    assert isinstance(found, SuccessRecord)
    assert found.outcomes == {"reach-v3": [True, False, True], "push-v3": [False, False, False]}
    assert (found.successes, found.episodes, found.seeds, found.mode) == (2, 6, [0, 1, 2], mode)
    assert (found.horizon, found.chunk, found.rate_hz, found.delay_ms) == (4, 10, 40.0, 50.0)
    assert found.engine == "innerloop"
    assert found.policy == "pi05"
    assert found.waited == pytest.approx(_waited(mode), abs=1e-6)
    assert 0 < found.seam < 10 or (mode == "ensemble" and found.seam == -1)


def _waited(mode: str) -> float:
    """Ticks without an action of all: two solved episodes and four of 24 ticks; every answer takes two."""
    if mode == "synchronous":  # the fifth action needs another answer: 2 + 4 + 2 + 1 ticks
        return (2 * 4 + 4 * 8) / (2 * 9 + 4 * 24)
    return (2 * 2 + 4 * 2) / (2 * 7 + 4 * 24)


def test_a_record_is_compared_with_the_same_episodes(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    invoke("--json", str(first))
    changed = json.loads(first.read_text())
    changed["outcomes"]["push-v3"] = [True, True, True]
    second.write_text(json.dumps(changed))
    assert "only this 0, only the other 0, both 2, neither 4: p = 1.000" in invoke("--against", str(first))
    assert "only this 0, only the other 3, both 2, neither 1: p = 0.250" in invoke("--against", str(second))


def test_other_episodes_are_refused_before_any_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "first.json"
    invoke("--json", str(file))
    monkeypatch.setattr(command, "run_eval", lambda *_, **__: pytest.fail("ran"))
    for words in (["--seeds", "2"], ["--tasks", "push-v3,reach-v3"]):
        with pytest.raises(InnerloopError, match="has other episodes"):
            CliRunner().invoke(app, [*EVAL, *words, "--against", str(file)], catch_exceptions=False)


def test_records_of_other_episodes_cannot_be_paired(tmp_path: Path) -> None:
    file = tmp_path / "first.json"
    invoke("--json", str(file))
    found: Any = record.load(file)
    with pytest.raises(InnerloopError, match="different episodes"):
        evaluate.compare(found, dataclasses.replace(found, inputs="other"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mode": "fast"}, "no execution mode 'fast'; choose of synchronous"),
        ({"tasks": ["fly-v3"]}, "no task fly-v3; choose of reach-v3"),
        ({"seeds": 0}, "--seeds must be at least 1"),
        ({"latency": Latency(-1.0)}, "at least 0"),
        ({"execute": 0}, "--execute is 0"),
    ],
)
def test_what_cannot_be_run_is_refused(change: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"tasks": [], "seeds": 1, "mode": "synchronous", "execute": None, "latency": Latency()}
    with pytest.raises(InnerloopError, match=words):
        command.setting(**{**given, **change})


def test_a_policy_of_another_robot_is_told_what_the_worlds_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(display, "prepare", lambda say: "osmesa")
    words = "cameras base, wrist, 8 state values and 7 actions; the simulated tasks have front, side, 4 and 4"
    with pytest.raises(InnerloopError, match=words):
        CliRunner().invoke(app, EVAL, catch_exceptions=False)


def test_who_decides_must_exist() -> None:
    asked = command.setting([], 1, "synchronous", None, Latency())
    with pytest.raises(InnerloopError, match="no engine 'tensorrt'; choose of innerloop, lerobot"):
        command.run_eval(Path(TINY), asked, None, by="tensorrt")  # type: ignore[arg-type]
    asked = command.setting([], 1, "prefix", None, Latency())
    with pytest.raises(InnerloopError, match="LeRobot .* cannot be given a prefix: use --mode realtime"):
        command.run_eval(Path(TINY), asked, None, by="lerobot")  # type: ignore[arg-type]


def test_what_is_not_said_is_chosen_by_the_mode() -> None:
    chosen = {mode: command.setting([], 1, mode, None, Latency()).execute for mode in ("realtime", "ensemble")}
    assert chosen == {"realtime": 16, "ensemble": 1}
    assert len(command.setting([], 1, "realtime", None, Latency()).tasks) == 5


def test_no_more_is_executed_than_a_chunk_has_and_the_record_says_so(tmp_path: Path) -> None:
    file = tmp_path / "first.json"
    assert "synchronous, 10 of 10 actions" in invoke("--json", str(file))  # 16 if nothing is asked for
    found: Any = record.load(file)
    assert found.horizon == 10
