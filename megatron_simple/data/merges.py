"""GPT-2's vocab.json and merges.txt: reading them, and when rank order alone decides the tokens."""

import json
from pathlib import Path

from megatron_simple.data.tokenizer_base import wrong_content


def gpt2_byte_letters() -> dict[str, int]:
    """GPT-2's letter for each byte -> the byte, in GPT-2's order: printable bytes first, then the rest from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}


def read_vocabulary(path: Path) -> dict[str, int]:
    """token -> id of a vocab.json; ValueError unless it is one object of distinct non-negative ids."""
    try:
        vocabulary = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        vocabulary = None
    if (
        not isinstance(vocabulary, dict)
        or not vocabulary
        or not all(isinstance(token_id, int) and token_id >= 0 for token_id in vocabulary.values())
    ):
        raise wrong_content(
            path, flag="--vocab-file", tokenizer_type="GPT2BPETokenizer", wanted="a JSON object of tokens and ids"
        )
    if len(set(vocabulary.values())) != len(vocabulary):
        raise ValueError(f"--vocab-file {path} gives one id to two tokens; copy the file again")
    return vocabulary


def read_merges(path: Path, *, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """The pairs of a merges.txt in rank order; ValueError names the line that is no merge of the vocabulary."""
    try:
        # Only "\n" ends a line: a token may hold other characters that Python would count as line ends.
        lines = path.read_bytes().decode("utf-8").split("\n")
    except UnicodeDecodeError:
        lines = ["\0"]
    merges = []
    for number, line in enumerate(lines, start=1):
        line = line.rstrip("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) == 2 and all(part in vocabulary for part in (*pair, "".join(pair))):
            merges.append((pair[0], pair[1]))
        elif not merges and not lines[0].startswith("#version"):
            raise wrong_content(path, flag="--merge-file", tokenizer_type="GPT2BPETokenizer", wanted="a list of merges")
        else:
            raise ValueError(
                f"--merge-file {path}:{number}: {line[:40]!r} does not join two tokens of --vocab-file to a third; "
                "the two files belong to different tokenizers or one is damaged"
            )
    return merges


def merges_follow_ranks(merges: list[tuple[str, str]]) -> bool:
    """Whether joining by the rank of the joined token gives exactly what the list of merges gives.

    It does when every joined token appears once and the merges applied to its own letters build it: any other split
    of that token can then never stand beside each other while text is being merged. A token (left, right) is built
    unless a pair across its seam merges before the two halves are complete; such a pair is found by undoing the
    merges of both halves along the seam, latest first.
    """
    rank_of = {pair: rank for rank, pair in enumerate(merges)}
    parts = {left + right: (rank, left, right) for rank, (left, right) in enumerate(merges)}
    if len(parts) != len(merges):
        return False
    letter = (-1, "", "")
    for rank, (left, right) in enumerate(merges):
        limit = rank
        while True:
            if rank_of.get((left, right), limit) < limit:
                return False
            left_rank, _, left_tail = parts.get(left, letter)
            right_rank, right_head, _ = parts.get(right, letter)
            if left_rank == right_rank == -1:
                break
            # The half that was joined last is undone first; a seam pair that comes before that join stops it. Of two
            # pairs of one rank the left one goes first: the seam is right of the left half and left of the right one.
            if left_rank > right_rank:
                left, limit = left_tail, left_rank
            else:
                right, limit = right_head, right_rank + 1
    return True
