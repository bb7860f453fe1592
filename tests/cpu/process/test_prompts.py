"""Prompts: the official templates, BOS and padding, and a refusal where the official code cuts silently."""

from pathlib import Path

import numpy as np
import pytest
from toy_checkpoint import ROOT, TOKENIZER

from innerloop.contract import CheckpointError, ObservationError
from innerloop.process import Tokenizer
from innerloop.process.text import CLEANED_LINE, LINE, TASK_AND_STATE, clean, fit

MODEL = ROOT / "tests/golden/tokenizer.model"


def test_templates() -> None:
    assert LINE.render("pick up_it ", None) == ("pick up_it \n",)
    assert LINE.render("pick\n", None) == ("pick\n",)
    assert CLEANED_LINE.render(" pick up_it\nnow ", None) == ("pick up it now", "\n")
    assert TASK_AND_STATE.render(" open the_door\n", [0, -1, 255]) == (
        "Task: open the door, State: 0 -1 255;\nAction: ",
    )
    assert clean("\n a_b\nc \n") == "a b c"
    with pytest.raises(ObservationError, match="contains the state"):
        TASK_AND_STATE.render("x", None)


def test_bos_then_pieces() -> None:
    tokenizer = Tokenizer.open(TOKENIZER)
    whole, parts = tokenizer.ids(["pick up\n"]), tokenizer.ids(["pick up", "\n"])
    assert whole == parts
    assert whole[0] == 2
    assert tokenizer.ids([""]) == (2,)
    assert max(whole) < tokenizer.size


def test_both_kinds_of_file_agree() -> None:
    fast, slow = Tokenizer.open(TOKENIZER), Tokenizer.open(MODEL)
    for text in ("pick up the red block", "Task: a, State: 0 -1 255;\nAction: ", "naïve — 机 🤖", "  two  spaces "):
        assert fast.ids([text]) == slow.ids([text]), text


def test_a_directory_is_searched() -> None:
    assert Tokenizer.open(TOKENIZER.parent).source == str(TOKENIZER)


def test_fit_pads_right_and_refuses_longer_prompts() -> None:
    np.testing.assert_array_equal(fit((2, 5, 6), 5), np.array([2, 5, 6, 0, 0], np.int32))
    assert fit((1, 2, 3), 3).tolist() == [1, 2, 3]
    with pytest.raises(ObservationError, match=r"the prompt has 4 tokens .* takes 3; shorten"):
        fit((1, 2, 3, 4), 3)


def test_a_missing_tokenizer_says_which_file_goes_where() -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer in /ckpt: put PaliGemma's tokenizer.json .*tokenizer="):
        Tokenizer.open(None, "/ckpt")


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    cases = {
        "tokenizer.json": ("{broken", "not readable JSON"),
        "config.json": ('{"a": 1}', "no 'model' entry"),
        "bad.model": ("nonsense", "not a readable SentencePiece model"),
        "newer.json": ('{"version": "9.0", "model": {"type": "X"}}', "cannot be read by tokenizers .*pip install -U"),
        "vocab.txt": ("a", "expected a tokenizer.json or a SentencePiece .model"),
    }
    for name, (content, message) in cases.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(CheckpointError, match=message):
            Tokenizer.open(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"no tokenizer at .*gone: expected a file, or a directory"):
        Tokenizer.open(tmp_path / "gone")


def test_a_tokenizer_without_bos_is_another_models(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(TOKENIZER.read_text().replace("<bos>", "<s>"))
    with pytest.raises(CheckpointError, match="no <bos> token"):
        Tokenizer.open(file)
