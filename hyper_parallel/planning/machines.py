"""Machines and their speeds, for estimates of time. Extend the table with `register_machine`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hyper_parallel.debug.collective import Collective

__all__ = ["MACHINES", "Machine", "machine_of", "register_machine"]


@dataclass(frozen=True)
class Machine:
    """A device and its connections. All figures are the maker's best claims, so estimates from them are bounds that no
    program reaches.

    Attributes:
        name: name of the device.
        flops: bytes of an element -> floating point operations per second of matrix products.
        memory: bytes of memory.
        memory_bandwidth: bytes per second.
        devices: number of devices in a node.
        link_bandwidth: bytes per second that a device sends to other devices of its node.
        network_bandwidth: bytes per second that a device sends to other nodes.
        latency: minimum seconds of a collective, within a node and across nodes.
        source: source of the figures.
    """

    name: str
    flops: Mapping[int, float]
    memory: float
    memory_bandwidth: float
    devices: int
    link_bandwidth: float
    network_bandwidth: float
    latency: tuple[float, float] = (10e-6, 25e-6)
    source: str = ""

    def flops_of(self, itemsize: int) -> float:
        """Return the operations per second for elements of ``itemsize`` bytes. If that size is unknown, use the next
        larger size, or else the largest."""
        return self.flops[min((size for size in self.flops if size >= itemsize), default=max(self.flops))]

    def seconds_of(self, collective: Collective, within_node: bool) -> float:
        """Return the minimum seconds of a collective that runs alone."""
        bandwidth = self.link_bandwidth if within_node else self.network_bandwidth
        return self.latency[0 if within_node else 1] + collective.wire_bytes / bandwidth


#: Dense figures. Products of 8-byte elements run on tensor cores too, at 66.9 TFLOPS. Products of 4-byte elements run
#: on the other cores, which happen to reach the same, because TF32 is off by default. Element-wise float64 is half as
#: fast, but memory bandwidth limits it long before.
_HOPPER = {1: 1979e12, 2: 989.4e12, 4: 66.9e12, 8: 66.9e12}
#: name -> machine.
MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        Machine(
            name="H100",
            flops=_HOPPER,
            memory=80e9,
            memory_bandwidth=3.35e12,
            devices=8,
            link_bandwidth=450e9,
            network_bandwidth=50e9,
            source="NVIDIA H100 SXM5 datasheet, dense; 8-byte products on tensor cores, 4-byte ones without TF32; "
            "NVLink 4, 8 GPUs with one 400 Gbit/s adapter each",
        ),
        Machine(
            name="H200",
            flops=_HOPPER,
            memory=141e9,
            memory_bandwidth=4.8e12,
            devices=8,
            link_bandwidth=450e9,
            network_bandwidth=50e9,
            source="NVIDIA H200 SXM datasheet, otherwise as H100",
        ),
        Machine(
            name="Ascend 910B",
            flops={1: 640e12, 2: 320e12, 4: 75e12},
            memory=64e9,
            memory_bandwidth=1.6e12,
            devices=8,
            link_bandwidth=196e9,
            network_bandwidth=25e9,
            source="no datasheet is public: figures that circulate for the Atlas 800T A2 (320 TFLOPS fp16, 64 GB of "
            "HBM2e at 1.6 TB/s, HCCS 392 GB/s both ways, 200 Gbit/s RoCE a device); 4-byte products are a guess",
        ),
    )
}


def register_machine(machine: Machine) -> None:
    """Add a machine to the table, or replace the machine with its name.

    Example:
        >>> register_machine(Machine("toy", {4: 1e12}, 16e9, 1e12, 4, 1e11, 1e10))
        >>> machine_of("toy").devices
        4
        >>> del MACHINES["toy"]
    """
    MACHINES[machine.name] = machine


def machine_of(machine: Machine | str) -> Machine:
    """Return the machine with a name; case, spaces, dashes and underscores are ignored.

    Raises:
        ValueError: for a name that is not in the table.
    """
    if isinstance(machine, Machine):
        return machine

    def plain(name: str) -> str:
        return name.lower().replace(" ", "").replace("-", "").replace("_", "")

    for name, known in MACHINES.items():
        if plain(name) == plain(machine):
            return known
    raise ValueError(
        f"no machine is called {machine!r}: choose one of {', '.join(map(repr, MACHINES))}, or add yours with "
        "hyper_parallel.planning.register_machine"
    )
