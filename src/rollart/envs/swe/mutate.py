"""Small bugs in Python source: one change in one place of one function, the rest of the text as it was.

Keeps true: a mutation is a splice of the source's own text, so comments and layout stay; the mutated text parses and
its syntax tree differs; the list depends on the source alone. Lambdas count to the function around them, nested
functions and methods for themselves; docstrings, decorators, annotations and f-strings are left alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

_COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "in": "not in", "not in": "in",
                "is": "is not", "is not": "is"}
_OPERATORS = {"+": "-", "-": "+", "*": "+", "/": "//", "//": "*", "%": "//", "**": "*", "&": "|", "|": "&", "^": "|",
              "<<": ">>", ">>": "<<"}
_CALLS = {"min": "max", "any": "all", "append": "extend", "startswith": "endswith", "lstrip": "rstrip",
          "upper": "lower", "floor": "ceil", "keys": "values", "find": "rfind", "split": "rsplit"}
_CALLS |= {new: old for old, new in _CALLS.items()}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_REMOVED = (ast.Assign, ast.AugAssign, ast.Raise, ast.Delete, ast.Break)

Splice = tuple[str, int, int, str]


class Mutation(NamedTuple):
    """Bytes `start` to `end` of the source become `text`. function: qualified name, as in `__qualname__`."""

    function: str
    kind: str
    start: int
    end: int
    text: str


def mutations(data: bytes) -> list[Mutation]:
    """All mutations of a module's functions, in the order of the text; none of what does not parse as UTF-8."""
    try:
        tree = ast.parse(data.decode())
    except (SyntaxError, ValueError):
        return []
    lines = [0, *accumulate(map(len, data.splitlines(keepends=True)))]

    def span(node: Any) -> tuple[int, int]:
        return lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset

    def text(start: int, end: int) -> str:
        return data[start:end].decode()

    def between(kind: str, operands: list[ast.expr], swaps: dict[str, str]) -> Iterator[Splice]:
        for left, right in pairwise(operands):
            gap = span(left)[1], span(right)[0]
            if (symbol := text(*gap).strip(" \t\r\n()\\")) in swaps:
                yield kind, *gap, text(*gap).replace(symbol, swaps[symbol], 1)

    def call(node: ast.Call) -> Iterator[Splice]:
        name = getattr(node.func, "id", "") or getattr(node.func, "attr", "")
        if name in _CALLS:
            yield "other call", span(node.func)[1] - len(name), span(node.func)[1], _CALLS[name]
        spans = [span(argument) for argument in node.args if not isinstance(argument, ast.Starred)]
        if len(spans) == len(node.args):
            for (a, b), (c, d) in pairwise(spans):
                yield "arguments swapped", a, d, text(c, d) + text(b, c) + text(a, b)
            if name == "range" and spans:
                yield "off by one", *spans[-1], f"{text(*spans[-1])} - 1"

    def changes(node: Any) -> Iterator[Splice]:
        match node:
            case ast.Compare(left=left, comparators=right):
                yield from between("comparison", [left, *right], _COMPARISONS)
            case ast.BinOp(left=left, right=right):
                yield from between("operator", [left, right], _OPERATORS)
            case ast.BoolOp(values=values):
                yield from between("and or", values, {"and": "or", "or": "and"})
            case ast.AugAssign(target=target, value=value):
                yield from between("operator", [target, value], {f"{k}=": f"{v}=" for k, v in _OPERATORS.items()})
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
                yield "sign dropped", *span(node), text(*span(operand))
            case ast.Constant(value=bool(value)):
                yield "constant", *span(node), str(not value)
            case ast.Constant(value=int(value)):
                yield from (("off by one", *span(node), str(value + step)) for step in (1, -1))
            case ast.Slice(lower=lower, upper=upper):
                yield from (("off by one", *span(bound), f"{text(*span(bound))} {step} 1") for bound, step in
                            ((lower, "+"), (upper, "-")) if isinstance(bound, ast.Name | ast.BinOp | ast.Call))
            case ast.Call():
                yield from call(node)
            case ast.Continue():
                yield "break", *span(node), "break"
        if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Constant | ast.UnaryOp):
            yield "negated condition", *span(node.test), f"not ({text(*span(node.test))})"
        if isinstance(node, _REMOVED) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            yield "statement removed", *span(node), "pass"

    unique = {splice[1:]: Mutation(function, *splice)
              for function, node in _places(tree, "", "") for splice in changes(node)}
    return [unique[key] for key in sorted(unique)]


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


def _places(node: Any, prefix: str, function: str) -> Iterator[tuple[str, ast.AST]]:
    """(function, node) of each node that may change: the innermost function around it, none outside of all."""
    children = [] if isinstance(node, ast.JoinedStr | ast.AnnAssign) else list(ast.iter_child_nodes(node))
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        docstring = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
        defaults = [] if isinstance(node, ast.ClassDef) else [*node.args.defaults, *filter(None, node.args.kw_defaults)]
        children = [*defaults, *node.body[docstring:]]
    for child in children:
        if isinstance(child, ast.ClassDef):
            yield from _places(child, f"{prefix}{child.name}.", "")
        elif isinstance(child, _FUNCTIONS):
            yield from _places(child, f"{prefix}{child.name}.<locals>.", prefix + child.name)
        else:
            if function:
                yield function, child
            yield from _places(child, prefix, function)
