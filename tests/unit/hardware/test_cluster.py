"""Clusters: what is written is what is meant, and what cannot be read points at the character."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.base.errors import InvalidCluster, ShardwiseError
from shardwise.hardware import Cluster, cluster_of, device_of, devices, fabric_of, link_of, links

PORTS = sorted(link.name for link in links().values() if link.between_nodes)
counts = st.integers(1, 9_999_999)


@st.composite
def fabrics(draw: st.DrawFn) -> str:
    kind, _, speed = draw(st.sampled_from(PORTS)).rpartition("-")
    num_links = draw(st.none() | counts)
    return f"{kind}-{speed}" if num_links is None else f"{kind}-{num_links}x{speed}"


@given(num_nodes=counts, num_devices=counts, kind=st.sampled_from(sorted(devices())), fabric=fabrics())
def test_a_cluster_is_read_back_from_what_it_writes(num_nodes: int, num_devices: int, kind: str, fabric: str) -> None:
    several = num_nodes > 1
    text = f"{num_nodes}x{num_devices}x{kind}" + (f"@{fabric}" if several else "")
    cluster = cluster_of(text)
    assert (cluster.num_nodes, cluster.devices_per_node) == (num_nodes, num_devices)
    assert cluster.num_ranks == num_nodes * num_devices
    assert cluster.device == devices()[kind]
    assert cluster.fabric == (fabric_of(fabric) if several else None)
    assert cluster_of(str(cluster)) == cluster
    assert hash(cluster_of(str(cluster))) == hash(cluster)


@given(st.text(alphabet="0123456789xhab-@.i é\t", max_size=20))
def test_any_string_is_a_cluster_or_one_clear_line_and_a_mark(text: str) -> None:
    try:
        cluster = cluster_of(text)
    except InvalidCluster as error:
        first, *rest = str(error).split("\n")
        assert first
        assert len(rest) == 2
        assert rest[1].strip() == "^"
        assert rest[1].index("^") - 2 <= len(text)
    except ShardwiseError as error:
        assert str(error).startswith("unknown ")
        assert "\n" not in str(error)
    else:
        assert cluster_of(str(cluster)) == cluster


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ("", 0, "expected a number of devices"),
        ("h100-80gb", 0, "expected a number of devices"),
        ("-8xh100", 0, "expected a number of devices"),
        ("8h100", 1, "expected 'x' after 8"),
        ("8×h100", 1, "expected 'x' after 8"),
        ("8x", 2, "expected a kind of device"),
        ("0xh100", 0, "a number of devices is from 1 to 9,999,999"),
        ("2x00xh100", 2, "a number of devices is from 1 to 9,999,999"),
        ("123456789xh100", 0, "a number of devices is from 1"),
        ("2x8x4xh100", 4, "no third number"),
        ("8xh100 ", 6, "unexpected ' '"),
        ("8xh100@ib-400", 6, "one node has no links to others"),
        ("2x8xl4", 6, "what links nodes of l4 is not known"),
        ("2x8xh100@", 9, "expected a network"),
        ("2x8xh100@ib", 11, "expected '-' after ib"),
        ("2x8xh100@ib-", 12, "expected the Gb/s of a link"),
        ("2x8xh100@ib-8x", 14, "expected the Gb/s of a link"),
        ("2x8xh100@ib-0x400", 12, "a number of links is from 1"),
        ("2x8xh100@ib-8x400!", 17, "unexpected '!'"),
    ],
)
def test_a_string_that_is_no_cluster_points_at_the_character(text: str, position: int, message: str) -> None:
    with pytest.raises(InvalidCluster) as caught:
        cluster_of(text)
    first, shown, mark = str(caught.value).split("\n")
    assert message in first
    assert shown == f"  {text}"
    assert mark == " " * (2 + position) + "^"


def test_an_unknown_fabric_shows_the_nearest() -> None:
    with pytest.raises(ShardwiseError, match="unknown fabric 'ib-300'; did you mean ib-"):
        cluster_of("2x8xh100@ib-8x300")


def test_links_come_with_the_device() -> None:
    cluster = cluster_of("16x8xa100-40gb")
    assert cluster.link == link_of("nvlink-3")
    assert str(cluster.fabric) == "ib-8x200"
    assert cluster.fabric is not None
    assert cluster.fabric.bytes_per_s == 8 * 25e9
    assert cluster_of("8xh100").fabric is None
    assert cluster_of("4xcpu").link is None


def test_a_cluster_cannot_be_without_what_links_its_nodes() -> None:
    device = device_of("l4")
    with pytest.raises(InvalidCluster, match="2 nodes without a fabric"):
        Cluster(num_nodes=2, devices_per_node=4, device=device)
    with pytest.raises(InvalidCluster, match="one node with a fabric"):
        Cluster(devices_per_node=4, device=device, fabric=fabric_of("ib-400"))
    with pytest.raises(InvalidCluster, match="devices_per_node = 0: must be a whole number"):
        Cluster(devices_per_node=0, device=device)


FILE = """
num_nodes = 2
devices_per_node = 4

[device]
name = "our-h100"
like = "h100"
capacity_bytes = { value = 85_000_000_000, source = "nvidia-smi on node 3", kind = "measured" }

[fabric]
bytes_per_s = { value = 90e9, source = "ib_write_bw", kind = "measured" }
"""


def test_a_file_can_describe_what_no_catalogue_has(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(FILE)
    cluster = cluster_of(str(path))
    assert (cluster.num_nodes, cluster.devices_per_node, cluster.device.name) == (2, 4, "our-h100")
    assert cluster.device.capacity_bytes is not None
    assert cluster.device.capacity_bytes.value == 85_000_000_000
    assert cluster.device.bf16_flops_per_s == device_of("h100").bf16_flops_per_s
    assert cluster.link == link_of("nvlink-4")
    assert cluster.fabric is not None
    assert cluster.fabric.bytes_per_s == 90e9


def test_a_file_says_the_same_as_a_string(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('num_nodes = 16\ndevices_per_node = 8\ndevice = "h100"\nfabric = "ib-8x200"\n')
    assert cluster_of(str(path)) == cluster_of("16x8xh100-80gb@ib-8x200")
    path.write_text('devices_per_node = 8\ndevice = "l4"\nlink = "pcie-3"\n')
    assert cluster_of(str(path)).link == link_of("pcie-3")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "devices_per_node is missing"),
        ("device = 'h100'", "devices_per_node is missing"),
        ("devices_per_node = 8", "device is missing"),
        ("devices_per_node = 8\ndevice = 3", "device = 3: must be a name or a table"),
        ("devices_per_node = 8\ndevice = 'h101'", "unknown device 'h101'; did you mean h100"),
        ("devices_per_node = 0\ndevice = 'h100'", "devices_per_node = 0: must be a whole number"),
        ("devices_per_node = 8\nnum_nodes = 'x'\ndevice = 'h100'", "num_nodes = 'x': must be a whole number"),
        ("devices_per_node = 8\nnodes = 2\ndevice = 'h100'", "cluster: unknown key 'nodes'; did you mean num_nodes"),
        ("devices_per_node = 8\nnum_nodes = 2\ndevice = 'l4'", "2 nodes without a fabric"),
        ("devices_per_node = 8\ndevice = 'h100'\nfabric = 'ib-400'", "one node with a fabric (ib-400)"),
        ("devices_per_node = 8\ndevice = 'h100'\nlink = 3", "link = 3: must be a table"),
        ("devices_per_node = 8\n[device]\nname = 3", "device.name = 3: must be a name"),
        ("devices_per_node = 8\n[device]\nspeed = 3", "device: unknown key 'speed'"),
        ("devices_per_node", "is not TOML"),
    ],
)
def test_a_mistake_in_a_file_names_the_file_and_the_key(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(content)
    with pytest.raises(InvalidCluster) as caught:
        cluster_of(str(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidCluster, match="none.toml: cannot be read"):
        cluster_of(str(tmp_path / "none.toml"))
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    with pytest.raises(InvalidCluster, match="bytes.toml: is not text in UTF-8"):
        cluster_of(str(tmp_path / "bytes.toml"))
