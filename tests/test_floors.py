"""The house keeps its floors: imports go down, what is confined stays confined, and no import cycle exists."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "megatron_simple"
FLOORS = {
    "config": 0, "zoo": 0, "arguments": 0, "checks": 0, "parallel": 1, "data": 1, "model": 2, "hf": 2, "checkpoint": 3,
    "training": 4, "analysis": 4, "pretrain": 5, "parity": 5,
}  # fmt: skip
CONFINED = {
    "deepspeed": ("training/engine.py",),
    "transformers": ("hf/", "checkpoint/"),
    "torch.distributed": ("parallel/",),
    "megatron_simple.data._native": ("data/",),
}


def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the package."""
    files = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def imports(path: Path, *, lazy: bool = True) -> Iterator[str]:
    """Every imported module and imported name, dotted; `lazy=False` leaves out imports inside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if not lazy and id(node) in inside:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = ".".join(path.relative_to(ROOT).parts[: -node.level])
                base = f"{package.replace('/', '.')}.{base}".rstrip(".")
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def room(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == PACKAGE and len(parts) > 1 else None


def test_every_room_has_a_floor() -> None:
    rooms = {room(module) for module in modules()} - {None}
    assert rooms <= set(FLOORS), rooms - set(FLOORS)


def test_imports_go_down() -> None:
    wrong = []
    for module, path in modules().items():
        here = room(module)
        for target in imports(path):
            there = room(target)
            if here is None or there is None or there == here or there not in FLOORS:
                continue
            same_floor_zero = FLOORS[here] == FLOORS[there] == 0
            if FLOORS[there] >= FLOORS[here] and not same_floor_zero:
                wrong.append(f"{module} ({FLOORS[here]}) imports {target} ({FLOORS[there]})")
    assert not wrong


def test_hugging_face_files_stand_alone() -> None:
    own = f"{PACKAGE}.hf"
    for path in sorted((ROOT / PACKAGE / "hf").glob("*.py")):
        foreign = [t for t in imports(path) if t.startswith(PACKAGE) and not t.startswith(own)]
        assert not foreign, path


def test_confined_packages() -> None:
    wrong = []
    for module, path in modules().items():
        place = path.relative_to(ROOT / PACKAGE).as_posix()
        for target in imports(path):
            for name, allowed in CONFINED.items():
                if (target == name or target.startswith(name + ".")) and not place.startswith(allowed):
                    wrong.append(f"{module} imports {target}")
    assert not wrong


def test_data_and_settings_need_no_torch() -> None:
    for module, path in modules().items():
        if room(module) in ("config", "zoo", "arguments", "checks", "data"):
            assert not [t for t in imports(path) if t.split(".")[0] == "torch"], module


def test_environment_is_read_in_one_place() -> None:
    allowed = {"parallel/mesh.py", "training/engine.py"}
    for path in modules().values():
        place = path.relative_to(ROOT / PACKAGE).as_posix()
        if place not in allowed:
            assert "environ" not in path.read_text(encoding="utf-8"), place


def test_no_global_statement() -> None:
    for path in modules().values():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Global)], path


def test_no_import_cycle() -> None:
    """Imports at module level, lazy ones left out, form no cycle."""
    files = modules()
    graph = {m: {t for t in imports(p, lazy=False) if t in files and t != m} for m, p in files.items()}
    state: dict[str, int] = {}

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert state.get(module) != 1, f"cycle: {' -> '.join((*trail, module))}"
        if state.get(module) == 2:
            return
        state[module] = 1
        for target in sorted(graph[module]):
            visit(target, (*trail, module))
        state[module] = 2

    for module in graph:
        visit(module, ())


def test_tools_are_thin() -> None:
    """A tool parses and calls: it defines no class."""
    for path in sorted((ROOT / "tools").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)], path
