"""Streamed text against decoding the whole sequence again after every token."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from conftest import DEMO_TARGET
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from peagle_jax import load
from peagle_jax.detokenize import TextStream, check_stop_strings, decode

TEXTS = [
    *("Hello, world", " there", "\n\n", "\t", "  ", " .", " n't", "don't ' stop", "ab", "aab"),
    *("中文", "日本語。", "한국어", "مرحبا", "हिन्दी", "မြန်မာ", "é", "e\u0301\u0323", "ﷺ", "😀"),
    *("👩‍👩‍👧‍👦🏳️‍🌈", "🇩🇪", "\U0001d518", "\ufffd", "\ufffdx", "\u200d"),
    *("<|im_end|>", "</s>", "<0x41>"),
]


# Tokenizers

_PLAIN = sorted(ord(letter) for letter in pre_tokenizers.ByteLevel.alphabet() if ord(letter) < 256)
_OTHER = [byte for byte in range(256) if byte not in _PLAIN]
# How a byte-level vocabulary writes each byte.
LETTERS = {byte: chr(byte) for byte in _PLAIN} | {b: chr(256 + n) for n, b in enumerate(_OTHER)}


def byte_level() -> Any:
    """Every byte, tokens that cross the borders of characters, special and other added tokens."""
    crossing = ["a中".encode()[:2], "中b".encode()[1:], "中文".encode()[1:5], "😀".encode()[2:]]
    words = ["".join(LETTERS[byte] for byte in word) for word in crossing]
    vocab = {piece: index for index, piece in enumerate([*LETTERS.values(), *words])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>", "<s>"])
    tokenizer.add_tokens(["<think>", AddedToken(" a b ", normalized=False), "中"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def sentencepiece(byte_fallback: bool) -> Any:
    """As Llama 2's: byte tokens, a leading space that is dropped; or metaspace only."""
    words = [*("▁", "▁▁", "▁▁▁▁", "▁Hello", "▁there", "a", "b", "aa", "ab", ".", "▁.", "'", "▁n")]
    words += ["'t", "中", "\ufffd", "▁\ufffd"]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    if byte_fallback:
        vocab = {piece: index for index, piece in enumerate(pieces)}
        tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    else:
        tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
        tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(["<think>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=True)


@functools.cache
def tokenizer_named(name: str) -> Any:
    if name == "smollm2":
        if not DEMO_TARGET.is_dir():
            pytest.skip("the demo's target is not there: make model")
        return load._tokenizer(DEMO_TARGET)
    return byte_level() if name == "byte level" else sentencepiece(name == "byte fallback")


@functools.cache
def vocabulary(tokenizer: Any) -> dict[str, int]:
    return tokenizer.get_vocab()


NAMES = ["smollm2", "byte level", "byte fallback", "metaspace"]


@pytest.fixture(params=NAMES)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return tokenizer_named(request.param)


def byte_ids(tokenizer: Any, data: bytes) -> list[int]:
    """One token per byte, where the vocabulary has it."""
    vocab = vocabulary(tokenizer)
    names = (LETTERS[byte] if LETTERS[32] in vocab else f"<0x{byte:02X}>" for byte in data)
    return [vocab[name] for name in names if name in vocab]


# The reference


def full(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)


def settled(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text without what may be the beginning of a character."""
    text = full(tokenizer, ids)
    # All bytes of an invalid run of byte tokens come as U+FFFD.
    byte_fallback = "ByteFallback" in str(tokenizer.backend_tokenizer.decoder)
    return text.rstrip("\ufffd") if byte_fallback else text.removesuffix("\ufffd")


def reference(
    tokenizer: Any, ids: Sequence[int], stop: Sequence[str], include: bool = False
) -> tuple[str, int, str | None]:
    """Text, tokens kept and stop string, everything decoded anew after every token."""
    texts = [(n, settled(tokenizer, ids[:n])) for n in range(1, len(ids) + 1)]
    texts.append((len(ids), full(tokenizer, ids)))
    for count, text in texts:
        if found := [(text.index(one), len(one), one) for one in stop if one in text]:
            begin, length, which = min(found)
            return text[: begin + length * include], count, which
    return texts[-1][1], len(ids), None


def stream(
    tokenizer: Any, blocks: Sequence[Sequence[int]], stop: Sequence[str] = (), include: bool = False
) -> tuple[list[str], int, str | None]:
    """Pieces of text, the last of them from `finish`; tokens kept and stop string."""
    text = TextStream(tokenizer, stop, include_stop_str_in_output=include)
    pieces = [text.feed(block) for block in blocks]
    pieces.append(text.finish())
    assert text.feed([1, 2, 3]) == text.finish() == ""
    return pieces, text.num_tokens, text.stopped


@st.composite
def cases(draw: st.DrawFn, name: str) -> tuple[list[int], list[str], list[list[int]], bool]:
    """Token ids, stop strings that mostly occur, the ids in blocks, whether to include the stop."""
    tokenizer = tokenizer_named(name)
    size = len(tokenizer)
    text = st.sampled_from(TEXTS)
    ids = draw(
        st.lists(
            st.one_of(
                text.map(lambda t: tokenizer(t)["input_ids"]),
                text.map(lambda t: byte_ids(tokenizer, t.encode())),
                st.tuples(text, st.integers(0, 3), st.integers(1, 3)).map(
                    lambda t: byte_ids(tokenizer, t[0].encode()[t[1] :][: t[2]])
                ),
                st.binary(min_size=1, max_size=5).map(lambda b: byte_ids(tokenizer, b)),
                st.lists(st.integers(0, size - 1), max_size=4),
                st.lists(st.sampled_from(sorted(tokenizer.added_tokens_decoder)), max_size=2),
                st.lists(st.integers(size, size + 999), max_size=2),
            ),
            max_size=7,
        ).map(lambda parts: [token for part in parts for token in part])
    )
    whole = full(tokenizer, ids) or "a"
    spans = st.tuples(st.integers(0, len(whole) - 1), st.integers(1, 9))
    stop = draw(
        st.lists(
            st.one_of(
                spans.map(lambda s: whole[s[0] :][: s[1]]), st.sampled_from(["ab", "é", "\n"])
            ),
            max_size=3,
        )
    )
    if "fallback" in name:  # which U+FFFD are final depends on the bytes before
        stop = [one for one in stop if "\ufffd" not in one]
    sizes = [*draw(st.lists(st.integers(0, 6), min_size=1)), 1]
    blocks, rest = [], ids
    while rest:
        size, sizes = sizes[0], [*sizes[1:], sizes[0]]
        blocks.append(rest[:size])
        rest = rest[size:]
    return ids, stop, blocks, draw(st.booleans())


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_blocks_give_what_decoding_everything_gives(name: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_named(name)
    ids, stop, blocks, include = data.draw(cases(name))
    expected = reference(tokenizer, ids, stop, include)
    for split in (blocks, [[token] for token in ids], [ids]):
        pieces, count, stopped = stream(tokenizer, split, stop, include)
        assert ("".join(pieces), count, stopped) == expected
    kept = decode(tokenizer, ids[: expected[1]])
    if name != "metaspace":  # there spaces would be cleaned up
        assert kept == tokenizer.decode(ids[: expected[1]], skip_special_tokens=True)
    assert kept.startswith(expected[0])
    assert expected[2] is not None or kept == expected[0]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_shown_text_is_never_taken_back_nor_held_longer_than_needed(
    name: str, data: st.DataObject
) -> None:
    tokenizer = tokenizer_named(name)
    ids, stop, _, _ = data.draw(cases(name))
    text, count, stopped = reference(tokenizer, ids, stop)
    pieces, _, _ = stream(tokenizer, [[token] for token in ids], stop)
    for n in range(1, len(ids) + 1):
        shown = "".join(pieces[:n])
        assert text.startswith(shown)
        # A run of byte tokens is held back whole; the reference cannot see where it begins.
        if name != "byte fallback" and (stopped is None or n < count):
            sure = settled(tokenizer, ids[:n])
            ends = (one[:k] for one in stop for k in range(1, len(one)) if sure.endswith(one[:k]))
            assert shown == sure[: len(sure) - max(map(len, ends), default=0)]


# Single cases


def ids_of(tokenizer: Any, *pieces: str | bytes) -> list[int]:
    """The ids of vocabulary entries, and of bytes."""
    vocab = vocabulary(tokenizer)
    return [
        token
        for piece in pieces
        for token in (byte_ids(tokenizer, piece) if isinstance(piece, bytes) else [vocab[piece]])
    ]


def test_a_character_is_shown_once_it_is_whole() -> None:
    tokenizer = tokenizer_named("byte level")
    ids = ids_of(tokenizer, "a", "😀".encode(), "b")
    pieces, _, _ = stream(tokenizer, [[token] for token in ids])
    assert pieces == ["a", "", "", "", "😀", "b", ""]
    assert stream(tokenizer, [ids[:3]])[0] == ["a", "\ufffd"]


def test_of_a_character_only_the_last_may_still_change() -> None:
    tokenizer = tokenizer_named("byte level")
    text = TextStream(tokenizer)
    assert text.feed(ids_of(tokenizer, b"\xff" * 50)) == "\ufffd" * 49
    assert text.feed(ids_of(tokenizer, "中".encode())) == "\ufffd中"


def test_an_invalid_byte_takes_back_its_whole_run_of_byte_tokens() -> None:
    tokenizer = tokenizer_named("byte fallback")
    run = ids_of(tokenizer, "▁Hello", "中".encode())
    assert stream(tokenizer, [run])[0] == ["Hello", "中"]
    assert stream(tokenizer, [run, ids_of(tokenizer, b"\xff", "a")])[0] == [
        "Hello",
        "\ufffd" * 4 + "a",
        "",
    ]


def test_a_stop_string_counts_with_the_byte_token_that_completes_it() -> None:
    tokenizer = tokenizer_named("byte fallback")
    ids = ids_of(tokenizer, "▁Hello", b"\n", b"\n", "▁there")
    assert stream(tokenizer, [ids], ["\n\n"]) == (["Hello", ""], 3, "\n\n")
    ids = ids_of(tokenizer, "▁Hello", "\ufffd中".encode(), "文".encode())
    assert stream(tokenizer, [ids], ["o\ufffd中"]) == (["Hell", ""], 7, "o\ufffd中")


def test_special_tokens_leave_the_space_after_them() -> None:
    for name in ("byte fallback", "metaspace"):
        tokenizer = tokenizer_named(name)
        ids = ids_of(tokenizer, "<s>", "▁Hello", "</s>", "<s>", "▁there", "<think>", "▁", "a")
        pieces, _, _ = stream(tokenizer, [[token] for token in ids])
        assert pieces == ["", "Hello", "", "", " there", "<think>", " ", "a", ""]


def test_spaces_are_not_cleaned_up() -> None:
    tokenizer = tokenizer_named("metaspace")
    ids = ids_of(tokenizer, "▁Hello", "▁.", "▁n", "'t")
    assert tokenizer.decode(ids) == "Hello.n't"
    assert "".join(stream(tokenizer, [ids])[0]) == decode(tokenizer, ids) == "Hello . n't"


def test_a_stop_string_over_tokens_and_blocks() -> None:
    tokenizer = tokenizer_named("byte level")
    ids = ids_of(tokenizer, b"one STOP two")
    text = TextStream(tokenizer, ["STOP"])
    assert [text.feed(ids[:6]), text.feed(ids[6:7]), text.stopped] == ["one ", "", None]
    assert [text.feed(ids[7:]), text.stopped, text.num_tokens] == ["", "STOP", 8]
    assert stream(tokenizer, [ids[:6]], ["STOP"]) == (["one ", "ST"], 6, None)
    assert stream(tokenizer, [ids[:6], ids[6:]], ["STOP"], True) == (
        ["one ", "STOP", ""],
        8,
        "STOP",
    )


@pytest.mark.parametrize(
    ("stop", "shown", "count", "stopped"),
    [
        (["aac", "aab"], "Hello a", 4, "aab"),  # the first "aa" was no beginning of it
        (["a中", "中b"], "Hello aaab", 6, "中b"),
        (["c", "b中b"], "Hello aaa", 6, "b中b"),  # completed first, though listed last
        (["b", "ab", "aaab"], "Hello ", 4, "aaab"),  # one token: the one that begins first
        (["Hello", "ll", "Hel"], "", 1, "Hel"),  # and of those that begin together the shortest
    ],
)
def test_which_stop_string_wins(stop: list[str], shown: str, count: int, stopped: str) -> None:
    tokenizer = tokenizer_named("byte fallback")
    ids = ids_of(tokenizer, "▁Hello", "▁", "aa", "ab", "中", "b", b"c")
    assert full(tokenizer, ids) == "Hello aaab中bc"
    pieces, *rest = stream(tokenizer, [ids], stop)
    assert ("".join(pieces), *rest) == (shown, count, stopped)


def test_ids_may_be_numpy_and_outside_the_vocabulary(tokenizer: Any) -> None:
    ids = np.array([len(tokenizer), *tokenizer("ab ab")["input_ids"], 2**31 - 1], np.int32)
    pieces, count, _ = stream(tokenizer, [ids[:2], [], ids[2:]])
    assert "".join(pieces) == full(tokenizer, ids.tolist()) != ""
    assert count == len(ids)


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.decoded = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def decode(self, ids: list[int], **options: Any) -> str:
        self.decoded += len(ids)
        return self.tokenizer.decode(ids, **options)


@pytest.mark.parametrize(
    "unit", [b"a", b"\xff", b"\x80", b"\xe4\xb8", "中".encode(), "<s>", b"\xff<s>", b" "], ids=repr
)
@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
def test_work_grows_with_the_tokens(name: str, unit: bytes | str) -> None:
    tokenizer = Counting(tokenizer_named(name))
    pieces = [unit[:1], "<s>"] if unit[1:] == b"<s>" else [unit]
    ids = ids_of(tokenizer, *pieces) * 1000
    pieces, count, _ = stream(tokenizer, [ids], ["STOP", "x中", "\n"])
    assert count == len(ids) and "".join(pieces) == full(tokenizer, ids)
    assert tokenizer.decoded < 20 * len(ids)


@pytest.mark.parametrize("bad", ["", 3, None, b"x"], ids=repr)
def test_a_bad_stop_string_is_named(bad: Any) -> None:
    with pytest.raises(ValueError, match=f"stop string {bad!r} must"):
        TextStream(tokenizer_named("byte level"), ["ok", bad])


@pytest.mark.parametrize("bad", ["ab", b"ab", None, 3, {"a"}], ids=repr)
def test_stop_must_be_a_list(bad: Any) -> None:
    with pytest.raises(ValueError, match="stop must be a list of strings, not"):
        check_stop_strings(bad)


def test_a_stop_string_that_cannot_occur() -> None:
    pieces, _, stopped = stream(tokenizer_named("byte fallback"), [[5, 6]], ["\ud800"])
    assert stopped is None and len("".join(pieces)) == 2
