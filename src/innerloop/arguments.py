"""What is typed after a command as Python values; what cannot be read is a BadParameter that names the option."""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from innerloop import __version__


def _writable(path: Path | None) -> Path | None:
    """An output file's path, refused before the work whose result it is to take."""
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"{path} is a directory: name a file in it")
    _check_above(path)
    return path


def _folder(path: Path) -> Path:
    if path.exists() and not path.is_dir():
        raise typer.BadParameter(f"{path} is a file: name a directory")
    _check_above(path)
    return path


def _check_above(path: Path | None) -> None:
    above = next((p for p in path.absolute().parents if p.exists()), None) if path is not None else None
    if above is not None and not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        raise typer.BadParameter(f"nothing can be written in {above}: name another place")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


CheckpointPath = Annotated[
    Path, typer.Argument(metavar="CKPT", help="checkpoint directory (LeRobot, openpi, GR00T or starVLA)")
]
Chunk = Annotated[
    int | None,
    typer.Option(help="actions of a chunk: of random weights (10), or of an openpi directory that does not state them"),
]
Target = Annotated[
    str,
    typer.Argument(
        metavar="CKPT|FAMILY", help="checkpoint directory, or a family: random weights (bench: --random-weights)"
    ),
]
Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")]
Device = Annotated[str | None, typer.Option(help="cuda, cuda:1 or cpu; default: a GPU if there is one")]
Precision = Annotated[str | None, typer.Option(help="bf16 or fp32; default: bf16 on a GPU, fp32 on a CPU")]
Json = Annotated[bool, typer.Option("--json", help="print JSON instead of tables")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="write the record", callback=_writable)]
HtmlFile = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="write one self-contained page", callback=_writable)
]
TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", help="also write a Chrome / Perfetto trace", callback=_writable),
]
Folder = Annotated[Path, typer.Option(help="directory that the page goes to", callback=_folder)]
TokenizerPath = Annotated[
    Path | None, typer.Option(help="tokenizer.json or SentencePiece .model, if the checkpoint has none")
]
Assets = Annotated[
    str | None, typer.Option(help="which statistics, or which of a GR00T's robots, where there are several")
]
Adapter = Annotated[Path | None, typer.Option(help="PEFT LoRA directory to merge at load")]
Horizon = Annotated[int | None, typer.Option(help="action horizon, for openpi directories that do not state it")]
EdgeFile = Annotated[
    Path | None, typer.Option("--edge", metavar="FILE", help="JSON with what only you know (docs/process.md)")
]
MemoryCap = Annotated[float | None, typer.Option(metavar="GIB", help="refuse a memory plan larger than this")]
RandomWeights = Annotated[bool, typer.Option("--random-weights", help="the published full size, weights made up")]
Ticks = Annotated[
    int, typer.Option(min=1, help="measured decisions, after warm-up; of slow policies as many as a minute holds")
]
Against = Annotated[
    str,
    typer.Option(
        help="other implementations, comma separated: lerobot, lerobot-compiled, openpi, transformers (its Qwen3-VL below "
        "our head), torch-compile (our plan in plain torch, each stage compiled: minutes at full size)"
    ),
]
Ladder = Annotated[
    bool, typer.Option("--ladder", help="official, eager, torch.compile, captured, operators, fused: each rung's ms")
]
Control = Annotated[
    bool, typer.Option("--control", help="control-time roofline: is the policy or the robot the limit?")
]
Profile = Annotated[bool, typer.Option("--profile", help="kernels of each stage by their share, on a GPU")]
Rename = Annotated[list[str] | None, typer.Option(metavar="ROBOT=CKPT", help="camera rename; repeatable")]


_EXTRAS = {  # what pyproject.toml installs under the name of an extra
    "serve": ("websockets", "msgpack", "grpc", "zmq", "prometheus_client"),
    "sim": ("metaworld", "mujoco"),
}


def remedy(error: ModuleNotFoundError) -> str | None:
    """How to get the package that is absent, where an extra of ours has it."""
    package = (error.name or "").partition(".")[0]
    named = next((extra for extra, packages in _EXTRAS.items() if package in packages), None)
    return named and f"this needs the package {package}: pip install 'innerloop[{named}]'"


def edge(rename: list[str] | None, tokenizer: Path | None, file: Path | None = None) -> Any:
    """The Edge that --edge, --rename and --tokenizer ask for; the last two stand before the file."""
    from innerloop.process import edge_of

    return edge_of(file, tokenizer, pairs(rename or (), "--rename"))


def behind_a_server(found: Any) -> Any:
    """The Edge of a policy that is served: the server itself turns CHW frames into HWC."""
    return replace(found, images=replace(found.images, layout="HWC"))


def check_alone(context: typer.Context, option: str, *beside: str) -> None:
    """Raises BadParameter where, beside this option, one was given that would change nothing."""
    taken, idle = {option.removeprefix("--"), *beside}, []
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if source is not None and source.name == "COMMANDLINE" and parameter.name not in taken:
            idle.append(parameter.opts[0])
    if idle:
        raise typer.BadParameter(f"{', '.join(idle)} would change nothing beside {option}: leave it out")


def check_family(target: str, random_weights: bool) -> None:
    """Raises BadParameter where a family stands for a checkpoint directory."""
    from innerloop.policies import FAMILIES

    if target in FAMILIES and not random_weights and not Path(target).is_dir():
        raise typer.BadParameter(f"{target} is a family: add --random-weights, or name a checkpoint directory")


def capped(gigabytes: float | None) -> int | None:
    """Bytes of --memory-cap."""
    return None if gigabytes is None else int(gigabytes * 2**30)


def listed(text: str) -> tuple[str, ...]:
    """What stands between commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def counts(text: str, option: str) -> tuple[int, ...]:
    """Whole numbers from 1 between commas."""
    parts = listed(text)
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{option} takes whole numbers from 1, separated by commas, got '{text}'")
    return tuple(int(part) for part in parts)


def pair(item: str, option: str) -> tuple[str, str]:
    """NAME=VALUE."""
    name, equals, value = item.partition("=")
    if not equals or not name or not value:
        raise typer.BadParameter(f"{option} takes NAME=VALUE, got '{item}'")
    return name, value


def pairs(items: Iterable[str], option: str) -> dict[str, str]:
    """NAME=VALUE of each, every name once."""
    found: dict[str, str] = {}
    for name, value in (pair(item, option) for item in items):
        if name in found:
            raise typer.BadParameter(f"{option} names '{name}' twice: '{found[name]}' and '{value}'")
        found[name] = value
    return found


def picture(path: Path) -> np.ndarray:
    """uint8 [height, width, 3] RGB of an image file."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as opened:
            return np.asarray(opened.convert("RGB"))
    except (OSError, UnidentifiedImageError) as error:
        raise typer.BadParameter(f"cannot read the image {path}: {error}") from error


def array(path: Path, option: str) -> np.ndarray:
    """What a .npy file holds; never objects, which would have to be unpickled."""
    try:
        loaded = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise typer.BadParameter(f"{option} cannot read {path} as a .npy file of numbers: {error}") from error
    if not isinstance(loaded, np.ndarray):
        raise typer.BadParameter(f"{option} takes a .npy file with one array, {path} holds several")
    return loaded


def numbers(text: str) -> np.ndarray:
    """float [n] from a .npy file or from numbers between commas."""
    if text.endswith(".npy"):
        return array(Path(text), "--state")
    try:
        return np.array([float(x) for x in text.split(",")], dtype=np.float32)
    except ValueError as error:
        raise typer.BadParameter(f"--state takes numbers separated by commas or a .npy file, got '{text}'") from error
