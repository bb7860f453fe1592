"""A small tokenizer that treats text as PaliGemma's does: metaspace BPE, byte fallback, single digits, BOS first."""

import functools
import importlib
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")  # ids 0 to 3, as in PaliGemma
SPACE = "\u2581"
VERBS = "pick up|put|place|push|pull|open|close|lift|move|turn|press|slide|grasp|insert|stack|pour|wipe|fold|hand over"
COLOURS = "red|blue|green|yellow|black|white|orange|small|large|left|right|wooden|metal"
THINGS = "block|cube|cup|bowl|plate|drawer|door|button|handle|lid|peg|towel|spoon|bottle|box|gripper|cloth|wrench"
PLACES = "on the table|in the bowl|into the box|to the left|to the right|on the plate|in the drawer|on top of the stove"


def sentences() -> list[str]:
    """Robot tasks inside both families' prompt forms, in a fixed order."""
    tasks = [
        f"{verb} the {colour} {thing} {place}"
        for v, verb in enumerate(VERBS.split("|"))
        for c, colour in enumerate(COLOURS.split("|"))
        for t, thing in enumerate(THINGS.split("|"))
        for p, place in enumerate(PLACES.split("|"))
        if (v + 3 * c + 5 * t + 7 * p) % 11 == 0
    ]
    return [f"Task: {task}, State: 12 200 7;\nAction: " for task in tasks] + [f"{task}\n" for task in tasks]


@functools.cache
def train(size: int) -> Tokenizer:
    """A BPE tokenizer of at most `size` ids whose merges never cross a word and never take a digit or a newline."""
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", SPACE)
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(SPACE, "merged_with_next"),
            pre_tokenizers.Split(Regex(r"\n|[,:;.]"), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
        ]
    )
    fixed = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    alphabet = [SPACE, "\n", *(chr(code) for code in range(33, 127))]
    trainer = trainers.BpeTrainer(vocab_size=size - len(fixed), initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator(sentences(), trainer)
    learned = ranked(learner)
    pieces = [*fixed, *(piece for piece in learned if len(piece) > 1), *(piece for piece in learned if len(piece) == 1)]
    return assemble({piece: index for index, piece in enumerate(pieces)})


def ranked(tokenizer: Tokenizer) -> list[str]:
    """Pieces in the order of their ids."""
    vocabulary = tokenizer.get_vocab()
    return sorted(vocabulary, key=vocabulary.__getitem__)


def assemble(vocabulary: dict[str, int]) -> Tokenizer:
    """The tokenizer of a ranked vocabulary: any pair whose union is a piece merges, lowest id first."""
    merges = [
        (piece[:cut], piece[cut:])
        for piece in list(vocabulary)[len(SPECIAL) + 256 :]
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=SPECIAL[3], fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[2]} $A", pair=f"{SPECIAL[2]} $A {SPECIAL[2]} $B", special_tokens=[(SPECIAL[2], 2)]
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json, which AutoTokenizer reads by path."""
    pad, eos, bos, unknown = SPECIAL
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, eos_token=eos, bos_token=bos, unk_token=unknown, padding_side="right"
    ).save_pretrained(directory)


def save_sentencepiece(tokenizer: Tokenizer, path: Path) -> None:
    """Writes the same pieces as a SentencePiece model; it gives the same ids with BOS added by the caller."""
    proto = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    model = proto.ModelProto()
    kinds = proto.ModelProto.SentencePiece
    for index, piece in enumerate(ranked(tokenizer)):
        kind = kinds.UNKNOWN if index == 3 else kinds.CONTROL if index < 3 else kinds.NORMAL
        kind = kinds.BYTE if len(SPECIAL) <= index < len(SPECIAL) + 256 else kind
        model.pieces.add(piece=piece, score=0.0 if index < len(SPECIAL) + 256 else -float(index), type=kind)
    spec = model.trainer_spec
    spec.model_type, spec.vocab_size, spec.byte_fallback = proto.TrainerSpec.BPE, len(model.pieces), True
    spec.pad_id, spec.eos_id, spec.bos_id, spec.unk_id = 0, 1, 2, 3
    spec.split_digits, spec.allow_whitespace_only_pieces = True, True
    normalizer = model.normalizer_spec
    normalizer.name, normalizer.add_dummy_prefix = "identity", False
    normalizer.remove_extra_whitespaces, normalizer.escape_whitespaces = False, True
    path.write_bytes(model.SerializeToString())
