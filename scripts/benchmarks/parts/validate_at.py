r"""Train, validate and train again at given batch sizes, and tell whether it survived.

The independent judge of `bench_first_validation.py`. Its loops stand at module level, as in most
scripts.

    python scripts/benchmarks/parts/validate_at.py train.py:build_model 128 256 MEMORY 2 ARGUMENTS

The numbers are the batch size of training (0: two steps for the states, at the last number), the
batch size of validation, bytes, and that last number; ARGUMENTS is a JSON object. Prints one JSON
object: outcome ("survived", or "oom"), and the part that ran out ("training" or "validation").
"""

from __future__ import annotations

import json
import sys

import torch
from torch.utils._pytree import tree_map
from train_at import OUT_OF_MEMORY, forward, limit_memory, load

ROUNDS, STEPS, VALIDATION_BATCHES = 10, 3, 2

target, batch_size, eval_batch_size, memory, small = sys.argv[1], *map(int, sys.argv[2:6])
device = torch.device("cuda:0")
torch.backends.cudnn.enabled = False  # the counting runtime has none
model, make_batch = load(target, json.loads(sys.argv[6]))
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
limit_memory(memory, device)
part = "training"
rounds = ROUNDS if batch_size else 1
try:
    for _ in range(rounds):
        part = "training"
        model.train()
        for _ in range(STEPS if batch_size else 2):
            batch = tree_map(lambda leaf: leaf.to(device), make_batch(batch_size or small))
            optimizer.zero_grad()
            output, loss = forward(model, batch)
            loss.backward()
            optimizer.step()
        if not batch_size:
            del batch, output, loss
        part = "validation"
        model.eval()
        with torch.no_grad():
            for _ in range(VALIDATION_BATCHES):
                batch = tree_map(lambda leaf: leaf.to(device), make_batch(eval_batch_size))
                eval_output, eval_loss = forward(model, batch)
    report = {"outcome": "survived", "part": ""}
except RuntimeError as error:
    if not any(text in str(error) for text in OUT_OF_MEMORY):
        raise
    report = {"outcome": "oom", "part": part}
print(json.dumps(report))
