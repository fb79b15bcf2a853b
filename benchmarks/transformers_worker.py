"""Answers token ids with transformers' greedy generate; `decode.py` runs it beside itself.

Runs where torch is: `python transformers_worker.py MODEL`. Each line of standard input is
`[ids, new_tokens]`, each line of standard output `[new ids, seconds]`.
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    for line in sys.stdin:
        ids, count = json.loads(line)
        tokens = torch.tensor([ids])
        started = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=False,
                max_new_tokens=count,
            )
        seconds = time.perf_counter() - started
        print(json.dumps([out[0, len(ids) :].tolist(), seconds]), flush=True)


if __name__ == "__main__":
    main()
