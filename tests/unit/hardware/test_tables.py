"""The tables that come with the package, and how a table is read."""

import re

import pytest

from shardwise.base.errors import InvalidCluster, UnknownName
from shardwise.hardware import KINDS, Sourced, device_of, devices, link_of, links
from shardwise.hardware.device import port_of, read_device, read_link

WANTED = [
    "a100-40gb", "a100-80gb", "a100-40gb-pcie", "a100-80gb-pcie", "a800-80gb", "h100-80gb", "h100-80gb-pcie",
    "h100-96gb-hbm2e", "h200", "gh200-96gb", "b200", "gb200", "b300", "mi300x", "mi325x", "l4", "l40s", "a10g",
    "rtx-a6000", "v100-16gb", "v100-32gb", "t4", "rtx-3090", "rtx-4090", "rtx-5090", "rtx-pro-6000", "cpu",
]  # fmt: skip


def test_every_number_has_a_source_and_a_known_kind() -> None:
    found = [(device.name, name, value) for device in devices().values() for name, value in device.known()]
    for link in links().values():
        found += [(link.name, "bytes_per_s", link.bytes_per_s)]
        found += [(link.name, "latency_seconds", link.latency_seconds)] if link.latency_seconds else []
    assert len(found) > 100
    for name, key, number in found:
        assert isinstance(number, Sourced), (name, key)
        assert len(number.source) > 5, (name, key)
        assert number.kind in KINDS, (name, key)


def test_the_catalogue_holds_what_people_train_on() -> None:
    assert list(devices()) == WANTED
    needed = {"capacity_bytes", "memory_bytes_per_s", "fp32_flops_per_s", "fp16_flops_per_s", "link", "host_link"}
    for device in devices().values():
        assert device.name == "cpu" or needed <= {name for name, _ in device.known()}, device.name


def test_a_device_has_less_memory_than_its_name_says() -> None:
    for device in devices().values():
        named = re.search(r"(\d+) GB$", device.title)
        if named and device.capacity_bytes:
            marketed_gib = int(named.group(1))
            assert 0.9 * marketed_gib * 10**9 < device.capacity_bytes.value < marketed_gib * 2**30 * 1.01, device.name
    assert devices()["h200"].capacity_bytes.value / 2**30 == pytest.approx(139.8, abs=0.05)


def test_names_and_aliases_are_one_namespace() -> None:
    spellings = [name for device in devices().values() for name in (device.name, *device.aliases)]
    assert len(set(spellings)) == len(spellings)
    assert not set(spellings) & set(links())


def test_links_that_devices_name_are_in_the_table() -> None:
    for device in devices().values():
        for named in (device.link, device.host_link):
            assert named is None or not link_of(named.value).between_nodes
        assert device.nic is None or port_of(device.nic.value).between_nodes


def test_a_fabrics_name_says_its_speed() -> None:
    for link in links().values():
        if link.between_nodes:
            gigabits = int(link.name.rpartition("-")[2])
            assert link.bytes_per_s.value == gigabits * 1e9 / 8, link.name


@pytest.mark.parametrize(("alias", "name"), [("h100", "h100-80gb"), ("A100", "a100-80gb"), ("h200-141gb", "h200")])
def test_an_alias_gives_the_device_by_its_own_name(alias: str, name: str) -> None:
    assert device_of(alias).name == name


def test_an_unknown_device_or_link_shows_the_nearest() -> None:
    with pytest.raises(UnknownName, match="unknown device 'h100-40gb'; did you mean .*a100-40gb"):
        device_of("h100-40gb")
    with pytest.raises(UnknownName, match="unknown link 'nvlink4'; did you mean nvlink-4"):
        link_of("nvlink4")
    with pytest.raises(UnknownName, match="unknown fabric 'nvlink-4'"):
        port_of("nvlink-4")


def test_a_peak_is_asked_for_by_dtype() -> None:
    assert device_of("a100").flops_per_s("bf16").value == 312e12
    assert device_of("v100").flops_per_s("bf16") is None
    with pytest.raises(UnknownName, match="unknown dtype 'fp64'; did you mean"):
        device_of("a100").flops_per_s("fp64")


GOOD = {"value": 1, "source": "a page", "kind": "measured"}


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (5, "x.capacity_bytes = 5: must be a table"),
        ({**GOOD, "unit": "GB"}, "x.capacity_bytes: unknown key 'unit'; known: value, source, kind"),
        ({"value": 1, "kind": "measured"}, "x.capacity_bytes.source is missing"),
        ({**GOOD, "source": " "}, "x.capacity_bytes.source = ' ': must say where"),
        ({**GOOD, "kind": "assumed"}, "x.capacity_bytes.kind = 'assumed': must be one of datasheet, measured, fitted"),
        ({**GOOD, "value": 1.5}, "x.capacity_bytes.value = 1.5: must be a whole number above 0"),
        ({**GOOD, "value": True}, "x.capacity_bytes.value = True: must be a whole number above 0"),
        ({**GOOD, "value": -1}, "x.capacity_bytes.value = -1: must be a whole number above 0"),
    ],
)
def test_a_number_that_is_not_one_is_refused_by_its_key(number: object, message: str) -> None:
    with pytest.raises(InvalidCluster, match=re.escape(message)):
        read_device("x", {"capacity_bytes": number}, key="x")


def test_other_mistakes_in_a_table_are_refused_by_their_keys() -> None:
    with pytest.raises(InvalidCluster, match="x: unknown key 'capacity'; did you mean capacity_bytes"):
        read_device("x", {"capacity": GOOD}, key="x")
    with pytest.raises(InvalidCluster, match="x.aliases = 'y': must be a list of names"):
        read_device("x", {"aliases": "y"}, key="x")
    with pytest.raises(InvalidCluster, match="x.link.value = 3: must be a name"):
        read_device("x", {"link": {**GOOD, "value": 3}}, key="x")
    with pytest.raises(InvalidCluster, match="y.bytes_per_s is missing"):
        read_link("y", {}, key="y")
    with pytest.raises(InvalidCluster, match="y.between_nodes = 1: must be a bool"):
        read_link("y", {"bytes_per_s": GOOD, "between_nodes": 1}, key="y")
    with pytest.raises(InvalidCluster, match="y.bytes_per_s.value = inf: must be a number above 0"):
        read_link("y", {"bytes_per_s": {**GOOD, "value": float("inf")}}, key="y")
