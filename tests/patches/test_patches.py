"""Every patch applies to the pinned wheel on its own, and does through a public seam what we do through a hook."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_plt.plugin.seams import SGLANG_VERSION
from tests.tiny_model import REPO

DIRECTORY = REPO / "patches" / f"sglang-{SGLANG_VERSION}"
PATCHES = sorted(DIRECTORY.glob("*.patch"))
FIELDS = ("Subject: [PATCH] ", "\nWhy:\n", "\nHow:\n", "\nReplaces here:\n", "\nUpstream PR: ", "\nDrop when: ")
_TARGET = re.compile(r"^\+\+\+ b/(\S+)$", re.MULTILINE)
_NEW_FILE = re.compile(r"^--- /dev/null\n\+\+\+ b/(\S+)$", re.MULTILINE)

each_patch = pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)


def site_packages() -> Path:
    """Where the wheel lies, found without importing it."""
    return Path(str(importlib.metadata.distribution("sglang").locate_file("")))


def targets(patch: Path) -> list[str]:
    return _TARGET.findall(patch.read_text())


def copy_files(paths: list[str], root: Path) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        source = site_packages() / path
        if source.exists():
            shutil.copyfile(source, root / path)


def apply(patch: Path, root: Path) -> str:
    """``git apply`` knows no fuzz; outside a repository it applies to plain files."""
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(root.parent), "LC_ALL": "C"}
    done = subprocess.run(
        ["git", "apply", "--verbose", "--whitespace=error-all", str(patch)],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def overlay(paths: list[str], root: Path) -> None:
    """The wheel's package below ``root``: real copies of ``paths``, and links to everything beside them.

    Byte code is not linked where sources are patched, so that nothing is written into the wheel.
    """
    copy_files(paths, root)
    folders = {parent for path in paths for parent in Path(path).parents if parent != Path(".")}
    for folder in sorted(folders):
        for entry in (site_packages() / folder).iterdir():
            link = root / folder / entry.name
            if entry.name != "__pycache__" and not link.exists():
                link.symlink_to(entry)


def test_there_are_patches_for_the_pinned_version_only():
    assert PATCHES
    assert importlib.metadata.version("sglang") == SGLANG_VERSION
    assert [folder.name for folder in (REPO / "patches").iterdir() if folder.is_dir()] == [DIRECTORY.name]


def test_names_are_numbered_and_listed():
    readme = (REPO / "patches" / "README.md").read_text()
    for number, patch in enumerate(PATCHES, start=1):
        assert re.fullmatch(rf"{number:04d}(-[a-z]+){{2,}}", patch.stem), patch.stem
        assert patch.name in readme


def test_patches_touch_different_files():
    """So each of them can be sent, taken or dropped alone."""
    touched = [path for patch in PATCHES for path in targets(patch)]
    assert len(set(touched)) == len(touched)


@each_patch
def test_header_says_why_how_and_until_when(patch: Path):
    header, _, _ = patch.read_text().partition("\n---\n")
    positions = [header.find(field) for field in FIELDS]
    assert -1 not in positions, [field for field in FIELDS if field not in header]
    assert positions == sorted(positions)
    assert f"Applies to: sglang {SGLANG_VERSION}, on its own." in header


@each_patch
def test_applies_alone_without_offset_and_compiles(patch: Path, tmp_path: Path):
    paths = targets(patch)
    new = set(_NEW_FILE.findall(patch.read_text()))
    assert {path for path in paths if not (site_packages() / path).exists()} == new
    copy_files(paths, tmp_path)
    report = apply(patch, tmp_path)
    assert "offset" not in report
    for path in paths:
        source = (tmp_path / path).read_text()
        compile(source, path, "exec")
        assert path in new or source != (site_packages() / path).read_text()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What ``seams_at_work.py`` prints on a wheel with all patches, with our plug-in not loaded."""
    root = tmp_path_factory.mktemp("patched")
    overlay([path for patch in PATCHES for path in targets(patch)], root)
    for patch in PATCHES:
        apply(patch, root)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), str(REPO)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "SGLANG_PLUGINS": "portable_cpu",
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("seams_at_work.py")), str(tmp_path_factory.mktemp("scratch"))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert Path(result["sglang"]).is_relative_to(root)
    return result


def test_server_options(report: dict):
    found = report["server_options"]
    assert found["added"] == ["--plt-codec", "--plt-cold-bytes"]
    assert found["default_bookkeeping"] == []
    assert found["cli"] == {"codec": "int4", "cold_bytes": "4GiB"}
    assert found["cold_bytes"] == 4 << 30
    assert found["none_given"] == {}
    assert found["other_plugin"] == {}
    assert found["from_file"] == {"codec": "raw", "cold_bytes": "5"}
    assert found["engine"] == {"codec": "raw", "cold_bytes": 7}
    assert found["engine_backend"] == "plt"
    assert "plt_codec='raw'" in found["engine_call"]
    assert "already registered" in found["twice"]
    assert "model_path" in found["taken"]
    assert "plx_codec" in found["engine_typo"]


def test_hook_applied(report: dict):
    assert report["hook_applied"] == {"before": False, "there": True, "gone": False}


def test_radix_cache_is_a_flag_of_its_own(report: dict):
    assert report["alias"] == {"backend": "plt", "default": None}


def test_backend_validates_server_args(report: dict):
    found = report["validator"]
    assert found["unselected"] is None
    assert found["without"] is None
    assert found["calls_so_far"] == 0
    assert found["accepted"] is None
    assert found["refused"] == "--radix-eviction-policy=lfu is not served"
    assert found["seen"] == ["plt", "plt"]
