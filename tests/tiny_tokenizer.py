"""A byte-level tokenizer for the random targets: whole words, and bytes of longer characters."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 96
_PRINTABLE = sorted(ord(c) for c in pre_tokenizers.ByteLevel.alphabet() if ord(c) < 256)
_OTHER = [byte for byte in range(256) if byte not in _PRINTABLE]
LETTERS = {byte: chr(byte) for byte in _PRINTABLE} | {b: chr(256 + n) for n, b in enumerate(_OTHER)}
WORDS = [
    *(bytes([byte]) for byte in b"abcdefghijklmnopqrstuvwxyz .,!?\n"),
    *(
        word.encode()
        for word in ("the", " the", "ing", " a", "and", " of", "er", "\n\n", ", ", "é")
    ),
    *(
        word.encode()
        for word in ("中", "文", "日本", "😀", " 中", "ab", "ba", "aa", "stop", " end")
    ),
    # Bytes of é, 中, 文 and 😀, and tokens that cross the borders of characters.
    *(bytes([byte]) for byte in b"\xc3\xa9\xe4\xb8\xad\xe6\x96\x87\xf0\x9f\x98\x80"),
    *(b"a\xe4", b"\xb8\xad", b"\xb8", b"\xadb", b"\xf0\x9f", b"\x98\x80", b"\xa9c"),
]
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}.{{ m.content }}\n{% endfor %}a."


def byte_tokenizer() -> Any:
    """Returns a tokenizer of 96 tokens, of which the last six are special."""
    words = list(dict.fromkeys(WORDS))
    words += [word + b" x" for word in words[: VOCABULARY - 6 - len(words)]]
    vocab = {"".join(LETTERS[b] for b in word): index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<|{n}|>" for n in range(VOCABULARY - len(vocab))])
    assert len(tokenizer.get_vocab()) == VOCABULARY
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)
