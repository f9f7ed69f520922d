"""Random bytes drawn in blocks: each piece once, whatever threads and forks there are."""

import os
from concurrent.futures import ThreadPoolExecutor

from loom import entropy
from loom.entropy import Entropy


def test_pieces_are_the_systems_random_bytes(monkeypatch):
    drawn = []

    def system(count):
        drawn.append(count)
        return bytes(at % 251 for at in range(count))

    monkeypatch.setattr(entropy.os, "urandom", system)
    draw = Entropy(12)
    block = bytes(at % 251 for at in range(12 * 1024))
    assert {draw() for _ in range(1024)} == {block[at : at + 12] for at in range(0, len(block), 12)}
    assert drawn == [12 * 1024]
    draw()
    assert drawn == [12 * 1024] * 2


def test_no_piece_is_given_out_twice_to_threads():
    draw = Entropy(16)
    with ThreadPoolExecutor(8) as pool:
        found = [
            piece
            for pieces in pool.map(lambda _: [draw() for _ in range(3000)], range(8))
            for piece in pieces
        ]
    assert len(set(found)) == len(found) == 24_000


def test_a_forked_child_shares_no_piece_with_its_parent():
    draw = Entropy(16)
    draw()
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:  # nothing but this: the child of a test runner must not go on
        os.write(writes, b"".join(draw() for _ in range(100)))
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as told:
        theirs = told.read()
    os.waitpid(child, 0)
    assert len(theirs) == 1600
    ours = {draw() for _ in range(1023)}
    assert not ours & {theirs[at : at + 16] for at in range(0, 1600, 16)}
