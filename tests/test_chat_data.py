"""Chats as training data: what is learnt, against the tokenizer's own rendering."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TARGET
from tiny_tokenizer import byte_tokenizer

from peagle_jax import chat_data
from peagle_jax.chat_data import Prepared, write_chats
from peagle_jax.config import TargetConfig
from peagle_jax.training.dataset import Dataset
from peagle_jax.training.folders import DataError

# In the layout of ChatML; transformers marks what {% generation %} encloses.
BEGIN, END = "<|0|>", "<|1|>"
TEMPLATE = (
    "{% for m in messages %}"
    f"{BEGIN}{{{{ m.role }}}}\n"
    "{% if m.role == 'assistant' %}{% generation %}"
    f"{{{{ m.content }}}}{END}"
    "{% endgeneration %}{% else %}"
    f"{{{{ m.content }}}}{END}"
    "{% endif %}{{ '\\n' }}{% endfor %}"
    f"{{% if add_generation_prompt %}}{BEGIN}assistant\n{{% endif %}}"
)
SYSTEM = {"role": "system", "content": "be good"}
CHAT = [
    SYSTEM,
    {"role": "user", "content": "what is the end"},
    {"role": "assistant", "content": "ab ba,\n\nand a 中文 😀"},
    {"role": "user", "content": "and then"},
    {"role": "assistant", "content": "stop."},
]


def tokenizer_of(template: str = TEMPLATE) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def config_of(tokenizer: Any) -> TargetConfig:
    values = {**TARGET.to_json(), "eos_token_ids": tokenizer.convert_tokens_to_ids([END])}
    return TargetConfig.from_json(values)


def write(tmp_path: Path, *rows: Any, max_tokens: int = 500, **changes: Any) -> Prepared:
    path = tmp_path / "chats.jsonl"
    text = (row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
    tokenizer = changes.pop("tokenizer", tokenizer_of())
    config = config_of(tokenizer_of())
    return write_chats(tokenizer, config, path, tmp_path / "out", max_tokens=max_tokens, **changes)


def documents(tmp_path: Path) -> list[tuple[list[int], list[bool]]]:
    dataset = Dataset.read(tmp_path / "out")
    found = (dataset[i] for i in range(len(dataset)))
    return [(d.input_ids.tolist(), d.loss_mask.tolist()) for d in found]


def test_every_answer_is_a_document(tmp_path: Path) -> None:
    """The last turn's tokens as transformers marks them, the end of the turn included."""
    made = write(tmp_path, {"messages": CHAT})
    tokenizer, found = tokenizer_of(), documents(tmp_path)
    assert len(found) == made.documents == 2
    for turn, (ids, mask) in zip((2, 4), found, strict=True):
        marked = tokenizer.apply_chat_template(
            CHAT[: turn + 1], return_dict=True, return_assistant_tokens_mask=True
        )
        expected = np.asarray(marked["assistant_masks"], bool)
        begin = len(expected) - int(np.argmin(expected[::-1][1:])) - 1  # of the last answer
        expected[:begin] = False
        assert ids == marked["input_ids"][:-1]  # without the "\n" after the turn's end
        assert mask == expected[:-1].tolist()
        assert tokenizer.decode(np.asarray(ids)[mask]) == CHAT[turn]["content"] + END
    assert made.tokens == sum(len(ids) for ids, _ in found)
    assert made.supervised == sum(sum(mask) for _, mask in found)


def test_share_gpt(tmp_path: Path) -> None:
    """The same documents from the other format; a turn that comes first answers nothing."""
    write(tmp_path, {"messages": CHAT})
    expected = documents(tmp_path)
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    said = [{"from": names[m["role"]], "value": m["content"]} for m in CHAT]
    (tmp_path / "b").mkdir()
    write(tmp_path / "b", {"id": "x", "conversations": said})
    assert documents(tmp_path / "b") == expected
    (tmp_path / "c").mkdir()
    first = {"from": "gpt", "value": "the"}
    made = write(tmp_path / "c", {"conversations": [first, *said[1:3]]})
    assert made.documents == 1


def test_token_ids(tmp_path: Path) -> None:
    """As they are, cut where they are too long; what has nothing left to learn is dropped."""
    rows = [
        {"input_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 0, 1, 1, 1]},
        {"token_ids": [5, 6], "loss_mask": [False, True]},
        {"input_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 0, 0, 0, 1]},
    ]
    made = write(tmp_path, rows[0], "", *rows[1:], max_tokens=4, tokenizer=None)
    assert documents(tmp_path) == [
        ([1, 2, 3, 4], [False, False, True, True]),
        ([5, 6], [False, True]),
    ]
    assert made == Prepared(documents=2, tokens=6, supervised=3, cut=2, dropped=1)


def test_lines_end_where_files_say(tmp_path: Path) -> None:
    """Not where Unicode does; a byte-order mark is none of the text."""
    chat = [{"role": "user", "content": "a\u2028b\x85"}, {"role": "assistant", "content": "the"}]
    line = json.dumps({"messages": chat}, ensure_ascii=False)
    assert write(tmp_path, "\ufeff" + line).documents == 1


def test_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents stay whole and in order; a second run has nothing to do."""
    monkeypatch.setattr(chat_data, "SHARD_TOKENS", 5)
    rows = [{"input_ids": [n] * n, "loss_mask": [0] + [1] * (n - 1)} for n in (2, 3, 4, 7, 2)]
    write(tmp_path, *rows)
    assert len(list((tmp_path / "out" / "shards").iterdir())) == 4
    assert [ids for ids, _ in documents(tmp_path)] == [row["input_ids"] for row in rows]
    stamps = [p.stat().st_mtime_ns for p in (tmp_path / "out" / "shards").iterdir()]
    write(tmp_path, *rows)
    assert [p.stat().st_mtime_ns for p in (tmp_path / "out" / "shards").iterdir()] == stamps
    (tmp_path / "out" / "shards" / "00002.safetensors").unlink()
    write(tmp_path, *rows)
    assert len(documents(tmp_path)) == 5


BAD = [
    ("{", "no JSON"),
    ("[1]", "expected an object with either messages"),
    ({"messages": CHAT, "input_ids": [1]}, "expected an object with either"),
    ({"text": "hello"}, "expected an object with either"),
    ({"messages": []}, "messages must be a list of turns"),
    ({"messages": ["hi"]}, "a turn must be an object with role and content"),
    ({"messages": [{"role": "user"}]}, "must be an object with role and content"),
    ({"messages": [{"role": "user", "content": None}]}, "content must be text, got None"),
    ({"messages": CHAT[:2]}, "the assistant answers nothing"),
    ({"messages": CHAT[2:3]}, "the assistant answers nothing"),
    ({"conversations": [{"from": "bing", "value": "x"}]}, "a turn is from 'bing', not from one of"),
    ({"input_ids": [1, 2]}, "token ids need a loss_mask"),
    ({"input_ids": [1, 2], "loss_mask": [1]}, "2 token ids, but a loss_mask of 1"),
    ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "0 and 1 only"),
    ({"input_ids": [1, 2], "loss_mask": [0, 0]}, "its loss mask is empty"),
    ({"input_ids": [1, 96], "loss_mask": [0, 1]}, "token id 96 is outside the vocabulary of 96"),
    ({"input_ids": [1, True], "loss_mask": [0, 1]}, "token id True is outside"),
    ({"input_ids": [1], "loss_mask": [1]}, "at least two"),
]


@pytest.mark.parametrize(("row", "said"), BAD)
def test_bad_rows(row: Any, said: str, tmp_path: Path) -> None:
    """The line is named, and nothing is written."""
    good = {"input_ids": [1, 2], "loss_mask": [0, 1]}
    with pytest.raises(DataError, match=rf"chats\.jsonl, line 2: .*{said}"):
        write(tmp_path, good, row)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "line 1: .*no chat template"),
        ("{{ raise_exception('no systems') }}", "line 1: .*the chat template refuses it"),
        ("{{ messages | length }}{{ messages[-1].content }}", "does not render the prompt as"),
        (
            "{% if messages[-1].role == 'assistant' %}{{ raise_exception('late') }}{% endif %}a",
            "turn 2: the chat template refuses it: late",
        ),
    ],
)
def test_templates_that_do_not_serve(template: str | None, said: str, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=said):
        write(tmp_path, {"messages": CHAT}, tokenizer=tokenizer)


def test_bad_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found before any chat is looked at."""
    row = {"input_ids": [1, 2], "loss_mask": [0, 1]}
    write(tmp_path, row)
    monkeypatch.setattr(chat_data, "_documents", None)
    with pytest.raises(DataError, match="max_tokens was 500 and is 8"):
        write(tmp_path, row, max_tokens=8)
    with pytest.raises(DataError, match="chats was"):
        write(tmp_path, row, row)
    with pytest.raises(DataError, match="max_tokens must be at least 2"):
        write(tmp_path, row, max_tokens=1)
    config = config_of(tokenizer_of())
    with pytest.raises(DataError, match=r"cannot read .*nothing"):
        write_chats(None, config, tmp_path / "nothing", tmp_path / "x", max_tokens=9)
    (tmp_path / "latin").write_bytes(b'"\xe9"')
    with pytest.raises(DataError, match=r"cannot read .*latin"):
        write_chats(None, config, tmp_path / "latin", tmp_path / "x", max_tokens=9)
    monkeypatch.undo()
    with pytest.raises(DataError, match="nothing in it is to be learnt within 4 tokens"):
        (tmp_path / "d").mkdir()
        late = {"input_ids": [1] * 5, "loss_mask": [0] * 4 + [1]}
        write(tmp_path / "d", late, max_tokens=4)
