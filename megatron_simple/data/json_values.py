"""Cuts JSON into its values without parsing it, so that an array of any size is read value by value."""

import re
from collections.abc import Iterable, Iterator

_TOKEN = re.compile(rb'\\.|["\[\]{},\n]', re.DOTALL)


def split_values(chunks: Iterable[bytes]) -> Iterator[tuple[int, bytes, bool]]:
    """(line it starts on, its bytes, whether it is complete) of each value of an array, or of the objects that stand
    one after another: the first bracket decides which. Only the last can be incomplete, and is empty where nothing but
    the end of the array is missing. What is malformed inside a value is left to the parser."""
    line, depth = 1, 0
    base = None  # the depth between values: 1 inside an array, else 0
    in_string = False
    value = bytearray()
    for chunk in _whole_escapes(chunks):
        start = 0  # of what is not yet in `value`
        for match in _TOKEN.finditer(chunk):
            token = match.group()
            if token.endswith(b"\n"):
                line += 1
            elif token == b'"':
                in_string = not in_string
            if in_string or token in b'"\n':
                continue
            if base is None:
                base = 1 if token == b"[" else 0
            before = depth
            depth = max(depth + (token in b"[{") - (token in b"]}"), 0)
            if token in b"]}" and depth == base == 0:
                end = match.end()  # the bracket belongs to the object
            elif (token == b"," and depth == base == 1) or (base == 1 and 0 in (before, depth)):
                end = match.start()
            else:
                continue
            value += chunk[start:end]
            start = match.end()
            if stripped := bytes(value.strip()):
                yield line - value.lstrip().count(b"\n"), stripped, True
            value.clear()
        value += chunk[start:]
    if depth or value.strip():
        yield line - value.lstrip().count(b"\n"), bytes(value.strip()), depth == 0


def is_json_lines(head: bytes) -> bool | None:
    """Whether a .json file that begins with `head` has a record a line, told from its first line that is not blank:
    False for a "[" in front or a "{" alone, None where `head` is too short to tell."""
    first, newline, _ = head.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")
    if first.startswith(b"["):
        return False
    if first.rstrip() in (b"", b"{"):
        return False if newline else None
    return True


def _whole_escapes(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in chunks that never end between a backslash and the character it escapes."""
    held = b""
    for chunk in chunks:
        chunk = held + chunk
        backslashes = len(chunk) - len(chunk.rstrip(b"\\"))
        held = chunk[len(chunk) - backslashes % 2 :]
        yield chunk[: len(chunk) - backslashes % 2]
    if held:
        yield held
