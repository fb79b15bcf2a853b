"""Compilation for H200 and B200 on a machine without a GPU.

JAX's CUDA plugin compiles against a description of the device; of NVIDIA's software it needs only
`ptxas`. `make compiler` puts both in a folder of their own (.cache/cuda): a plugin that is
installed beside JAX would look for a driver in every other program.

A kernel that a device cannot run aborts the process, so the tests run this in a process of its
own: `python programs.py DEVICE PROGRAM` prints what the compiler reports as JSON.
"""

from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

# Name, SMs, bytes/s, L2 bytes, GHz, bytes of memory, compute capability: NVIDIA's data sheets and
# the device descriptions in XLA (xla/backends/gpu/target_config/specs).
DEVICES = {
    "h200": ("NVIDIA H200", 132, 4_800_000_000_000, 52_428_800, 1.98, 151_397_597_184, 9),
    "b200": ("NVIDIA B200", 148, 7_672_320_000_000, 132_644_864, 1.965, 191_514_411_008, 10),
}


def sharding(device: str) -> NamedSharding:
    """Returns where arrays lie that a program for this device takes."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=_description(device), topology="1x1x1"
    )
    return NamedSharding(topologies.make_mesh(topology, (1,), ("x",)), PartitionSpec())


def on_device(device: str, tree: Any) -> Any:
    """Returns the shapes of a tree's arrays, placed on the device."""
    at = sharding(device)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), tree)


def _description(device: str) -> str:
    """Returns a `stream_executor.GpuTargetConfigProto` as text."""
    name, cores, bandwidth, l2, clock, memory, major = DEVICES[device]
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} feature_extension: ACCELERATED_FEATURES }}
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {major}.0a"
  device_address_bits: 64
  ecc_enabled: true
  name: "{name}"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""
