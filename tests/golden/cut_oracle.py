"""Cut the training oracle down to what the tests read.

The oracle holds what the published speculators package (0.9.0, float32) computes with tiny random
heads: inputs, sampled elements, losses, metrics, gradients, and every activation between. The
activations of `grad.npz` are left out, because `pack.npz` has them for another batch; of the
targets only the final norm and the head are kept. Values are copied bit for bit.

    python tests/golden/cut_oracle.py ORACLE

ORACLE is the folder of the whole oracle.
"""

import shutil
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

HERE = Path(__file__).parent / "oracle"
HEADS = {"llama_reduced": "verifier_llama", "qwen3_sliding_fcnorm_fullvocab": "verifier_qwen3"}
KEPT = ("in", "cod", "elem", "loss", "metric", "grad")


def main() -> None:
    """Write the files under tests/golden/oracle."""
    oracle = Path(sys.argv[1])
    for name in ("cod.npz", "vocab.npz"):
        shutil.copyfile(oracle / name, HERE / name)
    for head, verifier in HEADS.items():
        whole = np.load(oracle / head / "grad.npz")
        kept = {key: whole[key] for key in whole.files if key.split(".")[0] in KEPT}
        np.savez_compressed(HERE / head / "grad.npz", **kept)
        tensors = load_file(oracle / verifier / "model.safetensors")
        embedding = tensors["model.embed_tokens.weight"]  # the head of a target that ties both
        np.savez_compressed(
            HERE / head / "target_head.npz",
            norm=tensors["model.norm.weight"],
            lm_head=tensors.get("lm_head.weight", embedding),
        )


if __name__ == "__main__":
    main()
