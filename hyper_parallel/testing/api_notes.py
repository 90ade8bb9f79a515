"""Notes that `api_table` cannot derive: additions, intended differences, and gaps.

Keys are torch's names, without the module.
"""

from __future__ import annotations

__all__ = ["DIFFERENT", "MORE", "NOT_HERE"]

NOT_HERE: dict[str, str] = {
    "DeviceMesh.abort": (
        "not needed: when a rank is lost, the others get a `CollectiveError` that names it, see [faults](faults.md)"
    ),
}

MORE: dict[str, str] = {
    "DTensor.redistribute": (
        "another mesh of the same ranks; without `placements` it is replicated. `async_op=True` overlaps where parts "
        "have one size"
    ),
    "DeviceMesh.mesh": "`ranks` is the same for NumPy",
    "DeviceMesh.get_group": "of dimensions that were flattened too, by name",
    "init_device_mesh": "`device_type` and `mesh_shape` may be left out: the platform's device, all ranks",
    "DeviceMesh": "made once: equal meshes are one object. Slices by index, `mesh[0]`",
    "DeviceMesh.size": "by name too",
    "CommDebugMode": "`events`, one by one; bytes; collectives on meshes and others",
    "CommDebugMode.get_comm_counts": 'by name, `counts["all_reduce"]`, and by torch\'s operations',
    "PrepareModuleInput": "`use_local_output=True` of inputs by keyword too",
    "Placement": "equal placements are one object; torch's are taken in their place, and equal them",
}

DIFFERENT: dict[str, str] = {
    "Partial": '`"band"`, `"bor"` and `"bxor"` are refused when it is made: no operation gives them',
    "rand": "the numbers of a single device, for any number of ranks; torch's depend on it",
    "randn": "as `rand`",
    "loss_parallel": (
        "logits sharded over classes need no gathering outside of it either; inside, targets may be plain tensors, and "
        "inside torch's own too"
    ),
    "register_sharding": (
        "a decorator of `op`, as torch's, for operations without a rule of their own: rules are not overridden. With "
        "`rule` as second argument, a rule by labels, for all meshes"
    ),
    "local_map": "`spmd_types` is not taken: it needs a package that checks types of its own",
    "implicit_replication": "contexts nest, and an exception leaves them as it found them",
    "CommDebugMode.generate_comm_debug_tracing_table": (
        "modules, directions, bytes and, from noise level 2 on, each collective; the operations between them are for "
        "the framework's profiler"
    ),
    "CommDebugMode.generate_json_dump": "as the table; the keys are torch's",
    "visualize_sharding": "text without another package; `use_rich` is not read",
}
