"""Writes tests/golden/orbax: tiny openpi parameter trees saved by Orbax, and what openpi's own code makes of them.

`converted.safetensors` holds the tensors that openpi's JAX-to-PyTorch converter produces from the tree, `lora.npz`
inputs and outputs of openpi's LoRA layers. Needs jax, flax, orbax-checkpoint, torch, safetensors and an openpi
checkout. Usage: python recipes/orbax/make.py PATH_TO_OPENPI
"""

import ast
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import flax.linen
import flax.struct
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import torch
from safetensors.torch import save_file

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden" / "orbax"
LAYERS, VISION, VISION_HEADS, VISION_MLP, PATCH, PATCHES = 2, 12, 3, 20, 2, 4
HEADS, HEAD = 2, 8  # the converter is right only where heads * head equals the width, as it does in the real model
WIDTHS, MLPS, RANK = (16, 12), (24, 20), 3
VOCABULARY, ACTION, STATE = 40, 5, 6

Tree = dict[str, Any]


class Arrays:
    """Random float32 arrays from one seed."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __call__(self, *shape: int) -> np.ndarray:
        """One array of a shape."""
        return self.generator.normal(size=shape).astype(np.float32)


def vision(a: Arrays) -> Tree:
    """SigLIP and the projector."""
    head = VISION // VISION_HEADS

    def norm(*lead: int) -> Tree:
        return {"scale": a(*lead, VISION), "bias": a(*lead, VISION)}

    def projection() -> Tree:
        return {"kernel": a(LAYERS, VISION, VISION_HEADS, head), "bias": a(LAYERS, VISION_HEADS, head)}

    out = {"kernel": a(LAYERS, VISION_HEADS, head, VISION), "bias": a(LAYERS, VISION)}
    block = {
        "LayerNorm_0": norm(LAYERS),
        "LayerNorm_1": norm(LAYERS),
        "MlpBlock_0": {
            "Dense_0": {"kernel": a(LAYERS, VISION, VISION_MLP), "bias": a(LAYERS, VISION_MLP)},
            "Dense_1": {"kernel": a(LAYERS, VISION_MLP, VISION), "bias": a(LAYERS, VISION)},
        },
        "MultiHeadDotProductAttention_0": {n: projection() for n in ("query", "key", "value")} | {"out": out},
    }
    return {
        "embedding": {"kernel": a(PATCH, PATCH, 3, VISION), "bias": a(VISION)},
        "pos_embedding": a(1, PATCHES, VISION),
        "Transformer": {"encoderblock": block, "encoder_norm": norm()},
        "head": {"kernel": a(VISION, WIDTHS[0]), "bias": a(WIDTHS[0])},
    }


def decoders(a: Arrays, adaptive: bool, lora: bool) -> Tree:
    """Gemma and its action expert; adaptive: the expert's norms are pi0.5's."""
    attention, mlps, norms = {}, {}, {}
    finals = {}
    for expert, (width, mlp) in enumerate(zip(WIDTHS, MLPS, strict=True)):
        end = f"_{expert}" if expert else ""
        shapes = {
            "q_einsum": (HEADS, width, HEAD),
            "kv_einsum": (2, 1, width, HEAD),
            "attn_vec_einsum": (HEADS, HEAD, width),
        }
        for name, (*lead, rows, columns) in shapes.items():
            attention[f"{name}{end}"] = {"w": a(LAYERS, *lead, rows, columns)}
            if lora:
                attention[f"{name}{end}"]["lora_a"] = a(LAYERS, *lead, rows, RANK)
                attention[f"{name}{end}"]["lora_b"] = a(LAYERS, *lead, RANK, columns)
        mlps[f"mlp{end}"] = {"gating_einsum": a(LAYERS, 2, width, mlp), "linear": a(LAYERS, mlp, width)}
        if lora:
            mlps[f"mlp{end}"] |= {
                "gating_einsum_lora_a": a(LAYERS, 2, width, RANK),
                "gating_einsum_lora_b": a(LAYERS, 2, RANK, mlp),
                "linear_lora_a": a(LAYERS, mlp, RANK),
                "linear_lora_b": a(LAYERS, RANK, width),
            }
        for name, lead in (("pre_attention_norm", (LAYERS,)), ("pre_ffw_norm", (LAYERS,)), ("final_norm", ())):
            dense = {"Dense_0": {"kernel": a(*lead, width, 3 * width), "bias": a(*lead, 3 * width)}}
            norm = dense if adaptive and expert else {"scale": a(*lead, width)}
            (norms if lead else finals)[f"{name}{end}"] = norm
    layers = {"attn": attention, **mlps, **norms}
    return {"embedder": {"input_embedding": a(VOCABULARY, WIDTHS[0])}, "layers": layers, **finals}


def tree(adaptive: bool, lora: bool = False) -> Tree:
    """A whole pi0.5 (adaptive) or pi0 parameter tree."""
    a, width = Arrays(), WIDTHS[1]
    heads = {"action_in_proj": (ACTION, width), "action_out_proj": (width, ACTION)}
    if adaptive:
        heads |= {"time_mlp_in": (width, width), "time_mlp_out": (width, width)}
    else:
        heads |= {"state_proj": (STATE, width), "action_time_mlp_in": (2 * width, width)}
        heads |= {"action_time_mlp_out": (width, width)}
    dense = {name: {"kernel": a(*shape), "bias": a(shape[1])} for name, shape in heads.items()}
    return {"PaliGemma": {"img": vision(a), "llm": decoders(a, adaptive, lora)}, **dense}


def save(directory: Path, parameters: Tree, dtype: Any, mesh: jax.sharding.Mesh | None = None) -> None:
    """As openpi's training saves its params item: every leaf behind `value`; spread over a mesh where one is given."""

    def leaf(array: np.ndarray) -> Tree:
        value = jnp.asarray(array).astype(dtype)
        if mesh is None:
            return {"value": value}
        axes = [axis for axis, size in enumerate(array.shape) if size % mesh.size == 0][-1:]
        spec = jax.sharding.PartitionSpec(*[mesh.axis_names[0] if axis in axes else None for axis in range(array.ndim)])
        return {"value": jax.device_put(value, jax.sharding.NamedSharding(mesh, spec))}

    checkpointer = orbax.checkpoint.PyTreeCheckpointer()
    checkpointer.save(directory.absolute() / "params", {"params": jax.tree.map(leaf, parameters)})
    (directory / "params" / "commit_success.txt").unlink()  # it names the directory that it was saved to


def converted(openpi: Path, parameters: Tree, adaptive: bool) -> dict[str, torch.Tensor]:
    """What the two functions of openpi's converter return for the tree, and its transposed projections."""
    source = (openpi / "examples" / "convert_jax_model_to_pytorch.py").read_text()
    wanted = ("slice_paligemma_state_dict", "slice_gemma_state_dict")
    functions = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name in wanted]
    scope: dict[str, Any] = {"torch": torch, "np": np}
    exec(compile(ast.Module(functions, []), "converter", "exec"), scope)
    vision_config = types.SimpleNamespace(hidden_size=VISION, num_hidden_layers=LAYERS)
    text = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "head_dim": HEAD}
    whole = types.SimpleNamespace(
        vision_config=vision_config, text_config=types.SimpleNamespace(hidden_size=WIDTHS[0], **text)
    )
    expert = types.SimpleNamespace(hidden_size=WIDTHS[1], vocab_size=VOCABULARY, **text)
    flat = flax.traverse_util.flatten_dict(parameters["PaliGemma"], sep="/")
    base, rest = scope[wanted[0]](dict(flat), whole)
    name = "pi05" if adaptive else "pi0"
    tensors = base | scope[wanted[1]](rest, expert, num_expert=1, checkpoint_dir=name, pi05=adaptive)
    for head, dense in parameters.items():
        if head != "PaliGemma":
            tensors[f"{head}.weight"] = torch.from_numpy(dense["kernel"]).T
            tensors[f"{head}.bias"] = torch.from_numpy(dense["bias"])
    return {key: tensor.contiguous() for key, tensor in tensors.items()}


def lora_outputs(openpi: Path, parameters: Tree) -> dict[str, np.ndarray]:
    """Inputs and outputs of openpi's LoRA layers for layer 1 of Gemma."""
    module = types.ModuleType("lora")
    source = (openpi / "src" / "openpi" / "models" / "lora.py").read_text()
    source = source.replace("import openpi.shared.array_typing as at", "import jax").replace("at.Array", "jax.Array")
    sys.modules["lora"] = module
    exec(compile(source, "lora", "exec"), module.__dict__)
    config = module.LoRAConfig(rank=RANK, alpha=float(RANK))
    layers = parameters["PaliGemma"]["llm"]["layers"]
    generator = np.random.default_rng(1)
    inputs = {
        "q_einsum": ("BTD,NDH->BTNH", (1, 3, WIDTHS[0])),
        "kv_einsum": ("BSD,2KDH->2BSKH", (1, 3, WIDTHS[0])),
        "attn_vec_einsum": ("BTNH,NHD->BTD", (1, 3, HEADS, HEAD)),
    }
    outputs = {}
    for name, (equation, shape) in inputs.items():
        weights = {key: array[1] for key, array in layers["attn"][name].items()}
        x = generator.normal(size=shape).astype(np.float32)
        layer = module.Einsum(shape=weights["w"].shape, lora_config=config)
        outputs |= {f"{name}.x": x, f"{name}.y": np.asarray(layer.apply({"params": weights}, equation, x))}
    weights = {key: array[1] for key, array in layers["mlp"].items()}
    x = generator.normal(size=(1, 3, WIDTHS[0])).astype(np.float32)
    layer = module.FeedForward(features=WIDTHS[0], hidden_dim=MLPS[0], lora_config=config)
    return outputs | {"mlp.x": x, "mlp.y": np.asarray(layer.apply({"params": weights}, x))}


def main() -> None:
    """One directory a tree: pi05 in float32, pi0 in bfloat16 from a mesh of four devices, lora in float32."""
    openpi = Path(sys.argv[1])
    jax.config.update("jax_num_cpu_devices", 4)
    shutil.rmtree(GOLDEN, ignore_errors=True)
    mesh = jax.make_mesh((4,), ("x",))
    for name, adaptive, dtype, where in (("pi05", True, jnp.float32, None), ("pi0", False, jnp.bfloat16, mesh)):
        parameters = tree(adaptive)
        save(GOLDEN / name, parameters, dtype, where)
        rounded = jax.tree.map(lambda leaf, d=dtype: np.asarray(jnp.asarray(leaf).astype(d), np.float32), parameters)
        save_file(converted(openpi, rounded, adaptive), GOLDEN / f"{name}.safetensors")
    adapted = tree(True, lora=True)
    save(GOLDEN / "lora", adapted, jnp.float32)
    np.savez(GOLDEN / "lora.npz", **lora_outputs(openpi, adapted))


if __name__ == "__main__":
    main()
