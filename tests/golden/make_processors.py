"""Write the golden values of the logits processors, computed by transformers' own classes.

``tests/golden/processors.npz`` holds B sequences, each with its own settings, at R places: row i
is what is drawn from after the prompt, the output and the first i drafts.

    logits [B, R, V]            random
    tokens [B, C]               prompt, then output, then padding
    prompt_lengths, lengths [B] tokens of the prompt, and of prompt and output together
    drafts [B, R - 1]
    temperature, top_k, top_p, min_p, repetition, min_new_tokens [B]
    stop_ids [B, 2]             -1 where there is none
    bias [B, V]                 finite, 0 for most
    banned [B, V]               bool
    law [B, R, V]               float32, the softmax of what the processors leave, in float64

The classes are applied in transformers' order. It is vLLM's too but for min-p, which vLLM has
before top-k and top-p: no sequence has both min-p and top-p here. With top-k the order of the two
does not matter.

The environment is that of ``make_targets.py``; run ``python tests/golden/make_processors.py``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

BATCH, ROWS, VOCAB, CAPACITY = 32, 3, 48, 16


def settings(rng: np.random.Generator, row: int) -> dict:
    """Returns the settings of one sequence: the first few vary one thing, the others all."""

    def on(number: int) -> bool:
        return row == number or (row >= 8 and rng.random() < 0.6)

    stops = rng.choice(VOCAB, 2, replace=False)
    if row % 3 == 0:
        stops[1] = -1
    bias = np.zeros(VOCAB, np.float32)
    if on(0):
        bias[rng.choice(VOCAB, 4, replace=False)] = rng.normal(0, 4, 4)
    banned = np.zeros(VOCAB, bool)
    if on(1):
        banned[rng.choice(VOCAB, 5, replace=False)] = True
    nucleus = row == 5 or (row >= 8 and rng.random() < 0.5)
    small = row == 6 or (row >= 8 and not nucleus)
    return {
        "stop_ids": stops,
        "bias": bias,
        "banned": banned,
        "min_new_tokens": rng.integers(1, 6) if on(2) else 0,
        "repetition": rng.choice([0.7, 1.3, 2.0]) if on(3) else 1.0,
        "top_k": rng.choice([1, 2, 5, 20, 48]) if on(4) else 0,
        "top_p": rng.choice([0.05, 0.3, 0.8, 0.95]) if nucleus else 1.0,
        "min_p": rng.choice([0.01, 0.1, 0.4, 1.0]) if small else 0.0,
        "temperature": rng.choice([0.3, 0.7, 1.0, 1.8]) if on(7) else 1.0,
    }


def processors(chosen: dict, prompt_length: int) -> LogitsProcessorList:
    """Returns the classes that a sequence's settings ask for."""
    used = LogitsProcessorList()
    stops = [int(t) for t in chosen["stop_ids"] if t >= 0]
    if chosen["bias"].any():
        used.append(
            SequenceBiasLogitsProcessor(
                [[[int(t)], float(chosen["bias"][t])] for t in np.flatnonzero(chosen["bias"])]
            )
        )
    if chosen["repetition"] != 1:
        used.append(RepetitionPenaltyLogitsProcessor(float(chosen["repetition"])))
    if chosen["banned"].any():
        used.append(NoBadWordsLogitsProcessor([[int(t)] for t in np.flatnonzero(chosen["banned"])]))
    if chosen["min_new_tokens"]:
        used.append(
            MinNewTokensLengthLogitsProcessor(prompt_length, int(chosen["min_new_tokens"]), stops)
        )
    if chosen["temperature"] != 1:
        used.append(TemperatureLogitsWarper(float(chosen["temperature"])))
    if chosen["top_k"]:
        used.append(TopKLogitsWarper(int(chosen["top_k"])))
    if chosen["top_p"] < 1:
        used.append(TopPLogitsWarper(float(chosen["top_p"])))
    if chosen["min_p"]:
        used.append(MinPLogitsWarper(float(chosen["min_p"])))
    return used


def main() -> None:
    """Writes the file."""
    rng = np.random.default_rng(20)
    chosen = [settings(rng, row) for row in range(BATCH)]
    prompt_lengths = rng.integers(1, 6, BATCH)
    lengths = prompt_lengths + rng.integers(0, 6, BATCH)
    # Few ids, so that the same ones come again.
    tokens = rng.integers(0, 12, (BATCH, CAPACITY))
    drafts = rng.integers(0, 16, (BATCH, ROWS - 1))
    logits = rng.normal(0, 3, (BATCH, ROWS, VOCAB)).astype(np.float32)
    law = np.zeros((BATCH, ROWS, VOCAB), np.float32)
    for row in range(BATCH):
        for place in range(ROWS):
            ids = [*tokens[row, : lengths[row]], *drafts[row, :place]]
            scores = torch.tensor(logits[row, place], dtype=torch.float64)[None]
            used = processors(chosen[row], int(prompt_lengths[row]))
            scores = used(torch.tensor([ids], dtype=torch.long), scores)
            law[row, place] = scores.softmax(-1)[0].numpy()
    columns = {name: np.stack([np.asarray(c[name]) for c in chosen]) for name in chosen[0]}
    kinds = {"bias": np.float32, "banned": bool, "stop_ids": np.int32}
    for name in ("min_new_tokens", "top_k"):
        kinds[name] = np.int32
    np.savez_compressed(
        Path(__file__).parent / "processors.npz",
        logits=logits,
        tokens=tokens.astype(np.int32),
        prompt_lengths=prompt_lengths.astype(np.int32),
        lengths=lengths.astype(np.int32),
        drafts=drafts.astype(np.int32),
        law=law,
        **{name: value.astype(kinds.get(name, np.float32)) for name, value in columns.items()},
    )


if __name__ == "__main__":
    main()
