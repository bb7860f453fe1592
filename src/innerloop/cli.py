"""Command line: parse, call, print."""

import json
import logging
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from innerloop import arguments
from innerloop.contract import InnerloopError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Run robot policies as fast as the GPU allows, and prove that the actions are right.",
)
out, err = Console(), Console(stderr=True)


def main() -> None:
    """Entry point: an error of ours, an extra not installed, or a file not permitted is one line on stderr and exit status 1."""
    try:
        app()
    except InnerloopError as error:
        _fail(type(error).__name__, str(error))
    except ModuleNotFoundError as error:
        if (remedy := arguments.remedy(error)) is None:
            raise
        _fail("not installed", remedy)
    except PermissionError as error:
        _fail("not permitted", f"{error.filename}: {error.strerror}; change its owner or mode, or name another file")


def _fail(kind: str, words: str) -> None:
    err.print(f"[bold red]{kind}[/]: ", end="")
    err.print(words, markup=False, highlight=False, soft_wrap=True)
    sys.exit(1)


@app.callback()
def options(version: arguments.Version = False) -> None:
    """Run robot policies as fast as the GPU allows, and prove that the actions are right."""


@app.command()
def run(
    checkpoint: arguments.CheckpointPath,
    image: Annotated[list[str], typer.Option(metavar="CAMERA=FILE", help="a camera's frame; repeat for each camera")],
    state: Annotated[str, typer.Option(help="robot state: numbers separated by commas, or a .npy file")],
    prompt: Annotated[str, typer.Option(help="the task in words")],
    seed: Annotated[int | None, typer.Option(help="seed of the solver's noise")] = None,
    noise: Annotated[Path | None, typer.Option(help=".npy file with the solver's noise, float [horizon, dims]")] = None,
    device: arguments.Device = None,
    precision: arguments.Precision = None,
    tokenizer: arguments.TokenizerPath = None,
    assets: arguments.Assets = None,
    adapter: arguments.Adapter = None,
    horizon: arguments.Horizon = None,
    rename: arguments.Rename = None,
    edge: arguments.EdgeFile = None,
    memory_cap: arguments.MemoryCap = None,
    as_json: arguments.Json = False,
) -> None:
    """One decision from image files, a state and a prompt."""
    from innerloop import engine
    from innerloop.measure import decision
    from innerloop.measure.progress import loading
    from innerloop.process import from_frame

    known, files = arguments.edge(rename, tokenizer, edge), arguments.pairs(image, "--image")
    observation = {
        "images": {name: from_frame(arguments.picture(Path(path)), known.images) for name, path in files.items()},
        "state": arguments.numbers(state),
        "prompt": prompt,
    }
    start = None if noise is None else arguments.array(noise, "--noise")
    found = engine.open_policy(checkpoint, assets=assets, adapter=adapter, horizon=horizon, edge=known)
    found.processor.prepare(observation)  # a bad observation is known before weights are read
    found.processor.noise(start, seed)
    placement, cap = engine.place(device, precision, 1, "fused"), arguments.capped(memory_cap)
    policy = loading(checkpoint.name, err, lambda report: found.load(placement, cap, report, _say))
    chunk = policy.infer(observation, seed=seed, noise=start)
    if as_json:
        print(json.dumps(decision.as_json(chunk)))
    else:
        out.print(decision.tables(chunk))
    policy.close()


@app.command()
def generate(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Qwen3 or Qwen3-VL directory")],
    prompt: Annotated[str, typer.Option(help="what to say")],
    image: Annotated[list[Path] | None, typer.Option(help="an image file; repeatable")] = None,
    max_tokens: Annotated[int, typer.Option(help="longest answer")] = 128,
    device: arguments.Device = None,
    precision: arguments.Precision = None,
) -> None:
    """The answer of a Qwen3 or Qwen3-VL directory, greedily decoded: the levels that policies are built on."""
    from innerloop import levels

    level = levels.load_level(directory, device=device, precision=precision)
    _say(str(level.account))
    out.print(level.generate(prompt, [arguments.picture(path) for path in image or ()], max_tokens), markup=False)


@app.command()
def inspect(
    checkpoint: arguments.CheckpointPath,
    as_json: arguments.Json = False,
    html: arguments.HtmlFile = None,
    precision: Annotated[str | None, typer.Option(help="bf16 or fp32; default: bf16, as on a GPU")] = None,
    horizon: arguments.Horizon = None,
    assets: arguments.Assets = None,
) -> None:
    """The plan: stages, clocks, buffers, bytes. Reads headers only, allocates nothing."""
    from innerloop import engine
    from innerloop.measure import plan_text

    sketch = engine.sketch(checkpoint, precision=precision, horizon=horizon, assets=assets)
    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(plan_text.page(sketch.manifests[-1], sketch.details))
        _say(f"wrote {html}")
    if as_json:
        print(json.dumps({"details": sketch.details, "plans": sketch.manifests}))
    elif html is None:
        out.print(plan_text.tables(sketch.manifests[-1]))
        out.print(plan_text.lines(sketch.details), str(sketch.memory), sep="\n", highlight=False)


@app.command()
def doctor(as_json: arguments.Json = False) -> None:
    """Check this machine: GPU, builds, attention paths, extras; each finding with its remedy."""
    from innerloop.measure import doctor as checks

    findings = checks.examine()
    if as_json:
        print(json.dumps(checks.as_json(findings)))
    else:
        out.print(checks.text(findings), highlight=False)
    if any(f.state == "bad" for f in findings):
        raise typer.Exit(1)


@app.command()
def demo(
    output: arguments.Folder = Path("demo-output"),
    device: arguments.Device = None,
    precision: arguments.Precision = None,
) -> None:
    """Let the shipped policy drive a simulated arm through five tasks: success, stages, control verdict, film and page."""
    from innerloop import demo as demonstration

    demonstration.main(output, device, precision, out)


@app.command("eval")
def evaluate(
    checkpoint: arguments.CheckpointPath,
    tasks: Annotated[str, typer.Option(help="Meta-World tasks, comma separated; default: all five")] = "",
    seeds: Annotated[int, typer.Option(help="episodes a task: seeds 0, 1, ...")] = 20,
    mode: Annotated[
        str, typer.Option(help="synchronous, asynchronous, ensemble, realtime, or prefix where trained so")
    ] = "synchronous",
    execute: Annotated[
        int | None, typer.Option(help="actions from one observation to the next; default: 16, and 1 for an ensemble")
    ] = None,
    delay_ms: Annotated[float, typer.Option(help="latency added to every answer, in simulated time")] = 0.0,
    jitter_ms: Annotated[float, typer.Option(help="up to so much more, evenly spread")] = 0.0,
    by: Annotated[str, typer.Option(help="who decides: innerloop or lerobot")] = "innerloop",
    against: Annotated[Path | None, typer.Option(metavar="RECORD", help="compare with the same episodes")] = None,
    device: arguments.Device = None,
    precision: arguments.Precision = None,
    as_json: arguments.JsonFile = None,
) -> None:
    """Success of a policy in simulation, with its interval, under one way of executing it."""
    from innerloop.simulation import command
    from innerloop.simulation.episode import Latency

    setting = command.setting(arguments.listed(tasks), seeds, mode, execute, Latency(delay_ms, jitter_ms))
    other = None if against is None else command.same_episodes(against, setting)
    line = shlex.join(["innerloop", *sys.argv[1:]])
    found = command.run_eval(checkpoint, setting, out, by=by, command=line, device=device, precision=precision)
    if as_json is not None:
        found.save(as_json)
    if other is not None:
        out.print(command.comparison(found, other), highlight=False)


@app.command()
def parity(
    checkpoint: arguments.CheckpointPath,
    against: Annotated[str, typer.Option(help="the official implementation: lerobot")] = "lerobot",
    prompt: Annotated[str, typer.Option(help="the task in words")] = "pick up the red block",
    seed: Annotated[int, typer.Option(min=0, help="seed of the made-up observation and noise")] = 0,
    device: arguments.Device = None,
    precision: arguments.Precision = None,
    assets: arguments.Assets = None,
    tokenizer: arguments.TokenizerPath = None,
    as_json: arguments.Json = False,
) -> None:
    """Run both sides stage by stage with pinned noise and name the first stage that differs."""
    from innerloop.measure import parity_command

    parity_command.check(against)
    edge = arguments.edge(None, tokenizer)
    policy = _load(checkpoint, device=device, precision=precision, assets=assets, edge=edge)
    found = parity_command.against_lerobot(checkpoint, policy, prompt, seed, tokenizer)
    print(json.dumps(found.to_json())) if as_json else out.print(found.text(), highlight=False, markup=False)
    policy.close()
    if not found.passed:
        raise typer.Exit(1)


@app.command()
def bench(
    context: typer.Context,
    target: arguments.Target = "",
    random_weights: arguments.RandomWeights = False,
    views: Annotated[int, typer.Option(help="cameras, for random weights")] = 2,
    chunk: arguments.Chunk = None,
    steps: Annotated[int, typer.Option(help="solver steps, for random weights")] = 10,
    prompt_tokens: Annotated[int, typer.Option(help="tokens of the whole prompt, or of the shortest")] = 48,
    frames: Annotated[str, typer.Option(metavar="WxH", help="size of the frames sent")] = "224x224",
    encoding: Annotated[str, typer.Option(help="how frames travel: raw or jpeg")] = "raw",
    device: arguments.Device = None,
    precision: arguments.Precision = None,
    kernels: Annotated[str, typer.Option(help="reference, operators or fused")] = "fused",
    ticks: arguments.Ticks = 1000,
    seed: Annotated[int, typer.Option(min=0, help="seed of weights, observations and noise")] = 0,
    against: arguments.Against = "",
    batch: Annotated[str, typer.Option(help="batch sizes of a batch curve, comma separated")] = "",
    ladder: arguments.Ladder = False,
    control: arguments.Control = False,
    profile: arguments.Profile = False,
    control_hz: Annotated[float, typer.Option(help="control rate")] = 50.0,
    environment_ms: Annotated[float, typer.Option(help="time of one environment step")] = 0.0,
    delay_ms: Annotated[float, typer.Option(help="network delay, both ways")] = 0.0,
    horizon: Annotated[int | None, typer.Option(help="executed actions of a chunk")] = None,
    assets: arguments.Assets = None,
    adapter: arguments.Adapter = None,
    edge: arguments.EdgeFile = None,
    tokenizer: arguments.TokenizerPath = None,
    url: Annotated[str | None, typer.Option(metavar="ws://HOST:PORT", help="measure a server at its clients")] = None,
    clients: Annotated[str, typer.Option(help="with --url: clients at once, comma separated")] = "1",
    token: Annotated[str | None, typer.Option(help="with --url: what the server wants to see")] = None,
    as_json: arguments.JsonFile = None,
    trace: arguments.TraceFile = None,
    reproduce: Annotated[Path | None, typer.Option(metavar="RECORD", help="run its command again, compare")] = None,
) -> None:
    """Measure the whole call, stage by stage, against this machine's measured ceilings."""
    from innerloop.measure import command
    from innerloop.measure.options import BenchOptions

    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logging.getLogger("innerloop").setLevel(logging.INFO)
    if url is not None:
        arguments.check_alone(context, "--url", "clients", "token", "frames", "ticks", "seed", "as_json")
        from innerloop.client import RemoteError, RemotePolicy
        from innerloop.measure.served import ServedOptions

        served = ServedOptions(frames=frames, clients=arguments.counts(clients, "--clients"), ticks=ticks, seed=seed)
        line = f"innerloop bench --url {url} --clients {clients} --frames {frames} --ticks {ticks} --seed {seed}"
        try:
            command.served_command(lambda n: RemotePolicy(url, token=token, session=n), served, line, out, as_json)
        except RemoteError as error:
            raise InnerloopError(f"the server does not answer as it should: {error}") from error
        return
    if reproduce is not None:
        arguments.check_alone(context, "--reproduce", "target")
        raise typer.Exit(0 if command.reproduce_command(reproduce, out, target or None) else 1)
    if not target:
        raise typer.BadParameter("name a checkpoint directory, or a family with --random-weights")
    arguments.check_family(target, random_weights)
    named = {"adapter": adapter, "edge": edge, "tokenizer": tokenizer}
    asked: dict[str, Any] = {
        "random_weights": random_weights, "views": views, "chunk": chunk, "steps": steps, "prompt_tokens": prompt_tokens,
        "frames": frames, "encoding": encoding, "device": device, "precision": precision, "kernels": kernels,
        "ticks": ticks, "seed": seed, "against": arguments.listed(against), "batch": arguments.counts(batch, "--batch"),
        "ladder": ladder, "control": control, "control_hz": control_hz, "environment_ms": environment_ms,
        "delay_ms": delay_ms, "horizon": horizon, "profile": profile, "assets": assets,
        **{name: str(path) for name, path in named.items() if path is not None},
    }  # fmt: skip
    command.bench_command(BenchOptions(target, **asked), out, as_json, trace)


@app.command()
def tune(
    target: arguments.Target,
    prompt: Annotated[
        str, typer.Option(help="the task in words; its length chooses the capacity")
    ] = "pick up the red block",
    ticks: Annotated[int, typer.Option(min=1, help="decisions timed for each candidate")] = 60,
    file: Annotated[Path | None, typer.Option(help="where to keep the choices; default: the user's cache")] = None,
    precision: arguments.Precision = None,
    assets: arguments.Assets = None,
    adapter: arguments.Adapter = None,
    horizon: arguments.Horizon = None,
    edge: arguments.EdgeFile = None,
    tokenizer: arguments.TokenizerPath = None,
) -> None:
    """Try kernel launches inside the captured pipeline and keep those that make a decision faster on this GPU."""
    from innerloop import engine
    from innerloop.measure import tuning

    if Path(target).is_dir():
        known = arguments.edge(None, tokenizer, edge)
        chosen = {"assets": assets, "adapter": adapter, "horizon": horizon, "edge": known}
        policy = _load(Path(target), precision=precision, **chosen)
    else:
        policy = engine.random_policy(target, precision=precision)
    tuning.tune_command(policy, prompt, ticks, file, out)
    policy.close()


@app.command()
def report(
    records: Annotated[list[Path], typer.Argument(metavar="RECORDS...", help="record files or directories of them")],
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write tables between the markers of a document")
    ] = None,
    html: arguments.HtmlFile = None,
) -> None:
    """Tables and plots from records."""
    from innerloop.measure import command

    command.report_command(records, out, markdown, html)


@app.command()
def serve(
    checkpoint: arguments.CheckpointPath,
    protocol: Annotated[str, typer.Option(help="openpi, lerobot or groot")] = "openpi",
    host: Annotated[str, typer.Option(help="address to bind; another than loopback needs a token")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="default: 8000 openpi, 8080 lerobot, 5555 groot")] = None,
    http_port: Annotated[int, typer.Option(help="page, metrics and truth endpoint, beside lerobot and groot")] = 8000,
    token: Annotated[
        str | None,
        typer.Option(help="what clients must present; also read from INNERLOOP_TOKEN", envvar="INNERLOOP_TOKEN"),
    ] = None,
    allow_public: Annotated[bool, typer.Option("--allow-public", help="bind elsewhere without a token")] = False,
    certificate: Annotated[Path | None, typer.Option(help="TLS certificate")] = None,
    private_key: Annotated[Path | None, typer.Option(help="TLS private key")] = None,
    device: arguments.Device = None,
    precision: arguments.Precision = None,
    tokenizer: arguments.TokenizerPath = None,
    assets: arguments.Assets = None,
    adapter: arguments.Adapter = None,
    horizon: arguments.Horizon = None,
    rename: arguments.Rename = None,
    edge: arguments.EdgeFile = None,
    memory_cap: arguments.MemoryCap = None,
    batch: Annotated[int, typer.Option(min=1, help="most robots decided for at once; one alone costs no more")] = 1,
) -> None:
    """Serve a policy to the robot clients that exist. Loopback by default; ready only when warm."""
    from innerloop.serve.access import ServeOptions
    from innerloop.serve.server import run_server

    options = ServeOptions(
        protocol=protocol, host=host, port=port, http_port=http_port, token=token, allow_public=allow_public,
        certificate=certificate, private_key=private_key,
    )  # fmt: skip
    options.check()
    asked = {
        "device": device, "precision": precision, "assets": assets, "adapter": adapter, "horizon": horizon,
        "edge": arguments.behind_a_server(arguments.edge(rename, tokenizer, edge)),
        "memory_cap": arguments.capped(memory_cap), "batch": batch,
    }  # fmt: skip
    run_server(lambda: _load(checkpoint, **asked), options)


def _load(checkpoint: Path, **options: Any) -> Any:
    from innerloop import engine
    from innerloop.measure.progress import loading

    return loading(
        checkpoint.name, err, lambda report: engine.load(checkpoint, progress=report, announce=_say, **options)
    )


def _say(line: str) -> None:
    err.print(line, highlight=False, markup=False, soft_wrap=True)


__all__ = ["app", "main"]
