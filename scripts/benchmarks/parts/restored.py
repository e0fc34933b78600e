"""Tell whether ``find_max_batch`` in this process leaves a model as it was, bit for bit.

    python scripts/benchmarks/parts/restored.py adapters.py '{"weights": "4bit"}'

Prints one JSON object: restored, and the names of what differs.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "setups"
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

import parts.case  # noqa: E402, F401 - finds batchfinder
import torch  # noqa: E402
from torch import nn  # noqa: E402

from batchfinder import find_max_batch  # noqa: E402


def main() -> None:
    """Look at the model, search, and look again."""
    file, arguments = sys.argv[1], json.loads(sys.argv[2])
    warnings.simplefilter("ignore")
    module = __import__(file.removesuffix(".py"))
    target = module.target(**arguments)
    before = seen(target.model)
    result = find_max_batch(target, device="cpu", max_batch_size=2)
    after = seen(target.model)
    differs = [name for name in before if not same(before[name], after.get(name))]
    restored = bool(result.batch_size) and not differs and before.keys() == after.keys()
    print(json.dumps({"restored": restored, "differs": differs[:5]}))


def seen(model: nn.Module) -> dict[str, Any]:
    """Return modes, parameters, buffers and logits."""
    things: dict[str, Any] = {f"mode of {n}": m.training for n, m in model.named_modules()}
    things |= {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    things |= {name: tensor.clone() for name, tensor in model.named_buffers()}
    state = torch.get_rng_state()
    modes = [(part, part.training) for part in model.modules()]
    with torch.no_grad():
        ids = torch.arange(1, 33).reshape(2, 16)
        things["logits"] = model.train()(input_ids=ids).logits.clone()
    for part, mode in modes:
        part.training = mode
    torch.set_rng_state(state)
    return things


def same(one: Any, other: Any) -> bool:
    """Return whether two things are equal bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    return bool(one == other)


if __name__ == "__main__":
    main()
