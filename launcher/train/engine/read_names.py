"""Names that code reads, apart from what is only collected or logged: state under other names affects no training."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable
from types import CellType, ModuleType

# methods whose call as a statement does not read the container, functions that only log, and methods beside training
_COLLECT = frozenset({"append", "appendleft", "extend", "add", "update", "clear", "insert"})
_LOG = frozenset(
    {"print", "log", "debug", "info", "warn", "warning", "error", "exception", "critical", "add_scalar", "write"}
)
_BOOKKEEPING = frozenset({"__init__", "__repr__", "extra_repr", "state_dict", "load_state_dict"})
# in place of the class: attributes of any object, and variables
_ANY, _VARIABLES = "", "-"


def names_read(modules: Iterable[str]) -> NamesRead | None:
    """Return the names that the code of these modules reads; None if one has no source."""
    reads = NamesRead()
    for module in modules:
        try:
            reads.visit(ast.parse(inspect.getsource(sys.modules[module])))
        except (KeyError, OSError, TypeError, SyntaxError):
            return None
    return reads


class NamesRead(ast.NodeVisitor):
    """Names that code reads, and texts that may be names; attributes of ``self`` by class.

    A name that a function always sets before it reads it is not read there.
    """

    def __init__(self) -> None:
        self._names: set[tuple[str, str]] = set()
        self._set: frozenset[str] = frozenset()
        self._class: str | None = None
        self._self: str | None = None

    def covers(self, name: str, holder: object) -> bool:
        """Return whether the attribute or variable ``name``, with its place before it, is read."""
        name = name.replace(" ", ".").rpartition(".")[2]
        kinds = holder.__mro__ if isinstance(holder, type) else type(holder).__mro__
        places = {_ANY, *(kind.__name__ for kind in kinds)}
        if isinstance(holder, ModuleType | CellType):
            places.add(_VARIABLES)
        return any((place, name) in self._names for place in places)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before = self._class, self._self
        self._class, self._self = node.name, None
        self.generic_visit(node)
        self._class, self._self = before

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in _BOOKKEEPING:
            return
        before, self_before = self._set, self._self
        self._set = frozenset()  # an inner function runs later
        if self._self is None and self._class and node.args.args:
            self._self = node.args.args[0].arg
        for statement in node.body:
            self.visit(statement)
            if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                self._set |= _names(statement, ast.Store) - _names(statement.value, ast.Load)
        self._set, self._self = before, self_before

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        before, self._set = self._set, frozenset()
        self.generic_visit(node)
        self._set = before

    def visit_Expr(self, node: ast.Expr) -> None:
        match node.value:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in _LOG:
                return
            case ast.Call(func=ast.Attribute(value=ast.Attribute(value=holder), attr=method)) if method in _COLLECT:
                parts = [holder, *node.value.args, *(keyword.value for keyword in node.value.keywords)]
            case ast.Call(func=ast.Attribute(value=ast.Name(), attr=method)) if method in _COLLECT:
                parts = [*node.value.args, *(keyword.value for keyword in node.value.keywords)]
            case value:
                parts = [value]
        for part in parts:
            self.visit(part)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self.visit(target)
        self._visit_beside({ast.unparse(target) for target in node.targets}, node.value)

    def _visit_beside(self, targets: set[str], value: ast.expr) -> None:
        """Visit an assigned value apart from its own target: ``n = n + 1`` reads as little as ``n += 1``."""
        match value:
            case ast.BinOp(left=left, right=right):
                self._visit_beside(targets, left)
                self._visit_beside(targets, right)
            case ast.Attribute() | ast.Name() if ast.unparse(value) in targets:
                pass
            case _:
                self.visit(value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        of_self = isinstance(node.value, ast.Name) and node.value.id == self._self
        self._read(node.attr, node.ctx, (self._class or _ANY) if of_self else _ANY)
        self.visit(node.value)

    def visit_Name(self, node: ast.Name) -> None:
        self._read(node.id, node.ctx, _VARIABLES)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and node.value.isidentifier():
            self._names |= {(_ANY, node.value), (_VARIABLES, node.value)}

    def _read(self, name: str, context: ast.expr_context, of: str) -> None:
        if isinstance(context, ast.Load) and name not in self._set:
            self._names.add((of, name))


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """Return the names of attributes and variables that occur in ``context``."""
    found = set[str]()
    for each in ast.walk(node):
        match each:
            case ast.Attribute(attr=name, ctx=ctx) | ast.Name(id=name, ctx=ctx) if isinstance(ctx, context):
                found.add(name)
            case _:
                pass
    return found
