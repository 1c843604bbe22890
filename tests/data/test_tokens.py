"""Token files: what is written is what is read; damaged ones end in one clear message; rows lose no token."""

from __future__ import annotations

import json
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from fullstride.data.documents import Place
from fullstride.data.loader import IGNORED, Loader
from fullstride.data.report import Report
from fullstride.data.token_parts import Parts
from fullstride.data.token_rows import TokenRows
from fullstride.data.tokens import Origin, TokenFile, vocabulary_hash
from fullstride.errors import ConfigError

ORIGIN = Origin(1000, "somewhere", "abc", 999)


def write(path: Path, documents: list[list[int]], masks: list[np.ndarray | None] | None = None) -> TokenFile:
    parts = Parts(path, ORIGIN, {})
    parts.resume(Report())
    parts.append([np.array(d, np.uint16) for d in documents], masks or [None] * len(documents), Place(1), Report())
    parts.finish()
    return TokenFile(path)


def numbered(lengths: list[int]) -> list[list[int]]:
    """Documents of ids that all differ, so that each can be followed."""
    ends = np.cumsum([0, *lengths])
    return [list(range(begin, end)) for begin, end in pairwise(ends)]


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    masks = [None, np.array([False, True, True, False])]
    file = write(tmp_path / "a.tokens", [[1, 2, 3], [4, 5, 6, 7]], masks)
    assert file.span(0, 7).tolist() == [1, 2, 3, 4, 5, 6, 7] and file.documents.tolist() == [0, 3, 7]
    assert file.origin == ORIGIN and file.tokens.dtype == np.uint16
    found = file.labels(2, 7)
    assert found is not None and found.tolist() == [True, False, True, True, False]
    other = load_file(tmp_path / "a.tokens")  # the library's own reader
    assert other["tokens"].tolist() == [1, 2, 3, 4, 5, 6, 7] and set(other) == {"tokens", "documents", "supervised"}
    assert [p.name for p in tmp_path.iterdir()] == ["a.tokens"]


def test_large_vocabularies_have_wider_tokens() -> None:
    assert (Origin(2**16, "", "", 0).dtype, Origin(2**16 + 1, "", "", 0).dtype) == ("U16", "U32")


def test_the_hash_is_of_tokens_and_ids() -> None:
    assert vocabulary_hash({"a": 0, "b": 1}) == vocabulary_hash({"b": 1, "a": 0})
    assert vocabulary_hash({"a": 0, "b": 1}) != vocabulary_hash({"a": 1, "b": 0})


def test_an_id_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "a.tokens", [[1, 2, 1000, 3]])
    assert file.span(0, 2).tolist() == [1, 2]
    with pytest.raises(ConfigError, match=r"a\.tokens: token 2 is 1000, but the vocabulary has 1000"):
        file.span(1, 4)


def test_other_files_are_refused(tmp_path: Path) -> None:
    for name, content in {"empty": b"", "text": b"Once upon a time there was a king", "zeros": bytes(64)}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match="no token file, or a damaged one"):
            TokenFile(tmp_path / name)
    with pytest.raises(ConfigError, match="cannot read"):
        TokenFile(tmp_path / "nothing")
    file = write(tmp_path / "good", [[1, 2]])
    changed = file.path.read_bytes().replace(b'"somewhere"', b"null       ")
    (tmp_path / "null").write_bytes(changed)
    with pytest.raises(ConfigError, match="tokenizer and tokenizer_hash must be text"):
        TokenFile(tmp_path / "null")
    (tmp_path / "huge").write_bytes(struct.pack("<Q", 2**60) + b"{}")
    with pytest.raises(ConfigError, match="its header would have"):
        TokenFile(tmp_path / "huge")


VALUES = st.one_of(st.none(), st.integers(-(2**70), 2**70), st.text(max_size=5), st.lists(st.integers(-3, 2**63)))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_damaged_files_end_in_one_message(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Bytes changed, cut off, put in; or a field of the header replaced: rows or a ConfigError, nothing else."""
    directory = tmp_path_factory.mktemp("fuzz")
    write(directory / "a", numbered([5, 9, 2]), [None, np.arange(9) % 2 == 0, None])
    content = bytearray((directory / "a").read_bytes())
    kind = data.draw(st.sampled_from(["flip", "cut", "insert", "field"]))
    at = data.draw(st.integers(0, len(content) - 1))
    if kind == "flip":
        content[at] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del content[at:]
    elif kind == "insert":
        content[at:at] = data.draw(st.binary(min_size=1, max_size=9))
    else:
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        name = data.draw(st.sampled_from(sorted(header)))
        field = data.draw(st.sampled_from(sorted(header[name])))
        header[name][field] = data.draw(VALUES)
        text = json.dumps(header).encode()
        content = struct.pack("<Q", len(text)) + text + content[8 + length :]
    (directory / "b").write_bytes(content)
    try:
        rows = TokenRows([TokenFile(directory / "b")], 4, packing=True)
        if len(rows):
            list(Loader(rows, 2, 0, 0).eval_batches())
    except ConfigError as error:
        assert str(directory / "b") in str(error)


def rows_of(rows: TokenRows) -> list[tuple[list[int], list[int], list[int]]]:
    found = []
    for row in range(len(rows)):
        inputs, targets, documents = np.zeros(8, np.int32), np.full(8, IGNORED, np.int32), np.zeros(8, np.int32)
        count = rows.write(row, inputs, targets, documents)
        assert sum(rows.lengths(row)) == count and (targets[count:] == IGNORED).all()
        found.append((inputs[:count].tolist(), targets[:count].tolist(), documents.tolist()))
    return found


def test_documents_in_a_row_do_not_see_each_other(tmp_path: Path) -> None:
    file = write(tmp_path / "a", numbered([3, 4, 10]))
    rows = TokenRows([file], 8, packing=True)
    assert rows_of(rows) == [
        ([0, 1, 2, 3, 4, 5, 6, 7], [1, 2, -100, 4, 5, 6, -100, 8], [0, 0, 0, 1, 1, 1, 1, 2]),
        ([8, 9, 10, 11, 12, 13, 14, 15], [9, 10, 11, 12, 13, 14, 15, 16], [0] * 8),
    ]
    assert [rows.lengths(0), rows.lengths(1)] == [[3, 4, 1], [8]]
    assert rows.where(1) == [f"{tmp_path / 'a'} tokens 8 to 15"] and rows.num_tokens == 16
    one_text = rows_of(TokenRows([file], 8, packing=False))
    assert one_text[0][1] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_document_that_ends_with_a_row_predicts_nothing_beyond(tmp_path: Path) -> None:
    rows = TokenRows([write(tmp_path / "a", numbered([8, 3]))], 8, packing=True)
    assert rows_of(rows) == [
        (list(range(8)), [1, 2, 3, 4, 5, 6, 7, -100], [0] * 8),
        ([8, 9, 10], [9, 10, -100], [0, 0, 0, 1, 1, 1, 1, 1]),
    ]


def test_labels_are_the_supervised_tokens(tmp_path: Path) -> None:
    masks: list[np.ndarray | None] = [np.array([False, False, True, True, False, True]), None]
    rows = TokenRows([write(tmp_path / "a", numbered([6, 3]), masks)], 8, packing=True)
    assert [targets for _, targets, _ in rows_of(rows)] == [[-100, 2, 3, -100, 5, -100, 7, 8]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), min_size=1, max_size=3), st.booleans())
def test_every_token_is_predicted_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[list[int]], packing: bool
) -> None:
    """All but the first of each document, or without packing of each file."""
    directory, files, expected, first = tmp_path_factory.mktemp("rows"), [], [], 0
    for number, sizes in enumerate(lengths):
        documents = [[first + i for i in document] for document in numbered(sizes)]
        first += sum(sizes)
        files.append(write(directory / str(number), documents))
        flat = [i for document in documents for i in document]
        expected += [i for d in documents for i in d[1:]] if packing else flat[1:]
    rows = TokenRows(files, 8, packing)
    found = [t for _, targets, _ in rows_of(rows) for t in targets if t != IGNORED]
    assert sorted(found) == sorted(expected)
    assert rows.num_tokens == sum(len(inputs) for inputs, _, _ in rows_of(rows))


def test_rows_that_are_held_out(tmp_path: Path) -> None:
    rows = TokenRows([write(tmp_path / "a", numbered([400])), write(tmp_path / "b", numbered([83]))], 8, packing=True)
    kept, held_out = rows.split(0.1, seed=1)
    assert (len(rows), len(kept), len(held_out)) == (61, 55, 6)
    assert sorted([*kept._chosen, *held_out._chosen]) == list(range(61))
    assert rows.num_tokens == kept.num_tokens + held_out.num_tokens
    assert held_out.digest() == rows.split(0.1, seed=1)[1].digest() != rows.split(0.1, seed=2)[1].digest()
