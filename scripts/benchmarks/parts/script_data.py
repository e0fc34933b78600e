"""Tiny synthetic data for the public scripts of ``bench_scripts.py``, in the forms that they read.

Run in the environment of the scripts: it needs NumPy, Pillow, tokenizers and transformers.
"""

from __future__ import annotations

import json
import random
import struct
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

WORDS = [a + b for a in ("ba", "do", "ke", "li", "mu", "ra", "so", "ti") for b in ("n", "r", "s")]
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} [end]{% endfor %}"
IMAGES = 400

# How often each training image is there, so that 50 steps are one epoch. If an epoch has three
# steps, the validations in between decide how often the allocator flushes its cache.
TIMES = 20


def main(folder: Path) -> None:
    """Write everything; what is there is written again."""
    random.seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    for write in (tokens, text, words, digits, images, boxes, language_model, chats):
        write(folder)
    (folder / "results").mkdir(exist_ok=True)


def tokens(folder: Path) -> None:
    """Token ids of 16 bits."""
    (folder / "tokens").mkdir(exist_ok=True)
    for split in ("train", "val"):
        ids = np.random.default_rng(0).integers(0, 65, 200_000).astype(np.uint16)
        ids.tofile(folder / "tokens" / f"{split}.bin")


def text(folder: Path) -> None:
    """Lines of words; each letter of the alphabet is in them."""
    lines = ["O God, O God! the quick brown fox jumps over the lazy dog"] * 10
    lines += [" ".join(random.choices(WORDS, k=20)) for _ in range(20_000)]
    (folder / "text.txt").write_text("\n".join(lines))


def words(folder: Path) -> None:
    """Three splits of lines of words."""
    (folder / "words").mkdir(exist_ok=True)
    for split, count in (("train", 60_000), ("valid", 500), ("test", 500)):
        lines = (" ".join(random.choices(WORDS, k=20)) for _ in range(count))
        (folder / "words" / f"{split}.txt").write_text("\n".join(lines))


def digits(folder: Path) -> None:
    """MNIST's files with noise in them."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 60_000), ("t10k", 10_000)):
        noise = np.random.default_rng(0).integers(0, 255, count * 28 * 28).astype(np.uint8)
        header = struct.pack(">IIII", 2051, count, 28, 28)
        (raw / f"{split}-images-idx3-ubyte").write_bytes(header + noise.tobytes())
        labels = (np.arange(count) % 10).astype(np.uint8)
        header = struct.pack(">II", 2049, count)
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())


def images(folder: Path) -> None:
    """Two splits of four classes."""
    for split, times in (("train", TIMES), ("validation", 1)):
        for i in range(IMAGES):
            path = folder / "images" / split / f"class{i % 4}" / f"{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            _noise(64, i).save(path)
            for again in range(1, times):
                link = path.with_stem(f"{i}_{again}")
                link.unlink(missing_ok=True)
                link.hardlink_to(path)


def boxes(folder: Path) -> None:
    """Images with one box each, and the YAML file that names them."""
    for split in ("train", "val"):
        for kind in ("images", "labels"):
            (folder / "boxes" / kind / split).mkdir(parents=True, exist_ok=True)
        for i in range(IMAGES):
            _noise(96, i).save(folder / "boxes" / "images" / split / f"{i}.jpg")
            label = folder / "boxes" / "labels" / split / f"{i}.txt"
            label.write_text(f"{i % 2} 0.5 0.5 0.4 0.4\n")
    (folder / "boxes" / "data.yaml").write_text(
        f"path: {folder / 'boxes'}\ntrain: images/train\nval: images/val\n"
        "names:\n  0: one\n  1: two\n"
    )


def language_model(folder: Path) -> None:
    """A tokenizer of words, and a small GPT-2 with its vocabulary."""
    vocabulary = {word: i for i, word in enumerate(["[unk]", "[end]", "user", "assistant", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[unk]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[unk]", eos_token="[end]", pad_token="[end]"
    )
    fast.chat_template = TEMPLATE
    config = GPT2Config(vocab_size=len(vocabulary), n_embd=256, n_layer=4, n_head=4)
    config.eos_token_id = config.bos_token_id = config.pad_token_id = 1
    fast.save_pretrained(folder / "tokenizer")
    config.save_pretrained(folder / "tokenizer")
    fast.save_pretrained(folder / "model")
    GPT2LMHeadModel(config).save_pretrained(folder / "model")


def chats(folder: Path) -> None:
    """Questions and answers."""
    (folder / "chats").mkdir(exist_ok=True)
    lines = []
    for _ in range(4_000):
        said = (" ".join(random.choices(WORDS, k=30)) for _ in range(2))
        messages = [
            {"role": role, "content": text}
            for role, text in zip(("user", "assistant"), said, strict=True)
        ]
        lines.append(json.dumps({"messages": messages}))
    (folder / "chats" / "train.jsonl").write_text("\n".join(lines))


def _noise(width: int, seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (width, width, 3))
    return Image.fromarray(pixels.astype(np.uint8))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
