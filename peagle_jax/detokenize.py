"""From token ids, in blocks of any size, to text: piece by piece, up to a stop string.

`tokenizers.decoders.DecodeStream` is not used: it shows characters that a later byte token takes
back, and it decodes everything again for as long as the text ends in an invalid byte.
"""

import re
from collections.abc import Sequence
from typing import Any

# What a decoder writes for bytes that are no character, or not yet.
REPLACEMENT = "\ufffd"
# What sentencepiece vocabularies spell the characters with that they lack.
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
# Tokens have at least one byte each, and no character has more than four.
MAX_TOKENS_OF_CHARACTER = 4


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Returns what the tokens say, without special tokens and ids that the tokenizer lacks.

    Spaces are never cleaned up: that would change text which has been shown already.
    """
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def check_stop_strings(stop: Sequence[str]) -> tuple[str, ...]:
    """Returns the stop strings as a tuple.

    Raises:
      ValueError: naming what is no stop string.
    """
    if isinstance(stop, str | bytes) or not isinstance(stop, Sequence):
        raise ValueError(f"stop must be a list of strings, not {stop!r}")
    for text in stop:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop string {text!r} must be a string of at least one character")
    return tuple(stop)


class TextStream:
    """The text of one sequence, as far as no later token can change it.

    Blocks do not matter: text, `stopped` and `num_tokens` are those of feeding one token at a time.
    Together the pieces are `decode` of the kept tokens, cut at the stop string. The work grows with
    the number of tokens, not with its square.

    A stop string counts from the token on that completes it. Where one token completes several,
    the one that begins first in the text wins, and the shortest of those that begin together.

    Attributes:
      num_tokens: the fed tokens that are kept: all, or those up to and including the one that
        completed the stop string.
      stopped: the stop string that ended the text, or None.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        *,
        include_stop_str_in_output: bool = False,
    ) -> None:
        """Starts an empty text.

        Args:
          tokenizer: a Hugging Face tokenizer of the `tokenizers` library.
          stop: strings that end the text where they occur.
          include_stop_str_in_output: cut the text after the stop string instead of before it.

        Raises:
          ValueError: naming what is no stop string.
        """
        self.num_tokens = 0
        self.stopped: str | None = None
        self._stop = check_stop_strings(stop)
        # Lone surrogates are allowed: they never occur.
        self._stop_bytes = [text.encode("utf-8", "surrogatepass") for text in self._stop]
        self._include_stop = include_stop_str_in_output
        self._decoder = _Decoder(tokenizer)
        self._hidden = ""  # final, but perhaps the beginning of a stop string
        self._ended = False

    def feed(self, ids: Sequence[int]) -> str:
        """Returns the text that has become safe to show with these tokens.

        It holds no unfinished character and nothing that may turn out to belong to a stop string.
        Tokens after a stop string or after `finish` are ignored.
        """
        pieces = []
        for token in ids:
            if self._ended:
                break
            self.num_tokens += 1
            self._hidden += self._decoder.push(int(token))
            pieces.append(self._show(self._text_of_open_run()))
        return "".join(pieces)

    def finish(self) -> str:
        """Returns the text still held back, when generation ends for another reason.

        Unfinished characters come as U+FFFD, which may complete a stop string that contains it.
        """
        if self._ended:
            return ""
        self._hidden += self._decoder.pending()
        piece = self._show("")
        if not self._ended:
            piece += self._hidden
        self._ended = True
        return piece

    def _show(self, open_text: str) -> str:
        """Returns what can be shown of the hidden text, and ends the stream at a stop string.

        Args:
          open_text: text after the hidden one which ends there if a stop string does, but may
            change if more tokens come.
        """
        text = self._hidden + open_text
        found = [(text.find(stop), len(stop), stop) for stop in self._stop if stop in text]
        if found:
            begin, length, self.stopped = min(found)
            self._ended = True
            return text[: begin + length if self._include_stop else begin]
        keep = max((_overlap(self._hidden, stop) for stop in self._stop), default=0)
        shown = len(self._hidden) - keep
        piece, self._hidden = self._hidden[:shown], self._hidden[shown:]
        return piece

    def _text_of_open_run(self) -> str:
        """Returns the text of the run of byte tokens at the end, if a stop string may end it."""
        run = self._decoder.run
        # A run with a stop string's bytes at its end is whole, or never will be.
        if run and any(run.endswith(stop[-len(run) :]) for stop in self._stop_bytes):
            return self._decoder.pending()
        return ""


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest proper prefix of `stop` that `text` ends with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class _Decoder:
    """Decodes one token at a time, each in a window of the few before it.

    Attributes:
      run: bytes of the run of byte tokens at the end. All its characters are pending, because one
        invalid byte makes U+FFFD of the whole run.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.run = bytearray()
        self._tokenizer = tokenizer
        self._window: list[int] = []  # what the next token's text can depend on
        self._done = 0  # characters of the window's text that have been returned
        probe = tokenizer.convert_tokens_to_ids("<0x41>")
        self._has_byte_tokens = probe is not None and decode(tokenizer, [probe]) == "A"

    def push(self, token: int) -> str:
        """Returns the text that became final with this token."""
        if (byte := self._byte(token)) is not None:
            self.run.append(byte)
            self._window.append(token)
            return ""
        alone = decode(self._tokenizer, [token])
        # Special and unknown tokens. A lone space is silent too, but only at the beginning.
        if not alone and not decode(self._tokenizer, [token] * 3):
            return ""
        self.run.clear()
        self._window.append(token)
        text = decode(self._tokenizer, self._window)
        if text.endswith(REPLACEMENT):  # only this last character can still become another
            final = text[self._done : -1]
            self._window = self._window[-MAX_TOKENS_OF_CHARACTER:]
            self._done = len(decode(self._tokenizer, self._window)) - 1
        else:
            final = text[self._done :]
            self._window = [token]
            self._done = len(alone)
        return final

    def pending(self) -> str:
        """Returns the text that would follow if no more tokens came."""
        return decode(self._tokenizer, self._window)[self._done :]

    def _byte(self, token: int) -> int | None:
        if not self._has_byte_tokens:
            return None
        match = BYTE_TOKEN.fullmatch(self._tokenizer.convert_ids_to_tokens(token) or "")
        return int(match[1], 16) if match else None
