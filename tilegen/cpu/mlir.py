"""Read printed TTIR: one function as values, operations and blocks.

Triton 3.6 to 3.9 print the same syntax. Unknown operations keep their text; an unknown type raises
Unsupported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tilegen.errors import Unsupported

NAME = r"%[\w.$-]+(?:#\d+)?"
_LOC = r"loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_COMPARISONS = ("arith.cmpi", "arith.cmpf")


@dataclass(frozen=True)
class Type:
    """The type of a value: an element type, and the shape of a tile (empty for a scalar)."""

    elem: str
    """i1, i8, i16, i32, i64, f16, bf16, f32, f64, ptr or index."""
    shape: tuple[int, ...] = ()
    pointee: str = ""
    """Element type that a pointer points to."""


@dataclass(eq=False)
class Value:
    """An SSA value."""

    type: Type
    block: Block
    """The block that defines the value."""
    op: Op | None = None
    """The operation that defines the value; None for arguments of functions and blocks."""
    users: list[Op] = field(default_factory=list)


@dataclass(eq=False)
class Op:
    """An operation."""

    name: str
    text: str
    """Everything between the name and the types: operands, predicates, attributes, constants."""
    types: str
    """The text after the last colon."""
    block: Block
    line: int = 0
    """Line of the emitted file; 0 if Triton gives none."""
    operands: list[Value] = field(default_factory=list)
    results: list[Value] = field(default_factory=list)
    regions: list[Block] = field(default_factory=list)

    @property
    def result(self) -> Value:
        """The result of an operation with one result."""
        (result,) = self.results
        return result

    def attribute(self, name: str) -> str:
        """Return the text of an attribute; empty if there is none."""
        match = re.search(rf"\b{name} = ([^,}}>]+)", self.text)
        return match[1].split(":")[0].strip() if match else ""

    def refused(self, why: str) -> Unsupported:
        """Return an error for an operation that the compiler does not support."""
        return Unsupported(f"line {self.line} of the kernel: {self.name}: {why}")


@dataclass(eq=False)
class Block:
    """A block of operations: the body of a function, of a loop or of a branch."""

    label: str = ""
    args: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)

    @property
    def ends(self) -> list[Value]:
        """The values that the block yields."""
        last = self.ops[-1] if self.ops else None
        return last.operands if last and last.name == "scf.yield" else []


@dataclass
class MlirFunction:
    """A kernel."""

    name: str
    blocks: list[Block]

    @property
    def args(self) -> list[Value]:
        """The kernel's arguments."""
        return self.blocks[0].args


def parse(text: str, file: str = "") -> MlirFunction:
    """Parse the function of a printed module. `file` is the emitted file, whose lines operations
    get. Raises Unsupported."""
    return _Reader(text, file).function()


def parse_type(text: str) -> Type:
    """Parse a type. Raises Unsupported."""
    text = text.strip()
    if match := re.fullmatch(r"tensor<((?:\d+x)*)(.*)>", text):
        inner = parse_type(match[2])
        shape = tuple(int(size) for size in match[1].split("x") if size)
        return Type(inner.elem, shape, inner.pointee)
    if match := re.fullmatch(r"!tt\.ptr<(\w+)(?:, \d+)?>", text):
        return Type("ptr", (), match[1])
    if not re.fullmatch(r"i(1|8|16|32|64)|f(16|32|64)|bf16|index", text):
        raise Unsupported(f"type {text} is unknown to the CPU compiler")
    return Type(text)


def split(text: str) -> list[str]:
    """Split at commas outside of brackets, dropping outer parentheses."""
    text = text.strip()
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    parts, depth = [""], 0
    for i, letter in enumerate(text):
        closes = letter == ")" or (letter == ">" and text[i - 1] != "-")
        depth += (letter in "<(") - closes
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def _result_types(name: str, types: str, results: int) -> list[Type]:
    """Return the types of an operation's results. Each operation prints them in its own way."""
    if not results:
        return []
    if name in ("scf.for", "scf.if"):
        return [parse_type(part) for part in split(types)]
    if not types:  # `arith.constant true`
        return [Type("i1")]
    if " -> " in types:
        return [parse_type(part) for part in split(types.rpartition(" -> ")[2])]
    if " to " in types:
        return [parse_type(types.rpartition(" to ")[2])]
    parts = [parse_type(part) for part in split(types)]
    if name == "tt.addptr":
        return parts[:1]
    if name == "tt.load":
        return [Type(parts[0].pointee, parts[0].shape)]
    if name in _COMPARISONS:
        return [Type("i1", parts[0].shape)]
    return parts[-1:]


class _Reader:
    def __init__(self, text: str, file: str) -> None:
        self._file = file
        self._locations: dict[str, str] = {}
        self._lines: list[tuple[str, str]] = []  # text, and its last location
        for raw in text.splitlines():
            line = raw.strip()
            if match := re.match(r"(#\w+) = (loc\(.*\))$", line):
                self._locations[match[1]] = match[2]
            elif line:
                places = re.findall(_LOC, line)
                bare = re.sub(rf"\s*{_LOC}", "", line).strip()
                self._lines.append((bare, places[-1] if places else ""))
        self._at = 0
        self._known: dict[str, int] = {}

    def function(self) -> MlirFunction:
        heads = [i for i, (line, _) in enumerate(self._lines) if line.startswith("tt.func")]
        if len(heads) != 1:
            raise Unsupported(f"a kernel must be one function, got {len(heads)}")
        self._at = heads[0]
        head = re.match(
            r"tt\.func (?:public |private )?@(\w+)\((.*)\) (?:attributes|\{)",
            self._lines[self._at][0],
        )
        assert head, self._lines[self._at][0]
        arguments = re.sub(r" \{[^}]*\}", "", head[2])
        first = Block()
        scope: dict[str, Value] = {}
        for argument in split(arguments):
            name, type_ = argument.split(": ", 1)
            first.args.append(self._define(scope, name, parse_type(type_), first, None))
        self._at += 1
        return MlirFunction(head[1], self._blocks(scope, first))

    def _define(
        self, scope: dict[str, Value], name: str, type_: Type, block: Block, op: Op | None
    ) -> Value:
        scope[name] = Value(type_, block, op)
        return scope[name]

    def _blocks(self, scope: dict[str, Value], first: Block) -> list[Block]:
        """Read blocks up to the brace that closes their region."""
        blocks = [first]
        while not self._lines[self._at][0].startswith("}"):
            line, _ = self._lines[self._at]
            if match := re.match(r"(\^\w+)(?:\((.*)\))?:", line):
                block = blocks[-1]
                if block.ops or block.label:
                    block = Block()
                    blocks.append(block)
                block.label = match[1]
                for argument in split(match[2] or ""):
                    name, type_ = argument.split(": ", 1)
                    block.args.append(self._define(scope, name, parse_type(type_), block, None))
                self._at += 1
            else:
                blocks[-1].ops.append(self._op(scope, blocks[-1]))
        return blocks

    def _op(self, scope: dict[str, Value], block: Block) -> Op:
        line, place = self._lines[self._at]
        names: list[str] = []
        if match := re.match(rf"({NAME})(?::(\d+))? = (.*)", line):
            names = [match[1]]
            if match[2]:
                names = [f"{match[1]}#{i}" for i in range(int(match[2]))]
            line = match[3]
        head = re.match(r'"?([\w.]+)"?(.*)', line)
        assert head, line
        op = Op(head[1], head[2], "", block)
        inner = dict(scope)
        if op.name == "scf.for":
            self._for_head(op, scope, inner)
        while self._lines[self._at][0].endswith("{") or self._lines[self._at][0].endswith("({"):
            region = op.regions[0] if op.name == "scf.for" else Block()
            self._at += 1
            (body,) = self._one_block(op, self._blocks(inner, region))
            if op.name != "scf.for":
                op.regions.append(body)
        if op.regions:
            tail, place = self._lines[self._at]
            op.text = op.text.rstrip(" ({") + tail[1:].removeprefix(")")
        self._at += 1
        if op.name in ("scf.for", "scf.if"):
            op.types = op.text.rpartition("->")[2].partition(" : ")[0] if "->" in op.text else ""
        elif " : " in op.text:
            op.text, _, op.types = op.text.rpartition(" : ")
        if op.name != "scf.for":
            op.operands = [scope[name] for name in re.findall(NAME, op.text)]
        for value in op.operands:
            value.users.append(op)
        op.line = self._line_of(place)
        for name, type_ in zip(names, _result_types(op.name, op.types, len(names)), strict=True):
            op.results.append(self._define(scope, name, type_, block, op))
        return op

    def _one_block(self, op: Op, blocks: list[Block]) -> list[Block]:
        if len(blocks) != 1:
            raise op.refused(f"{len(blocks)} blocks in a region, expected one")
        return blocks

    def _for_head(self, op: Op, scope: dict[str, Value], inner: dict[str, Value]) -> None:
        """Read `%i = %first to %last step %step iter_args(%a = %start, ...) -> (types) : i32 {`.

        Operands are the bounds, the step and the starts. Arguments of the body are the counter and
        one value for each start.
        """
        names = re.findall(NAME, op.text)
        body = Block()
        op.regions.append(body)
        counter = op.text.rstrip(" {").rpartition(" : ")[2]
        body.args.append(self._define(inner, names[0], parse_type(counter), body, None))
        op.operands = [scope[name] for name in (*names[1:4], *names[5::2])]
        for name, start in zip(names[4::2], names[5::2], strict=True):
            body.args.append(self._define(inner, name, scope[start].type, body, None))

    def _line_of(self, place: str) -> int:
        """Return the line of the emitted file in a location, or in the locations of its callers."""
        if place in self._known:
            return self._known[place]
        self._known[place] = 0  # ends the recursion if a location refers to itself
        for file, line, name in self._parts(place):
            if name:
                line = self._line_of(self._locations.get(name, ""))
            elif self._file and file != self._file:
                continue
            if line:
                self._known[place] = line
                break
        return self._known[place]

    @staticmethod
    def _parts(place: str) -> Iterator[tuple[str, int, str]]:
        for match in re.finditer(r'"([^"]*)":(\d+):\d+|(#\w+)', place):
            yield match[1] or "", int(match[2] or 0), match[3] or ""
