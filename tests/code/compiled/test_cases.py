"""The command that runs cases of ops as PTX."""

import pytest

from . import cases


def test_a_name_that_no_case_has_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["ptx_on_cpu", "relu2", "nosuchop"])
    with pytest.raises(SystemExit) as ended:
        cases.main()
    assert ended.value.code == 2
    assert "no case has relu2 and nosuchop in its name" in capsys.readouterr().err
