"""The command that runs cases of ops as PTX."""

import subprocess
import sys

import pytest

from ...harness.tracked import ROOT
from . import cases


def test_a_name_that_no_case_has_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["ptx_on_cpu", "relu2", "nosuchop"])
    with pytest.raises(SystemExit) as ended:
        cases.main()
    assert ended.value.code == 2
    assert "no case has relu2 and nosuchop in its name" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("times", "passes"), [(1, True), (1024, False)])
def test_approximations_may_have_the_documented_errors(times: int, passes: bool) -> None:
    """Errors of 2^-12 are seen."""
    command = [sys.executable, "-m", "tests.machines.ptx_on_cpu", f"--jitter={times}"]
    only = ["--arch", "sm_90", "test_geglu.TestGeglu ", "[scalar]", "float32"]
    done = subprocess.run([*command, *only], cwd=ROOT, capture_output=True, text=True, check=False)
    assert f"{int(passes)} of 1 cases pass" in done.stdout, done.stderr
