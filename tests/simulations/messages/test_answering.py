"""The reply to a simulated message: its bytes are those of its digests."""

import hashlib

import numpy as np

from atoll.simulations.messages.answering import Benches, Question
from atoll.task.content import Content, to_tensors
from atoll.tensors import safetensors_file


class Sharing:
    """A task that replies with arrays that it keeps, as one with threads of its own may."""

    sites = ("north",)

    def __init__(self):
        self.kept = {name: np.full(1000, 1.0) for name in ("a", "b")}

    def initial(self, seed):
        return {"w": np.zeros(1, np.float32)}

    def train(self, parameters, instructions):
        raise NotImplementedError("this task answers messages only")

    def message(self, kind, content, *, site):
        return Content({}, self.kept)


def test_an_array_that_changes_while_its_reply_is_written_has_one_value_in_bytes_and_digest(tmp_path, monkeypatch):
    task, hashed = Sharing(), safetensors_file.pieces_of

    def pieces_of(layout, tensors, piece_bytes):
        pieces = hashed(layout, tensors, piece_bytes)
        for array in task.kept.values():
            array += 1.0  # as another thread would, between the digest and the writing
        return pieces

    content = tmp_path / "content.safetensors"
    safetensors_file.write(content, to_tensors(Content({})))
    monkeypatch.setattr(safetensors_file, "pieces_of", pieces_of)
    question = Question("north", "train", "", 1, 0, content, None, tmp_path / "1.bin")
    answer = Benches(task, {}, 1).answer(question)
    data, position = question.out.read_bytes(), 0
    assert len(answer.pieces) == 3, "the plain values and two arrays"
    for piece in answer.pieces:
        part = data[position : position + piece.num_bytes]
        position += piece.num_bytes
        assert hashlib.sha256(part).hexdigest() == piece.sha256
    assert position == len(data)
