"""What works on this backend: the memory kinds a replay could live in, tried out where a failure cannot end the caller.

Run as ``python -m conduit_jax.sharding.probe`` it tries every memory kind of the default backend and prints JSON: the reason
by tier, empty where storage was written, gathered and came back bit for bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from conduit_jax.sharding.topology import DEVICE, PINNED_HOST

_LIMIT_S = 180.0


def probe(limit_s: float = _LIMIT_S) -> dict[str, str]:
    """Return, by tier (``device``, ``pinned_host``), why a replay cannot live there; a tier that works is absent.

    The trial runs in a process of its own: on some backends an unsupported operation aborts instead of raising. On a GPU it
    takes memory as it needs it, beside what this process holds.
    """
    folder = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": path}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "conduit_jax.sharding.probe"],
            capture_output=True,
            text=True,
            timeout=limit_s,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {PINNED_HOST: f"the trial had not ended after {limit_s:.0f} s"}
    return _outcome(done.stdout, done.stderr, done.returncode)


def _outcome(output: str, errors: str, code: int) -> dict[str, str]:
    """Read a trial's answers; a tier whose trial began and gave none is the one that ended the process."""
    answers, begun = {}, None
    for line in output.splitlines():
        if not line.startswith("{"):
            continue
        answer = json.loads(line)
        begun = answer["tier"] if "begun" in answer else None
        if answer.get("reason"):
            answers[answer["tier"]] = answer["reason"]
    if code and begun is not None:
        answers[begun] = f"the trial ended with {code}: {_last_line(errors)}"
    elif code:
        answers[PINNED_HOST] = f"the trial could not run ({code}): {_last_line(errors)}"
    return answers


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no message"


def try_storage(memory_kind: str) -> str:
    """Write rows to storage in ``memory_kind``, gather them and compare; return what went wrong, empty for nothing."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from conduit_jax.sharding.memory import memory_kinds, storage_access
    from conduit_jax.sharding.mesh import single_device_mesh

    device = jax.devices()[0]
    if memory_kind not in memory_kinds(device):
        return f"{device} has no such memory"
    access = storage_access(memory_kind)
    kept = NamedSharding(single_device_mesh(device), PartitionSpec(), memory_kind=memory_kind)
    plain = NamedSharding(single_device_mesh(device), PartitionSpec())
    rows = np.arange(64 * 96, dtype=np.uint32).reshape(64, 96)
    slots = np.random.default_rng(0).permutation(256)[:64].astype(np.int32)
    try:
        make = jax.jit(lambda: jax.numpy.zeros((256, 96), jax.numpy.uint32), out_shardings=kept)
        write = jax.jit(access.scatter, donate_argnums=0, out_shardings=kept)
        read = jax.jit(access.gather, out_shardings=plain)
        storage = write(make(), jax.device_put(slots, plain), jax.device_put(rows, plain))
        got = np.asarray(read(storage, jax.device_put(slots, plain)))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    return "" if np.array_equal(got, rows) else "rows did not come back as they were written"


def main() -> None:
    """Try the tiers in turn, saying before each that it has begun."""
    for tier in (DEVICE, PINNED_HOST):
        print(json.dumps({"tier": tier, "begun": True}), flush=True)
        print(json.dumps({"tier": tier, "reason": try_storage(tier)}), flush=True)


if __name__ == "__main__":
    main()
