import json

import pytest

from shardwise.doors.cli.app import main
from shardwise.hardware import devices, links


def output(capfd: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["devices", *arguments])
    assert int(caught.value.code or 0) == code
    return capfd.readouterr()


def test_devices_lists_devices_and_links(capfd: pytest.CaptureFixture[str]) -> None:
    out, _ = output(capfd)
    first_words = [line.split()[0] for line in out.splitlines() if line.strip()]
    assert [word for word in first_words if word in devices()] == list(devices())
    assert [word for word in first_words if word in links()] == list(links())


def test_json_is_json_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    data = json.loads(output(capfd, "--json")[0])
    assert list(data["devices"]) == list(devices())
    assert list(data["links"]) == list(links())
    number = data["devices"]["h200"]["capacity_bytes"]
    assert number["value"] == devices()["h200"].capacity_bytes.value
    assert set(number) == {"value", "source", "kind"}
    assert "bf16_flops_per_s" not in data["devices"]["v100-32gb"]
    assert json.loads(output(capfd, "ib-400", "--json")[0])["bytes_per_s"]["value"] == 50e9


def test_one_device_shows_each_number_with_its_kind_and_source(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out, _ = output(capfd, "H100")
    assert out.startswith("h100-80gb: NVIDIA H100 SXM5 80 GB (also h100,")
    for name, number in devices()["h100-80gb"].known():
        line = next(line for line in out.splitlines() if line.startswith(f"{name} "))
        assert number.kind in line
        assert number.source in line
    assert next(line for line in out.splitlines() if line.startswith("context_bytes ")).split()[1:] == ["–", "unknown"]


def test_an_unknown_name_is_one_line_and_exit_code_2(capfd: pytest.CaptureFixture[str]) -> None:
    out, err = output(capfd, "h300", code=2)
    assert out == ""
    assert err.startswith("UnknownName: unknown device 'h300'; did you mean h")
    assert err.count("\n") == 1
