"""The table of what we need from SGLang: complete, true of the installed wheel, and loud when it is not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import sglang_plt
from sglang_plt.plugin.seams import SEAMS, SGLANG_VERSION, Seam, SeamError, check_seams

REGISTRY = "sglang.srt.mem_cache.registry"
PACKAGE = Path(sglang_plt.__file__).parent


def refused(seam: Seam) -> str:
    with pytest.raises(SeamError) as caught:
        check_seams((seam,))
    return str(caught.value)


def test_the_installed_wheel_has_every_seam():
    check_seams()


@pytest.mark.parametrize(
    ("seam", "problem"),
    [
        (Seam("sglang.no_such_module.symbol"), "sglang.no_such_module.symbol is missing"),
        (Seam(f"{REGISTRY}.no_such_symbol"), f"{REGISTRY}.no_such_symbol is missing"),
        (
            Seam(f"{REGISTRY}.TreeCacheBuildContext", members=("no_such_member", "__init__")),
            f"{REGISTRY}.TreeCacheBuildContext.no_such_member is missing",
        ),
        (
            Seam(f"{REGISTRY}.register_radix_cache_backend", parameters=("name", "no_such_parameter")),
            f"{REGISTRY}.register_radix_cache_backend takes no 'no_such_parameter'",
        ),
        (Seam("sglang.version.__version__", parameters=("x",)), "sglang.version.__version__ has no signature"),
    ],
)
def test_what_differs_is_named_with_version_and_remedy(seam: Seam, problem: str):
    message = refused(seam)
    assert f"differs: {problem}" in message
    assert f"made for SGLang {SGLANG_VERSION}, and the installed {SGLANG_VERSION}" in message
    assert f"install sglang=={SGLANG_VERSION}" in message
    assert "start the server without --radix-cache plt" in message


def test_another_version_has_another_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sglang.version.__version__", "9.9.9")
    message = refused(Seam(f"{REGISTRY}.no_such_symbol"))
    assert "the installed 9.9.9 differs" in message
    assert f"install sglang=={SGLANG_VERSION}, or a release of sglang-plt made for 9.9.9, or start" in message


def test_every_problem_is_reported_at_once():
    with pytest.raises(SeamError) as caught:
        check_seams((Seam("sglang.gone"), Seam(REGISTRY, members=("gone", "gone_too"))))
    assert str(caught.value).count("is missing") == 3


def imported_from_sglang(source: str) -> Iterator[str]:
    """Dotted paths that a module imports from SGLang when it runs; imports for type checkers do not count."""
    stack: list[ast.AST] = [ast.parse(source)]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            stack.extend(node.orelse)
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        assert not (isinstance(node, ast.Import) and any(a.name.split(".")[0] == "sglang" for a in node.names))
        stack.extend(ast.iter_child_nodes(node))


def test_the_table_is_complete():
    known = {seam.path for seam in SEAMS}
    for package in ("plugin", "cache", "host"):
        for path in (PACKAGE / package).rglob("*.py"):
            missing = set(imported_from_sglang(path.read_text())) - known
            assert not missing, f"{path} imports {missing}: add rows to SEAMS"


def test_every_hook_is_in_the_table():
    from sglang_plt.plugin import near_miss, options

    known = {f"{seam.path}.{member}" for seam in SEAMS for member in seam.members} | {seam.path for seam in SEAMS}
    assert {*options.HOOKS, *near_miss.HOOKS} <= known


def test_paths_are_unique():
    paths = [seam.path for seam in SEAMS]
    assert len(set(paths)) == len(paths)
