"""The command line parses, calls and prints; errors are one line that names thing and remedy."""

import importlib.util
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from innerloop.cli import app
from innerloop.contract import InnerloopError

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "examples" / "checkpoints" / "tiny-pi05")
FRAMES = ROOT / "examples" / "frames"
RUN = [
    *("run", TINY, "--image", f"base={FRAMES}/0-base.png", "--image", f"wrist={FRAMES}/0-wrist.png"),
    *("--state", "1,2,3,4,5,6,7,8", "--prompt", "pick up", "--device", "cpu"),
]


def test_run_prints_json_that_repeats() -> None:
    runs = [CliRunner().invoke(app, [*RUN, "--seed", "3", "--json"]) for _ in range(2)]
    assert all(r.exit_code == 0 for r in runs), runs[0].output
    one, two = (json.loads(r.stdout.strip().splitlines()[-1]) for r in runs)
    assert one["actions"] == two["actions"]
    assert np.array(one["actions"]).shape == (10, 7)
    assert one["receipt"]["seed"] == 3


def test_run_takes_noise_from_a_file(tmp_path: Path) -> None:
    np.save(tmp_path / "n.npy", np.zeros((10, 32), np.float32))
    done = CliRunner().invoke(app, [*RUN, "--noise", str(tmp_path / "n.npy"), "--json"])
    assert done.exit_code == 0, done.output


def test_run_for_people_shows_actions_timing_and_receipt() -> None:
    done = CliRunner().invoke(app, [*RUN, "--seed", "0"])
    assert done.exit_code == 0
    for words in ("robot units", "timing", "fingerprint", "vision"):
        assert words in done.stdout


def test_rename_maps_the_robots_camera_names() -> None:
    renamed = [a.replace("base=", "front=") for a in RUN]
    done = CliRunner().invoke(app, [*renamed, "--rename", "front=base", "--seed", "3", "--json"])
    assert done.exit_code == 0, done.output
    plain = CliRunner().invoke(app, [*RUN, "--seed", "3", "--json"])
    last = [json.loads(r.stdout.strip().splitlines()[-1])["actions"] for r in (done, plain)]
    assert last[0] == last[1]


class Unpickled:
    """Fails the test when somebody unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a pickle was loaded",))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--image", "base"], "NAME=VALUE"),
        (["--image", "side=/nowhere.png"], "/nowhere.png"),
        (["--image", "base=x.png"], "--image names 'base' twice"),
        (["--state", "one,two"], "numbers separated by commas"),
        (["--state", "/nowhere.npy"], "--state cannot read /nowhere.npy"),
        (["--noise", "/nowhere.npy"], "--noise cannot read /nowhere.npy"),
        (["--noise", "{pickle}"], "numbers"),
        (["--image", "side={cut}"], "truncated"),
    ],
)
def test_bad_arguments_are_named(change: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "pickle.npy").write_bytes(pickle.dumps(Unpickled()))
    (tmp_path / "cut.png").write_bytes((FRAMES / "0-base.png").read_bytes()[:500])
    files = {"pickle": tmp_path / "pickle.npy", "cut": tmp_path / "cut.png"}
    done = CliRunner().invoke(app, [*RUN, *(part.format(**files) for part in change)])
    assert done.exit_code == 2
    assert words in done.output.replace("\n", " ").replace("│", "").replace("  ", " ")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--device", "banana"], "no device 'banana'; ask for cuda"),
        (["--device", "mps"], "'mps' is not supported"),
        (["--seed", "-1"], "seed is -1"),
        (["--memory-cap", "0.001"], "over the cap of 1.0 MiB; nothing was allocated"),
        (["--edge", "/nowhere.json"], "/nowhere.json is not a readable JSON"),
        (["--edge", "{wide}"], r"'step' has shape \(3,\); this robot needs \(7,\)"),
    ],
)
def test_what_cannot_be_met_is_refused(change: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "wide.json").write_text('{"limits": {"step": [1, 1, 1]}}')
    asked = [part.format(wide=tmp_path / "wide.json") for part in change]
    with pytest.raises(InnerloopError, match=words):
        CliRunner().invoke(app, [*RUN, *asked], catch_exceptions=False)


@pytest.mark.parametrize("images", [{"color": "BGR"}, {"layout": "CHW"}, {"range": "unit", "color": "BGR"}])
def test_image_files_are_what_they_show_however_the_robot_sends_its_frames(tmp_path: Path, images: Any) -> None:
    (tmp_path / "edge.json").write_text(json.dumps({"rename": {"front": "base"}, "images": images}))
    renamed = [a.replace("base=", "front=") for a in RUN]
    ours = CliRunner().invoke(app, [*renamed, "--edge", str(tmp_path / "edge.json"), "--seed", "3", "--json"])
    assert ours.exit_code == 0, ours.output
    plain = CliRunner().invoke(app, [*RUN, "--seed", "3", "--json"])
    last = [json.loads(r.stdout.strip().splitlines()[-1])["actions"] for r in (ours, plain)]
    assert last[0] == last[1]


@pytest.mark.parametrize("change", [("--state", "1,2"), ("--seed", "-1"), ("--image", f"side={FRAMES}/0-base.png")])
def test_a_bad_observation_is_known_before_weights_are_read(change: tuple[str, str]) -> None:
    done = CliRunner().invoke(app, [*RUN, *change])
    assert isinstance(done.exception, InnerloopError)
    assert "weights" not in done.stderr


def test_the_account_is_one_line() -> None:
    done = CliRunner().invoke(app, [*RUN, "--seed", "0"])
    assert len([line for line in done.stderr.splitlines() if "weights: 84 loaded" in line and "digest" in line]) == 1


def test_the_memory_plan_is_printed_before_the_account() -> None:
    done = CliRunner().invoke(app, [*RUN, "--seed", "0", "--memory-cap", "1"])
    assert done.exit_code == 0, done.output
    assert 0 <= done.stderr.index("memory plan on cpu") < done.stderr.index("weights: 84 loaded")


def test_our_errors_are_one_line_without_a_traceback() -> None:
    command = [sys.executable, "-m", "innerloop", *RUN[:4], *RUN[6:], "--seed", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ObservationError" in done.stderr
    assert "wrist" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("package", "protocol"),
    [("websockets", "openpi"), ("msgpack", "openpi"), ("grpc", "lerobot"), ("zmq", "groot")],
)
def test_an_extra_that_is_not_installed_is_named(package: str, protocol: str) -> None:
    code = f"import sys; sys.modules['{package}'] = None; from innerloop.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", TINY, "--protocol", protocol]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"needs the package {package}: pip install 'innerloop[serve]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_inspect_as_text_json_and_page(tmp_path: Path) -> None:
    text = CliRunner().invoke(app, ["inspect", TINY])
    assert "context" in text.stdout
    assert "observation" in text.stdout
    plain = CliRunner().invoke(app, ["inspect", TINY, "--json"])
    assert json.loads(plain.stdout)["plans"][0]["schema"] == 1
    page = tmp_path / "plan.html"
    assert CliRunner().invoke(app, ["inspect", TINY, "--html", str(page)]).exit_code == 0
    assert "<svg" in page.read_text()
    both = CliRunner().invoke(app, ["inspect", TINY, "--json", "--html", str(tmp_path / "new" / "plan.html")])
    assert json.loads(both.stdout)["details"]["precision"] == "bf16"
    assert (tmp_path / "new" / "plan.html").read_text() == page.read_text()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["bench", TINY, "--json", "{tmp}"], "is a directory: name a file in it"),
        (["bench", TINY, "--json", "{tmp}/file/record.json"], "nothing can be written in"),
        (["inspect", TINY, "--html", "{tmp}"], "is a directory: name a file in it"),
        (["demo", "--output", "{tmp}/file"], "is a file: name a directory"),
        (["bench", TINY, "--batch", "2,x"], "--batch takes whole numbers from 1, separated by commas, got '2,x'"),
        (["bench", "--url", "ws://localhost:1", "--clients", "0"], "--clients takes whole numbers from 1"),
        (["bench", TINY, "--ticks", "0"], "'--ticks'"),
        (["bench", "pi05"], "pi05 is a family: add --random-weights"),
        (["bench", "--url", "ws://localhost:1", "--batch", "2"], "--batch would change nothing beside --url"),
        (["bench", "--reproduce", "a.json", "--json", "b.json"], "--json would change nothing beside --reproduce"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(command: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = CliRunner().invoke(app, [part.format(tmp=tmp_path) for part in command])
    assert done.exit_code == 2, done.exception
    assert words.replace(" ", "") in "".join(done.output.replace("\u2502", "").split())


def test_a_comparison_that_cannot_be_made_is_refused_before_weights_are_read() -> None:
    for asked, words in ((["--against", "jax"], "no official implementation 'jax'"), ([], "needs the module lerobot")):
        if asked or importlib.util.find_spec("lerobot") is None:
            with pytest.raises(InnerloopError, match=words):
                CliRunner().invoke(app, ["parity", "/nowhere", *asked], catch_exceptions=False)


def test_a_server_that_is_not_there_and_a_file_that_may_not_be_read_are_one_line() -> None:
    with pytest.raises(InnerloopError, match="'http://localhost:1' is no address; give ws://HOST:PORT"):
        CliRunner().invoke(app, ["bench", "--url", "http://localhost:1"], catch_exceptions=False)
    denied = "(_ for _ in ()).throw(PermissionError(13, 'Permission denied', str(path)))"
    code = f"import pathlib; pathlib.Path.iterdir = lambda path: {denied}; from innerloop.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "inspect", TINY], capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert f"not permitted: {TINY}: Permission denied; change its owner" in done.stderr


def test_bench_wants_a_target() -> None:
    assert CliRunner().invoke(app, ["bench"]).exit_code == 2
    with pytest.raises(InnerloopError, match="no family"):
        CliRunner().invoke(app, ["bench", "pi9", "--random-weights"], catch_exceptions=False)


def test_tune_needs_a_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(InnerloopError, match="needs a GPU"):
        CliRunner().invoke(app, ["tune", TINY], catch_exceptions=False)


def test_importing_the_client_brings_no_torch() -> None:
    code = "import sys, innerloop.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
