import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_plt import __version__, cli
from sglang_plt.cli.errors import UserError


@pytest.fixture
def fake_command(monkeypatch):
    """Registers a command ``fake`` whose ``run`` is the given function."""

    def register(run):
        module = SimpleNamespace(NAME="fake", HELP="Fake.", add_arguments=lambda parser: None, run=run)
        monkeypatch.setitem(sys.modules, "fake_command", module)
        monkeypatch.setitem(cli.COMMANDS, "fake", "fake_command")

    return register


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_keeps_the_contract(name, capsys):
    module = importlib.import_module(cli.COMMANDS[name])
    assert name == module.NAME
    assert module.HELP
    assert "\n" not in module.HELP
    with pytest.raises(SystemExit) as exit_info:
        cli.main([name, "--help"])
    assert exit_info.value.code == 0
    assert f"usage: sglang-plt {name}" in capsys.readouterr().out


def test_help_lists_the_commands_and_imports_nothing_slow():
    script = (
        "import sys\nfrom sglang_plt.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print('slow:', sorted({'torch', 'numba', 'numpy', 'sglang', 'transformers', 'triton'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "slow: []" in done.stdout
    for name in cli.COMMANDS:
        assert f"    {name}" in done.stdout


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"sglang-plt {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["no-such-command"], "invalid choice: 'no-such-command'"),
        ([], "the following arguments are required: COMMAND"),
        (["demo-model", "a", "b"], "unrecognized arguments: b"),
        (["demo-model", "--wheel"], "argument --wheel: expected one argument (see: sglang-plt demo-model --help)"),
    ],
)
def test_a_wrong_command_line_is_one_line_on_stderr(argv, expected, capsys):
    assert cli.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("sglang-plt: error: ")
    assert expected in captured.err
    assert captured.err.count("\n") == 1


def test_the_status_of_a_command_is_the_status_of_the_program(fake_command):
    fake_command(lambda args: 7)
    assert cli.main(["fake"]) == 7


def test_a_user_error_is_one_line_and_status_2(fake_command, capsys):
    def run(args):
        raise UserError("found 3, expected 4: count again")

    fake_command(run)
    assert cli.main(["fake"]) == 2
    assert capsys.readouterr().err == "sglang-plt: error: found 3, expected 4: count again\n"


def test_ctrl_c_is_one_line_and_status_130(fake_command, capsys):
    def run(args):
        raise KeyboardInterrupt

    fake_command(run)
    assert cli.main(["fake"]) == 130
    assert capsys.readouterr().err == "sglang-plt: interrupted\n"


def test_a_bug_keeps_its_traceback(fake_command):
    def run(args):
        raise ZeroDivisionError

    fake_command(run)
    with pytest.raises(ZeroDivisionError):
        cli.main(["fake"])


def test_the_installed_script_runs():
    script = Path(sys.executable).with_name("sglang-plt")
    done = subprocess.run([script, "no-such-command"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
