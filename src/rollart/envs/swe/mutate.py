"""Small bugs in Python source: one change in one place of one function, the rest of the text as it was.

Keeps true: a mutation is a splice of the source's own text, so comments and layout stay; the mutated text parses and
its syntax tree differs; the list depends on the source alone. Lambdas count to the function around them, nested
functions and methods for themselves; docstrings, decorators, annotations and f-strings are left alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "in": "not in", "not in": "in",
                "is": "is not", "is not": "is"}
_OPERATORS = {"+": "-", "-": "+", "*": "+", "/": "//", "//": "*", "%": "//", "**": "*", "&": "|", "|": "&", "^": "|",
              "<<": ">>", ">>": "<<"}
_BOOLEANS = {"and": "or", "or": "and"}
_CALLS = {"min": "max", "any": "all", "append": "extend", "startswith": "endswith", "lstrip": "rstrip",
          "upper": "lower", "floor": "ceil", "keys": "values", "find": "rfind", "split": "rsplit"}
_CALLS |= {new: old for old, new in _CALLS.items()}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_REMOVED = (ast.Assign, ast.AugAssign, ast.Raise, ast.Delete, ast.Break)


@dataclass(frozen=True)
class Mutation:
    """Bytes `start` to `end` of the source become `text`. function: qualified name, as in `__qualname__`."""

    function: str
    kind: str
    start: int
    end: int
    text: str


def mutations(source: str) -> list[Mutation]:
    """All mutations of a module's functions, in the order of the text. Raises SyntaxError."""
    return _Finder(source).found()


def mutate(source: str, *changes: Mutation) -> str | None:
    """The source with the changes made; None where they overlap, do not parse or change nothing."""
    data = source.encode()
    before = len(data)
    for change in sorted(changes, key=lambda m: -m.start):
        if change.end > before:
            return None
        data, before = data[:change.start] + change.text.encode() + data[change.end:], change.start
    try:
        return data.decode() if ast.dump(ast.parse(data)) != ast.dump(ast.parse(source)) else None
    except SyntaxError:
        return None


class _Finder:
    """`(kind, start, end, text)` of each change, by offsets in bytes: that is what `ast` counts in a line."""

    def __init__(self, source: str) -> None:
        self._tree, self._data = ast.parse(source), source.encode()
        self._lines = [0]
        for line in self._data.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def found(self) -> list[Mutation]:
        unique = {(start, end, text): Mutation(function, kind, start, end, text)
                  for function, node in _places(self._tree, "", "")
                  for kind, start, end, text in self._changes(node)}
        return [unique[key] for key in sorted(unique)]

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return (self._lines[node.lineno - 1] + node.col_offset, self._lines[node.end_lineno - 1] + node.end_col_offset)

    def _text(self, start: int, end: int) -> str:
        return self._data[start:end].decode()

    def _changes(self, node: ast.AST) -> Iterator[tuple[str, int, int, str]]:
        match node:
            case ast.Compare(left=left, comparators=right):
                yield from self._between("comparison", [left, *right], _COMPARISONS)
            case ast.BinOp(left=left, right=right):
                yield from self._between("operator", [left, right], _OPERATORS)
            case ast.BoolOp(values=values):
                yield from self._between("and or", values, _BOOLEANS)
            case ast.AugAssign(target=target, value=value):
                yield from self._between("operator", [target, value], {f"{k}=": f"{v}=" for k, v in _OPERATORS.items()})
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
                yield "sign dropped", *self._span(node), self._text(*self._span(operand))
            case ast.Constant(value=bool(value)):
                yield "constant", *self._span(node), str(not value)
            case ast.Constant(value=int(value)):
                yield "off by one", *self._span(node), str(value + 1)
                yield "off by one", *self._span(node), str(value - 1) if value else "-1"
            case ast.Slice(lower=lower, upper=upper):
                for bound, change in ((lower, "{} + 1"), (upper, "{} - 1")):
                    if isinstance(bound, ast.Name | ast.BinOp | ast.Call):
                        yield "off by one", *self._span(bound), change.format(self._text(*self._span(bound)))
            case ast.Call():
                yield from self._call(node)
            case ast.Continue():
                yield "break", *self._span(node), "break"
        if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Constant | ast.UnaryOp):
            yield "negated condition", *self._span(node.test), f"not ({self._text(*self._span(node.test))})"
        if isinstance(node, _REMOVED) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            yield "statement removed", *self._span(node), "pass"  # type: ignore[arg-type]

    def _between(self, kind: str, operands: list[ast.expr], swaps: dict[str, str]) -> Iterator[tuple[str, int, int, str]]:
        for left, right in zip(operands, operands[1:], strict=False):
            start, end = self._span(left)[1], self._span(right)[0]
            text = self._text(start, end)
            if (symbol := text.strip(" \t\r\n()\\")) in swaps:
                yield kind, start, end, text.replace(symbol, swaps[symbol], 1)

    def _call(self, node: ast.Call) -> Iterator[tuple[str, int, int, str]]:
        name = getattr(node.func, "id", "") or getattr(node.func, "attr", "")
        if name in _CALLS:
            end = self._span(node.func)[1]
            yield "other call", end - len(name.encode()), end, _CALLS[name]
        if any(isinstance(argument, ast.Starred) for argument in node.args):
            return
        spans = [self._span(argument) for argument in node.args]
        for (a, b), (c, d) in zip(spans, spans[1:], strict=False):
            yield "arguments swapped", a, d, self._text(c, d) + self._text(b, c) + self._text(a, b)
        if name == "range" and spans:
            yield "off by one", *spans[-1], f"{self._text(*spans[-1])} - 1"


def _places(node: ast.AST, prefix: str, function: str) -> Iterator[tuple[str, ast.AST]]:
    """(function, node) of each node that may change: the function it belongs to, "" outside of all."""
    for child in _children(node):
        if isinstance(child, ast.ClassDef):
            yield from _places(child, f"{prefix}{child.name}.", "")
        elif isinstance(child, _FUNCTIONS):
            yield from _places(child, f"{prefix}{child.name}.<locals>.", prefix + child.name)
        else:
            if function:
                yield function, child
            yield from _places(child, prefix, function)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, _FUNCTIONS):
        yield from (default for default in (*node.args.defaults, *node.args.kw_defaults) if default)
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        docstring = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
        yield from node.body[docstring:]
    elif not isinstance(node, ast.JoinedStr | ast.AnnAssign):
        yield from ast.iter_child_nodes(node)
